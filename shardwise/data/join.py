"""Joins the workers' outputs of units into shards, in the order of the inputs, as soon as they are ready."""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.data.encode import Job, UnitResult
from shardwise.data.inputs import Unit
from shardwise.data.shard_writer import ShardWriter
from shardwise.data.shards import DTYPES, ENDS, FILES_OF_KIND, LABELS, MARGINS, PROMPTS, ROW_ENDS, ROWS, SKIPPED, Index
from shardwise.run.problems import Problem, UserError

_MOST_NAMED = 10


class Joiner:
    """Joins the outputs of units, in order, as soon as they are ready. Outputs that are in a finished shard are removed, so the
    work folder stays small."""

    def __init__(self, job: Job, writer: ShardWriter, units: Sequence[Unit]) -> None:
        self.job = job
        self.writer = writer
        self.units = units
        self.done: dict[int, UnitResult] = {}
        self._next = 0
        self._offset = 0  # tokens in units before the next
        self._written = writer.finished
        self._unneeded: deque[tuple[int, int]] = deque()  # units, with the tokens up to their ends
        self._find_done()

    def _find_done(self) -> None:
        itemsize = DTYPES[self.writer.dtype].itemsize
        behind = 0.0  # tokens in earlier units; infinite if one of them is not done
        for number in (unit.number for unit in self.units):
            if done := self.job.record(number):
                sizes = {"ends": done.documents * ENDS.itemsize}
                if behind + done.tokens > self.writer.finished:  # they are in no finished shard
                    sizes |= {"tokens": done.tokens * itemsize} | ({"mask": done.tokens} if self.writer.marked else {})
                if all(_size(self.job.file(number, name)) == size for name, size in sizes.items()):
                    self.done[number] = done
            behind += done.tokens if done and number in self.done else math.inf

    def missing(self) -> list[Unit]:
        return [unit for unit in self.units if unit.number not in self.done]

    def add(self, unit: Unit, done: UnitResult) -> None:
        self.done[unit.number] = done
        self.advance()

    def advance(self) -> None:
        """Write every unit that is next in order."""
        while done := self.done.get(self._next):
            stop = self._offset + done.tokens
            if stop > self._written:
                file, shape = partial(self.job.file, self._next), (done.tokens,)
                tokens = np.memmap(file("tokens"), DTYPES[self.writer.dtype], "r", shape=shape)
                own = slice(max(self._written - self._offset, 0), None)
                mask = None
                if self.writer.marked:
                    mask = np.memmap(file("mask"), np.uint8, "r", shape=shape)[own]
                self.writer.append(tokens[own], mask)
                self._written = stop
                del tokens, mask
            self._unneeded.append((self._next, stop))
            while self._unneeded and self._unneeded[0][1] <= self.writer.finished:
                number, _ = self._unneeded.popleft()
                for name in ("tokens", "mask"):
                    self.job.file(number, name).unlink(missing_ok=True)
            self._offset = stop
            self._next += 1

    def finish(self, source: Sequence[str]) -> Index:
        """Write the rest of the set."""
        records = [self.done[unit.number] for unit in self.units]
        if not any(record.documents for record in records):
            raise UserError(*self._nothing(source))
        facts: dict[str, Any] = dict(source=source)
        for name in ("skipped", "text_bytes", *(("learned", "truncated") if self.writer.marked else ())):
            facts[name] = sum(getattr(record, name) for record in records)
        if self.writer.marked:
            reasons = sum((Counter(record.reasons) for record in records), Counter[str]())
            facts |= dict(files=self._files(), reasons=dict(reasons.most_common()), margins=self._has_margins())
            facts["paired"] = getattr(self.job, "form", "") == "pairs"
        return self.writer.finish(self._ends("ends", "tokens"), **facts)

    def _nothing(self, source: Sequence[str]) -> list[Problem]:
        """The problems that leave the set empty."""
        if not self.writer.marked:
            return [Problem(f"there is not a single token in {', '.join(source)}; every document is empty")]
        rows = islice(self._skipped(), _MOST_NAMED)
        named = [Problem(row["reason"], where=f"{row['file']}:{row['line']}") for row in map(json.loads, rows)]
        return [Problem(f"there is not a single usable row in {', '.join(source)}"), *named]

    def _files(self) -> dict[str, Iterable[bytes]]:
        """The other per-document files of a set of conversations, each joined from its units."""
        of_unit = {PROMPTS: "prompts", LABELS: "labels", MARGINS: "margins", ROWS: "rows"}
        names = [*FILES_OF_KIND[self.job.kind], *((ROWS,) if self.job.kind == "prompts" else ())]
        names += [MARGINS] if self._has_margins() else []
        found: dict[str, Iterable[bytes]] = {name: self._joined(of_unit[name]) for name in names if name != ROW_ENDS}
        if ROW_ENDS in names:
            found[ROW_ENDS] = (each.tobytes() for each in self._ends("row_ends", "row_bytes"))
        return {**found, SKIPPED: self._skipped()}

    def _has_margins(self) -> bool:
        """Whether any pair has a margin."""
        return any(record.margins for record in self.done.values())

    def _joined(self, name: str) -> Iterator[bytes]:
        for unit in self.units:
            with open(self.job.file(unit.number, name), "rb") as file:
                while block := file.read(2**22):
                    yield block

    def _ends(self, name: str, length: str) -> Iterator[NDArray[Any]]:
        """The ends in a file of each unit, counted from the beginning of the first; `length` names the last in a unit's record."""
        offset = 0
        for unit in self.units:
            yield np.fromfile(self.job.file(unit.number, name), dtype=ENDS) + np.uint64(offset)
            offset += getattr(self.done[unit.number], length)

    def _skipped(self) -> Iterator[bytes]:
        """Rows that were left out, with their line in the file: units count lines within their own chunks only."""
        before = [0] * len(self.job.inputs)
        for unit in self.units:
            first = {}
            for chunk, lines in zip(unit.chunks, self.done[unit.number].lines, strict=True):
                first[chunk.input, chunk.start] = before[chunk.input]
                before[chunk.input] += lines
            with open(self.job.file(unit.number, "skipped"), encoding="utf-8") as file:
                for line in file:
                    row = json.loads(line)
                    number = first[row["input"], row["chunk"]] + row["line"]
                    found = {"file": self.job.inputs[row["input"]].path, "line": number, "reason": row["reason"]}
                    yield json.dumps(found, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
