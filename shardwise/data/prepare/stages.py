"""The stages of a recipe and their tasks. Consecutive per-document steps run together, unit by unit. A comparison of documents
ends a stage: units write keys, partitions find the repeats, and the next stage applies them.

A task is a pure function of the files of earlier stages. The worker that runs it, the order and repeated runs make no difference.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.data.inputs import Unit
from shardwise.data.prepare.files import File, text_bytes, units_of
from shardwise.data.prepare.keyed import Shuffle
from shardwise.data.prepare.readers import read
from shardwise.data.prepare.recipe import Recipe, Source, TokenizerChoice
from shardwise.data.prepare.shuffle import VERDICT, KeyWriter, pack, read_partition, verdicts_of_unit
from shardwise.data.prepare.spill import (
    FINAL,
    KEPT,
    KEPT_ROW,
    READ,
    READ_ROW,
    ROWS,
    VERDICTS,
    DocumentFile,
    Log,
    read_documents,
    task_folder,
)  # fmt: skip
from shardwise.data.prepare.steps import Rule, Step, rule_of, shuffle_of
from shardwise.data.prepare.words import Document, Vocabulary, splitter
from shardwise.data.tokenizer import BYTE
from shardwise.run.problems import Problem, UserError

PLAN, WORK = "plan.json", "work"


@dataclass(frozen=True)
class Stage:
    """Tasks that may run in parallel."""

    name: str
    kind: str  # "map", "match" or "join"
    number: int
    tasks: int


class Plan:
    """A recipe with its files, and the work to do. `beside`: the files that steps and the tokenizer read."""

    def __init__(self, recipe: Recipe, files: list[File], root: str, beside: list[dict[str, Any]]) -> None:
        self.recipe, self.files, self.root, self.beside = recipe, files, root, beside
        self.units = units_of(files)
        self.shuffles = [number for number, step in enumerate(recipe.steps) if step.shuffles]

    def to_json(self) -> str:
        """The whole plan as JSON, for its file."""
        said = dict(
            digest=self.recipe.digest(),
            root=self.root,
            recipe=asdict(self.recipe),
            files=[asdict(f) for f in self.files],
            beside=self.beside,
        )
        return json.dumps(said, indent=1, ensure_ascii=False)

    def digest(self) -> str:
        """A hash that changes when anything in the recipe or its files does."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=16).hexdigest()

    def stages(self) -> list[Stage]:
        """The stages in the order in which they run, one after another."""
        found = [Stage("map-0", "map", 0, len(self.units))]
        for number in range(len(self.shuffles)):
            found.append(Stage(f"match-{number}", "match", number, self.partitions(number)))
            if self.shuffle(number).joined:
                found.append(Stage(f"join-{number}", "join", number, 1))
            found.append(Stage(f"map-{number + 1}", "map", number + 1, len(self.units)))
        return found

    def shuffle(self, number: int) -> Shuffle:
        """A comparison."""
        return shuffle_of(self.recipe.steps[self.shuffles[number]])

    def partitions(self, number: int) -> int:
        """The number of partitions of a comparison's keys."""
        return self.shuffle(number).partitions(text_bytes(self.files))

    def span(self, number: int) -> tuple[int, int]:
        """The range of steps of a map stage, without the comparison after them."""
        start = self.shuffles[number - 1] + 1 if number else 0
        return start, self.shuffles[number] if number < len(self.shuffles) else len(self.recipe.steps)

    @cached_property
    def names(self) -> list[str]:
        """The names of the files."""
        return [os.path.relpath(file.path, self.root) for file in self.files]

    def name(self, file: int, place: int) -> str:
        """The name of a document: its file and its position there."""
        return f"{self.names[file]}:{place}"


def read_plan(folder: Path) -> Plan:
    """The plan stored in a folder."""
    said = json.loads((folder / PLAN).read_text(encoding="utf-8"))
    table = said["recipe"]
    recipe = Recipe(
        **{
            **table,
            "sources": tuple(Source(**{**each, "paths": tuple(each["paths"])}) for each in table["sources"]),
            "steps": tuple(Step(**each) for each in table["steps"]),
            "tokenizer": TokenizerChoice(**table["tokenizer"]),
        }
    )
    files = [File(**{**each, "row_groups": tuple(each["row_groups"])}) for each in said["files"]]
    return Plan(recipe, files, said["root"], said["beside"])


def files_beside(recipe: Recipe) -> list[dict[str, Any]]:
    """Path, size and date of the files that a recipe names beside its sources: test sets and a tokenizer."""
    named = [path for step in recipe.steps if step.kind == "decontaminate" for path in step.settings["paths"]]
    tokenizer = Path(recipe.tokenizer.path)
    if recipe.tokenizer.path != BYTE and not recipe.tokenizer.train:
        inside = sorted(path for path in tokenizer.iterdir() if path.is_file()) if tokenizer.is_dir() else [tokenizer]
        named += map(str, inside)
    found = ((path, os.stat(path)) for path in named)
    return [dict(path=path, bytes=stat.st_size, modified=stat.st_mtime_ns) for path, stat in found]


def folder_of(work: Path, stage: str, number: int) -> Path:
    """The output folder of a task."""
    return work / stage / f"{number:06d}"


def missing(work: Path, stage: Stage) -> list[int]:
    """Tasks of a stage that are still to be done."""
    try:
        done = set(os.listdir(work / stage.name))
    except FileNotFoundError:
        done = set()
    return [number for number in range(stage.tasks) if f"{number:06d}" not in done]


@cache
def _loaded(folder: Path, digest: str) -> tuple[Plan, dict[str, Stage]]:
    plan = read_plan(folder)
    return plan, {stage.name: stage for stage in plan.stages()}


@cache
def _rules(folder: Path, digest: str, number: int) -> tuple[list[Rule], Vocabulary]:
    plan, _ = _loaded(folder, digest)
    start, stop = plan.span(number)
    rules = [rule_of(step) for step in plan.recipe.steps[start:stop]]
    return rules, Vocabulary(splitter(plan.recipe.words))


def perform(folder: Path, digest: str, name: str, number: int) -> None:
    """Run one task. `digest` distinguishes the plan from an earlier one in the same folder."""
    plan, stages = _loaded(folder, digest)
    work = folder / WORK
    stage, target = stages[name], folder_of(work, name, number)
    if target.is_dir():
        return
    with task_folder(target) as draft:
        if stage.kind == "map":
            _map(plan, stage, work, draft, plan.units[number], *_rules(folder, digest, stage.number))
            return
        shuffle = plan.shuffle(stage.number)
        if stage.kind == "match":
            folders = (folder_of(work, f"map-{stage.number}", unit.number) for unit in plan.units)
            found = shuffle.match(read_partition(folders, number, shuffle.dtype))
        else:
            files = sorted((work / f"match-{stage.number}").glob(f"*/{VERDICTS}"))
            found = shuffle.join([np.fromfile(path, VERDICT) for path in files])
        (draft / VERDICTS).write_bytes(found.tobytes())


Item = tuple[int, int, dict[str, Any], str]
"""A document: its row, a bit mask of the steps that changed it, its metadata, its text."""


def _map(
    plan: Plan, stage: Stage, work: Path, draft: Path, unit: Unit, rules: list[Rule], vocabulary: Vocabulary
) -> None:
    recipe, first = plan.recipe, plan.span(stage.number)[0]
    log = Log(draft, len(recipe.steps))
    last = stage.number == len(plan.shuffles)
    shuffle = None if last else plan.shuffle(stage.number)
    partitions = 0 if last else plan.partitions(stage.number)
    keys = KeyWriter(draft, shuffle.dtype, partitions) if shuffle else None
    onward = None if last else DocumentFile(draft)
    final = open(draft / FINAL, "w", encoding="utf-8", newline="\n") if last else None  # noqa: SIM115
    kept = open(draft / KEPT, "wb") if last else None  # noqa: SIM115
    source = _read(plan, unit, draft, log) if stage.number == 0 else _resume(plan, stage, work, unit, log)
    for row, changed, meta, text in source:
        vocabulary.make_room()
        document = Document(text, vocabulary, meta)
        for step, rule in enumerate(rules, first):
            before = document.text
            log.came(step, len(before))
            reason = rule(document)
            if not reason and not document.text.strip():
                reason = "nothing left"
            if reason:
                log.ended(row, step, reason, before, len(before), meta["name"])
                break
            if document.text is not before and document.text != before:
                changed |= 1 << step
                log.changed(step, len(before), len(document.text))
        else:
            if shuffle and keys and onward:
                log.came(plan.shuffles[stage.number], len(document.text))
                where, records = shuffle.keys(document, partitions)
                records["id"] = pack(unit.number, row)
                keys.add(where, records)
                onward.write(row, changed, document.meta, document.text)
            elif final and kept:
                known = {key: value for key, value in document.meta.items() if key not in ("name", "form", "id")}
                said = {"id": document.meta["name"], "text": document.text, **known}
                final.write(json.dumps(said, ensure_ascii=False) + "\n")
                kept.write(np.array([(row, changed, len(document.text))], KEPT_ROW).tobytes())
    for file in (keys, onward, final, kept):
        if file:
            file.close()
    log.close()


def _read(plan: Plan, unit: Unit, draft: Path, log: Log) -> Iterator[Item]:
    row = 0
    with open(draft / ROWS, "wb") as rows:
        for chunk in unit.chunks:
            file = plan.files[chunk.input]
            field = plan.recipe.sources[file.source].field
            for found in read(file, chunk, field, plan.recipe.longest):
                # Rows of Parquet are numbered within their row group.
                place = found.place if file.kind != "parquet" else pack(chunk.start, found.place)
                rows.write(np.array([(chunk.input, place, min(found.size, 2**32 - 1))], READ_ROW).tobytes())
                name = plan.name(chunk.input, place)
                wrong = found.wrong or ("" if found.text.strip() else "an empty document")
                if found.wrong and plan.recipe.bad == "stop":
                    raise UserError(
                        Problem(
                            f'{found.wrong}{found.detail}; bad = "skip" in the recipe goes on without it', where=name
                        )
                    )
                if wrong:
                    log.ended(row, READ, wrong, found.text, len(found.text), name)
                else:
                    yield row, 0, {**found.meta, "name": name}, found.text
                row += 1


def _resume(plan: Plan, stage: Stage, work: Path, unit: Unit, log: Log) -> Iterator[Item]:
    """The documents that the comparison before this stage keeps, with its changes to their text."""
    number, shuffle = plan.shuffles[stage.number - 1], plan.shuffle(stage.number - 1)
    folder = work / (f"join-{stage.number - 1}" if shuffle.joined else f"match-{stage.number - 1}")
    verdicts = verdicts_of_unit(sorted(folder.glob(f"*/{VERDICTS}")), unit.number)
    rows = (verdicts["id"] & np.uint64(2**32 - 1)).astype(np.int64)
    at = 0
    for row, changed, meta, text in read_documents(folder_of(work, f"map-{stage.number - 1}", unit.number)):
        start = at
        while at < len(rows) and rows[at] == row:
            at += 1
        if start < at:
            reason, left = shuffle.apply(text, verdicts[start:at])
            if reason:
                log.ended(row, number, reason, text, len(text), meta["name"], int(verdicts["other"][start]))
                continue
            changed |= 1 << number
            log.changed(number, len(text), len(left))
            text = left
        yield row, changed, meta, text
