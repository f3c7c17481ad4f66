"""What became of the documents: the effect of each step on a corpus, summed over the tasks, and the fate of every document, stored
as columns with one row per document in the order of the corpus. Rows are found by name, by step or by reason."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.data.prepare.spill import (
    ENDED,
    ENDED_ROW,
    EXAMPLES,
    KEPT,
    KEPT_ROW,
    NO_OTHER,
    READ,
    READ_ROW,
    ROWS,
    read_report,
    read_rows,
)  # fmt: skip
from shardwise.data.prepare.stages import Plan, folder_of, read_plan
from shardwise.files import sync
from shardwise.run.problems import Problem, UserError

REASONS = "reasons.json"
STAYS = 254
"""The `step` value of a kept document."""
COLUMNS = {
    "file": "<u4",
    "place": "<u8",
    "step": "u1",
    "reason": "<u4",
    "size": "<u4",
    "changed": "<u4",
    "other": "<u8",
}


def gather(plan: Plan, work: Path) -> dict[str, Any]:
    """For each step, its input in documents and characters, the removed ones by reason with examples, and the changed ones."""
    steps = [_empty(step.kind, step.settings) for step in plan.recipe.steps]
    reading = _empty("read", {})
    documents = kept = characters = 0
    for unit in plan.units:
        for stage in range(len(plan.shuffles) + 1):
            folder = folder_of(work, f"map-{stage}", unit.number)
            report = read_report(folder)
            for step, (count, size) in report["seen"].items():
                steps[int(step)]["documents"] += count
                steps[int(step)]["characters"] += size
            for step, (count, size) in report["changed"].items():
                steps[int(step)]["changed"] += count
                steps[int(step)]["characters_cut"] += size
            for key, (count, size) in report["count"].items():
                number, _, reason = key.partition(":")
                step = reading if int(number) == READ else steps[int(number)]
                entry = step["reasons"].setdefault(reason, {"documents": 0, "characters": 0, "examples": []})
                entry["documents"] += count
                entry["characters"] += size
                step["removed"] += count
                step["characters_removed"] += size
                entry["examples"] = (entry["examples"] + report["examples"][key])[:EXAMPLES]
        documents += len(read_rows(folder_of(work, "map-0", unit.number), ROWS, READ_ROW))
        last = read_rows(folder_of(work, f"map-{len(plan.shuffles)}", unit.number), KEPT, KEPT_ROW)
        kept += len(last)
        characters += int(last["size"].sum(dtype="int64"))
    reading["documents"] = documents
    for step in (reading, *steps):
        step["reasons"] = dict(sorted(step["reasons"].items(), key=lambda each: (-each[1]["documents"], each[0])))
    return {"documents": documents, "kept": kept, "characters_kept": characters, "steps": [reading, *steps]}


def _empty(kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    counts = dict.fromkeys(("documents", "characters", "removed", "characters_removed", "changed", "characters_cut"), 0)
    return {"kind": kind, "settings": settings, **counts, "reasons": {}}


def write_fates(plan: Plan, work: Path, folder: Path) -> None:
    """Combine the records of the tasks, unit by unit."""
    if folder.exists():
        return
    draft = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    starts = [0]
    for unit in plan.units:
        size = (folder_of(work, "map-0", unit.number) / ROWS).stat().st_size // READ_ROW.itemsize
        starts.append(starts[-1] + size)
    columns = {
        name: np.lib.format.open_memmap(draft / f"{name}.npy", "w+", dtype=np.dtype(kind), shape=(starts[-1],))
        for name, kind in COLUMNS.items()
        if starts[-1]
    }
    reasons: dict[str, int] = {"": 0}
    for unit in plan.units if columns else ():
        _write_unit(plan, work, unit.number, starts, columns, reasons)
    for column in columns.values():
        column.flush()
    (draft / REASONS).write_text(json.dumps(list(reasons), ensure_ascii=False), encoding="utf-8")
    for file in draft.iterdir():
        sync(file)
    os.rename(draft, folder)


def _write_unit(
    plan: Plan, work: Path, unit: int, starts: list[int], columns: dict[str, Any], reasons: dict[str, int]
) -> None:
    own = slice(starts[unit], starts[unit + 1])
    rows = read_rows(folder_of(work, "map-0", unit), ROWS, READ_ROW)
    columns["file"][own], columns["place"][own] = rows["file"], rows["place"]
    columns["other"][own] = NO_OTHER
    for stage in range(len(plan.shuffles) + 1):
        folder = folder_of(work, f"map-{stage}", unit)
        ended = read_rows(folder, ENDED, ENDED_ROW)
        at = starts[unit] + ended["row"].astype(np.int64)
        known = [reasons.setdefault(reason, len(reasons)) for reason in read_report(folder)["reasons"]]
        columns["step"][at], columns["size"][at] = ended["step"], ended["size"]
        columns["reason"][at] = np.array([0, *known], np.uint32)[ended["reason"].astype(np.int64) + 1]
        other = ended["other"]
        with_other = other != NO_OTHER
        first = np.array(starts, np.uint64)[(other[with_other] >> np.uint64(32)).astype(np.int64)]
        columns["other"][at[with_other]] = first + (other[with_other] & np.uint64(2**32 - 1))
    kept = read_rows(folder_of(work, f"map-{len(plan.shuffles)}", unit), KEPT, KEPT_ROW)
    at = starts[unit] + kept["row"].astype(np.int64)
    columns["step"][at], columns["changed"][at], columns["size"][at] = STAYS, kept["changed"], kept["size"]


@dataclass(frozen=True)
class Fate:
    """The fate of one document."""

    id: str
    kept: bool
    step: str
    """The step that removed it; "" if it is kept, "read" if it could not be read."""
    reason: str
    other: str
    """The document that it repeats."""
    changed: tuple[str, ...]
    """The steps that changed a kept document."""
    characters: int


class Fates:
    """The fates of a prepared corpus."""

    def __init__(self, out: str | Path) -> None:
        self._folder = Path(out) / "fates"
        try:
            self._reasons: list[str] = json.loads((self._folder / REASONS).read_text(encoding="utf-8"))
            self._plan = read_plan(Path(out))
        except (OSError, ValueError, KeyError) as e:
            message = f"holds no fates of documents ({type(e).__name__}): they are written at the end of `shardwise data prepare`"
            raise UserError(Problem(message, where=str(out))) from None
        self._columns = {name: self._column(name) for name in COLUMNS}

    def _column(self, name: str) -> Any:
        path = self._folder / f"{name}.npy"
        return np.load(path, mmap_mode="r") if path.exists() else np.empty(0, COLUMNS[name])

    def __len__(self) -> int:
        return len(self._columns["file"])

    def __getitem__(self, row: int) -> Fate:
        at = {name: int(column[row]) for name, column in self._columns.items()}
        steps = self._plan.recipe.steps
        kept = at["step"] == STAYS
        step = "" if kept else "read" if at["step"] == READ else steps[at["step"]].kind
        other = self.name(at["other"]) if at["other"] != NO_OTHER else ""
        changed = tuple(each.kind for number, each in enumerate(steps) if at["changed"] >> number & 1)
        return Fate(self.name(row), kept, step, self._reasons[at["reason"]], other, changed, at["size"])

    def name(self, row: int) -> str:
        """The name of a document."""
        return self._plan.name(int(self._columns["file"][row]), int(self._columns["place"][row]))

    def find(self, name: str) -> list[int]:
        """The rows of a document `FILE:PLACE`, or of all documents of a file."""
        file, colon, place = name.rpartition(":")
        if not colon or not place.isdigit():
            file, place = name, ""
        numbers = [
            number for number, known in enumerate(self._plan.names) if known == file or known.endswith(f"/{file}")
        ]
        if not numbers:
            raise UserError(
                Problem(f'there is no file "{file}"; there are {", ".join(self._plan.names[:5])}', where=name)
            )
        mask = np.isin(self._columns["file"], numbers)
        if place:
            mask &= self._columns["place"] == int(place)
        found = np.flatnonzero(mask).tolist()
        if not found:
            raise UserError(Problem("there is no document at this place of the file", where=name))
        return found

    def where(self, step: str = "", reason: str = "") -> Iterator[int]:
        """Rows removed at `step` ("kept": rows that were kept), with a reason that contains the text `reason`."""
        kinds = [each.kind for each in self._plan.recipe.steps]
        known = ["kept", "read", *kinds]
        if step and step not in known:
            raise UserError(
                Problem(f'"{step}" is no step of the recipe; there are {", ".join(dict.fromkeys(known))}', "--step")
            )
        numbers = {"kept": [STAYS], "read": [READ]}.get(step, [n for n, kind in enumerate(kinds) if kind == step])
        mask = np.isin(self._columns["step"], numbers) if step else np.ones(len(self), bool)
        if reason:
            mask &= np.isin(self._columns["reason"], [n for n, text in enumerate(self._reasons) if reason in text])
        return iter(np.flatnonzero(mask).tolist())
