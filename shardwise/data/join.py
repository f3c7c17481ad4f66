"""Joins the workers' outputs of units into shards, in the order of the inputs, as soon as they are ready."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.data.encode import Job, UnitFiles, UnitResult
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
        self._unneeded: list[tuple[int, UnitFiles]] = []
        self._find_done()

    def _find_done(self) -> None:
        itemsize = DTYPES[self.writer.dtype].itemsize
        behind = 0  # tokens in earlier units while all of them are done, else -1
        for unit in self.units:
            files = UnitFiles(self.job.folder, unit.number)
            done = files.done()
            if done is None:
                behind = -1
                continue
            in_shards = behind >= 0 and behind + done.tokens <= self.writer.finished
            whole = in_shards or _size(files.tokens) == done.tokens * itemsize
            if self.writer.marked and not in_shards:
                whole = whole and _size(files.mask) == done.tokens
            if whole and _size(files.ends) == done.documents * ENDS.itemsize:
                self.done[unit.number] = done
                behind = behind + done.tokens if behind >= 0 else -1
            else:
                behind = -1

    def missing(self) -> list[Unit]:
        return [unit for unit in self.units if unit.number not in self.done]

    def add(self, unit: Unit, done: UnitResult) -> None:
        self.done[unit.number] = done
        self.advance()

    def advance(self) -> None:
        """Write every unit that is next in order."""
        while done := self.done.get(self._next):
            files = UnitFiles(self.job.folder, self._next)
            stop = self._offset + done.tokens
            if stop > self._written:
                tokens = np.memmap(files.tokens, dtype=DTYPES[self.writer.dtype], mode="r", shape=(done.tokens,))
                own = slice(max(self._written - self._offset, 0), None)
                mask = None
                if self.writer.marked:
                    mask = np.memmap(files.mask, dtype=np.uint8, mode="r", shape=(done.tokens,))[own]
                self.writer.append(tokens[own], mask)
                self._written = stop
                del tokens, mask
            self._unneeded.append((stop, files))
            while self._unneeded and self._unneeded[0][0] <= self.writer.finished:
                files = self._unneeded.pop(0)[1]
                files.tokens.unlink(missing_ok=True)
                files.mask.unlink(missing_ok=True)
            self._offset = stop
            self._next += 1

    def finish(self, source: Sequence[str]) -> Index:
        """Write the rest of the set."""
        records = [self.done[unit.number] for unit in self.units]
        skipped, text_bytes = sum(record.skipped for record in records), sum(record.text_bytes for record in records)
        if not any(record.documents for record in records):
            raise UserError(*self._nothing(source))
        if not self.writer.marked:
            return self.writer.finish(self._ends(), skipped=skipped, text_bytes=text_bytes, source=source)
        reasons = sum((Counter(record.reasons) for record in records), Counter[str]())
        return self.writer.finish(
            self._ends(),
            skipped=skipped,
            text_bytes=text_bytes,
            source=source,
            files=self._files(),
            paired=getattr(self.job, "form", "") == "pairs",
            learned=sum(record.learned for record in records),
            truncated=sum(record.truncated for record in records),
            reasons=dict(reasons.most_common()),
            margins=self._has_margins(),
        )

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
            found[ROW_ENDS] = self._row_ends()
        return {**found, SKIPPED: self._skipped()}

    def _has_margins(self) -> bool:
        """Whether any pair has a margin."""
        return any(record.margins for record in self.done.values())

    def _of_units(self) -> Iterator[tuple[Unit, UnitFiles]]:
        for unit in self.units:
            yield unit, UnitFiles(self.job.folder, unit.number)

    def _joined(self, name: str) -> Iterator[bytes]:
        for _, files in self._of_units():
            with open(getattr(files, name), "rb") as file:
                while block := file.read(2**22):
                    yield block

    def _ends(self) -> Iterator[NDArray[Any]]:
        offset = 0
        for unit, files in self._of_units():
            yield np.fromfile(files.ends, dtype=ENDS) + np.uint64(offset)
            offset += self.done[unit.number].tokens

    def _row_ends(self) -> Iterator[bytes]:
        offset = 0
        for unit, files in self._of_units():
            yield (np.fromfile(files.row_ends, dtype=ENDS) + np.uint64(offset)).tobytes()
            offset += self.done[unit.number].row_bytes

    def _skipped(self) -> Iterator[bytes]:
        """Rows that were left out, with their line in the file: units count lines within their own chunks only."""
        before = [0] * len(self.job.inputs)
        for unit, files in self._of_units():
            first = {}
            for chunk, lines in zip(unit.chunks, self.done[unit.number].lines, strict=True):
                first[chunk.input, chunk.start] = before[chunk.input]
                before[chunk.input] += lines
            with open(files.skipped, encoding="utf-8") as file:
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
