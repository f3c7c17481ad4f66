"""`prepare` runs a recipe: stage after stage, then the tokenizer, the token sets and the fates. Run again after an interruption,
it resumes where it stopped. Its output depends on the recipe and the files alone."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.data.build import build, cores
from shardwise.data.inputs import refuse_changed
from shardwise.data.plan import locked
from shardwise.data.prepare.executors import EXECUTORS, Local, Ray
from shardwise.data.prepare.fates import gather, write_fates
from shardwise.data.prepare.files import find_files
from shardwise.data.prepare.recipe import Recipe, TokenizerChoice
from shardwise.data.prepare.shuffle import KEYS
from shardwise.data.prepare.spill import DOCUMENTS, FINAL
from shardwise.data.prepare.stages import PLAN, WORK, Plan, Stage, files_beside, folder_of, missing, read_plan
from shardwise.data.prepare.steps import rule_of, shuffle_of
from shardwise.data.prepare.words import splitter
from shardwise.data.tokenizer import FILE, load_tokenizer
from shardwise.files import write_atomically
from shardwise.run.problems import Problem, UserError, install

TEXTS, SETS, STATISTICS, MIXTURE = "documents", "tokens", "statistics.json", "data.toml"
TOKENIZER = "tokenizer"
END = "<|endoftext|>"


@dataclass(frozen=True)
class Progress:
    """The progress of a stage."""

    stage: str
    done: int
    tasks: int
    seconds: float


Report = Callable[[Progress], None]


def begin(recipe: Recipe, root: Path, out: Path, restart: bool = False) -> Plan:
    """Check everything that can be checked before work starts, and write the plan into the folder."""
    problems: list[Problem] = []
    files = []
    try:
        files = find_files(recipe)
    except UserError as e:
        problems += e.problems
    checks: list[Callable[[], object]] = [
        *(partial(shuffle_of if step.shuffles else rule_of, step) for step in recipe.steps),
        partial(splitter, recipe.words),
        partial(_check_tokenizer, recipe),
    ]
    for check in checks:
        try:
            check()
        except UserError as e:
            problems += e.problems
    if problems:
        raise UserError(*problems)
    plan = Plan(recipe, files, str(root.resolve()), files_beside(recipe))
    _prepare_folder(out, plan.to_json(), restart)
    return plan


def _check_tokenizer(recipe: Recipe) -> None:
    if not recipe.tokenizer.train:
        load_tokenizer(recipe.tokenizer.path, recipe.tokenizer.end)
    elif recipe.tokenizer.train < 257:
        raise UserError(
            Problem(f"{recipe.tokenizer.train} is too few: 256 bytes and an end of document", "tokenizer.train")
        )


def _prepare_folder(out: Path, plan: str, restart: bool) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        held = sorted(path.name for path in out.iterdir())
        if held and PLAN not in held:
            raise UserError(Problem("holds other files; give a new or empty folder", "--out", str(out)))
        if restart and held:
            for name in (STATISTICS, MIXTURE, "statistics.html", PLAN):
                (out / name).unlink(missing_ok=True)
            for name in (WORK, TEXTS, SETS, TOKENIZER, "fates", "launch", "logs"):
                shutil.rmtree(out / name, ignore_errors=True)
        elif held:
            before = (out / PLAN).read_text(encoding="utf-8")
            if before != plan:
                raise UserError(
                    Problem(
                        f"{_difference(before, plan)}; use --restart to begin anew, or another --out", "--out", str(out)
                    )
                )
            return
        write_atomically(out / PLAN, plan.encode("utf-8"))
    except OSError as e:
        raise UserError(Problem(f"cannot be used: {e.strerror or e}", "--out", str(out))) from None


def _difference(before: str, now: str) -> str:
    try:
        old, new = json.loads(before), json.loads(now)
        if old["recipe"] != new["recipe"]:
            keys = [key for key in new["recipe"] if old["recipe"].get(key) != new["recipe"][key]]
            return f"holds work of another recipe ({', '.join(keys)} differ)"
        was, now_there = ({each["path"]: each for each in [*of["files"], *of["beside"]]} for of in (old, new))
        changed = [path for path, each in now_there.items() if was.get(path) != each]
        return f"holds work on other files ({', '.join(changed[:3]) or 'some are gone'})"
    except (ValueError, KeyError, TypeError):
        return "holds the work of another version of shardwise"


def prepare(
    recipe: Recipe,
    root: Path,
    out: Path,
    *,
    executor: str = "local",
    workers: int = 0,
    restart: bool = False,
    progress: Report = lambda progress: None,
) -> dict[str, Any]:
    """Run a whole recipe and return its statistics. File names are relative to `root`; 0 workers: one for each core."""
    if workers < 0:
        raise UserError(Problem(f"{workers} must be at least 1, or 0 for one on each core", "--workers"))
    with locked(out):
        plan = begin(recipe, root, out, restart)
        if (out / STATISTICS).exists():
            return {**json.loads((out / STATISTICS).read_text(encoding="utf-8")), "already": True}
        doing = EXECUTORS[executor](workers or cores())
        try:
            for stage in plan.stages():
                run_stage(plan, stage, out, doing, progress)
        finally:
            doing.close()
        return finish(plan, out, workers)


def run_stage(plan: Plan, stage: Stage, out: Path, executor: Local | Ray, progress: Report) -> None:
    """Run the remaining tasks of a stage. Files that later stages do not need are removed."""
    work = out / WORK
    todo = missing(work, stage)
    began, count = time.monotonic(), stage.tasks - len(todo)

    def done(number: int) -> None:
        nonlocal count
        count += 1
        progress(Progress(stage.name, count, stage.tasks, time.monotonic() - began))

    progress(Progress(stage.name, count, stage.tasks, 0.0))
    if todo:
        for draft in (work / stage.name).glob("*.tmp"):
            shutil.rmtree(draft, ignore_errors=True)
        executor.run((str(out), plan.digest(), stage.name), todo, done)
    if stage.kind == "map" and stage.number:
        for unit in plan.units:
            (folder_of(work, f"map-{stage.number - 1}", unit.number) / DOCUMENTS).unlink(missing_ok=True)
    elif stage.kind == "match":
        for unit in plan.units:
            (folder_of(work, f"map-{stage.number}", unit.number) / KEYS).unlink(missing_ok=True)


def do_share(out: Path, stage: str, share: int, count: int) -> None:
    """Run one worker's share of a stage, `share` of `count`, for workers that a scheduler starts."""
    plan = read_plan(out)
    known = {each.name: each for each in plan.stages()}
    if stage not in known:
        raise UserError(Problem(f'"{stage}" is no stage; there are {", ".join(known)}', "--stage"))
    todo = [number for number in range(known[stage].tasks) if number % count == share]
    Local(1).run((str(out), plan.digest(), stage), todo, lambda number: None)


def finish(plan: Plan, out: Path, workers: int) -> dict[str, Any]:
    """The work that needs all units: move the texts into place, then tokenizer, token sets, fates and statistics."""
    refuse_changed(plan.files)
    try:
        sets = _token_sets(plan, out, workers)
        write_fates(plan, out / WORK, out / "fates")
        found = gather(plan, out / WORK)
        found["sets"] = sets
        _write_mixture(plan, out, sets)
        write_atomically(out / STATISTICS, json.dumps(found, indent=1, ensure_ascii=False).encode("utf-8"))
        shutil.rmtree(out / WORK, ignore_errors=True)
    except OSError as e:
        message = f"cannot be written: {e.strerror or e}; finished work is kept for the same command"
        raise UserError(Problem(message, "--out", str(e.filename or out))) from None
    return {**found, "already": False}


def _token_sets(plan: Plan, out: Path, workers: int) -> dict[str, Any]:
    last = f"map-{len(plan.shuffles)}"
    (out / TEXTS).mkdir(exist_ok=True)
    texts: dict[int, list[Path]] = {number: [] for number in range(len(plan.recipe.sources))}
    for unit in plan.units:
        source = plan.files[unit.chunks[0].input].source
        written = folder_of(out / WORK, last, unit.number) / FINAL
        target = out / TEXTS / f"{plan.recipe.sources[source].name}-{unit.number:06d}.jsonl"
        if written.exists():
            os.replace(written, target)
        if target.exists() and target.stat().st_size:
            os.utime(target, ns=(0, 0))  # the plan of a token set contains its inputs' dates
            texts[source].append(target)
        else:
            target.unlink(missing_ok=True)
    choice = plan.recipe.tokenizer
    tokenizer: str | Path = choice.path
    if choice.train:
        tokenizer = out / TOKENIZER
        train_tokenizer([path for paths in texts.values() for path in paths], choice, out / TOKENIZER)
    found = {}
    for number, each in enumerate(plan.recipe.sources):
        if texts[number]:
            folder = out / SETS / each.name
            # File names without folders, so that the set is the same wherever it is built.
            names = [path.name for path in texts[number]]
            made = build(texts[number], folder, tokenizer=tokenizer, end=choice.end, workers=workers, source=names)
            facts = ("documents", "tokens", "text_bytes", "fingerprint")
            found[each.name] = {name: getattr(made.index, name) for name in facts}
    return found


def train_tokenizer(texts: Sequence[Path], choice: TokenizerChoice, folder: Path) -> None:
    """Train a byte-level BPE on the kept documents and write its `tokenizer.json` into a folder, if it is not there. The same texts
    produce the same file."""
    if (folder / FILE).exists():
        return
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ModuleNotFoundError:
        raise UserError(Problem(f"needs the tokenizers library: {install('prepare')}", "tokenizer.train")) from None
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=choice.train,
        special_tokens=[choice.end or END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample(texts, choice.train_bytes), trainer)
    folder.mkdir(exist_ok=True)
    write_atomically(folder / FILE, tokenizer.to_str().encode("utf-8"))


def sample(texts: Sequence[Path], most: int) -> Iterator[str]:
    """Documents from the beginning of every file in turn, up to `most` bytes, so that every source has its share."""
    share = max(1, most // max(1, len(texts)))
    for path in texts:
        taken = 0
        with open(path, "rb") as file:
            for line in file:
                if taken >= share:
                    break
                taken += len(line)
                yield json.loads(line)["text"]


def _write_mixture(plan: Plan, out: Path, sets: dict[str, Any]) -> None:
    """Write the `[data]` section of a run that draws from the sets in the recipe's proportions, if there is anything to draw: a run
    without sets would train on the built-in corpus."""
    drawn = [source for source in plan.recipe.sources if source.name in sets and source.weight]
    if not drawn:
        return
    names = ", ".join(json.dumps(str(out / SETS / source.name)) for source in drawn)
    weights = ", ".join(str(source.weight) for source in drawn)
    write_atomically(out / MIXTURE, f"[data]\nsets = [{names}]\nweights = [{weights}]\n".encode())
