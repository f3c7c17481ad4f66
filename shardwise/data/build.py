"""Builds a token set: workers tokenise units of input in parallel, and their outputs are joined into shards in the order of the
inputs. The result does not depend on the number of workers or on interruptions, because the inputs alone decide how units are
split and a finished unit is never done twice."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.data.encode import Job, UnitFiles, UnitResult, run_units
from shardwise.data.inputs import Unit, find_inputs, refuse_changed, split_into_units
from shardwise.data.plan import WORK, locked, make_plan, prepare
from shardwise.data.shards import DTYPES, ENDS, SHARD_TOKENS, Index, ShardWriter, read_index
from shardwise.data.tokenizer import load_tokenizer
from shardwise.run.problems import Problem, UserError


@dataclass(frozen=True)
class Progress:
    """How far a build is, in bytes of input, whose total is known from the start."""

    total: int
    before: int  # bytes that an earlier, interrupted build had done
    done: int
    tokens: int  # made by this build
    seconds: float


@dataclass(frozen=True)
class Summary:
    """What a build did."""

    folder: Path
    index: Index
    seconds: float
    units: int
    resumed: int  # units an earlier, interrupted build had done
    already: bool  # the set was finished before, and nothing was done


def build(
    inputs: Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str | Path = "byte",
    end: str = "",
    field: str = "text",
    workers: int = 0,
    shard_tokens: int = SHARD_TOKENS,
    restart: bool = False,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> Summary:
    """Turn text, JSONL and Parquet files, or folders of them, into a token set in the folder `out`. 0 workers: one for each core.
    Run again after an interruption, it resumes."""
    begun = time.monotonic()
    folder = Path(out)
    job = _job(inputs, folder / WORK, tokenizer, end, field, workers, shard_tokens)
    units = split_into_units(job.inputs)
    plan = make_plan(job.inputs, job.tokenizer, field, shard_tokens)
    with locked(folder), _one_thread_a_process():
        try:
            if prepare(folder, plan, restart):
                return Summary(
                    folder, read_index(folder), time.monotonic() - begun, len(units), len(units), already=True
                )
            with ShardWriter(folder, job.tokenizer, shard_tokens) as writer:
                joiner = _Joiner(job, writer, units)
                todo = joiner.missing()
                before = _bytes(units) - _bytes(todo)
                started = time.monotonic()

                def report(done: int, tokens: int) -> None:
                    progress(Progress(_bytes(units), before, done, tokens, time.monotonic() - started))

                report(before, 0)
                joiner.advance()
                run_units(job, todo, workers or _cores(), before, report, joiner.add)
                refuse_changed(job.inputs)
                index = joiner.finish([str(name) for name in inputs])
            shutil.rmtree(folder / WORK, ignore_errors=True)
        except OSError as e:
            message = f"cannot be written: {e.strerror or e}; finished work is kept for the same command"
            raise UserError(Problem(message, "--out", str(e.filename or folder))) from None
    return Summary(folder, index, time.monotonic() - begun, len(units), len(units) - len(todo), already=False)


def _job(
    names: Sequence[str | Path],
    work: Path,
    tokenizer: str | Path,
    end: str,
    field: str,
    workers: int,
    shard_tokens: int,
) -> Job:
    """Everything checked before work starts, so that all mistakes are reported at once."""
    problems: list[Problem] = []
    loaded, found = None, []
    if workers < 0:
        problems.append(Problem(f"{workers} must be at least 1, or 0 for one on each core", "--workers"))
    if shard_tokens < 1:
        problems.append(Problem(f"{shard_tokens} must be at least 1", "--shard-tokens"))
    try:
        loaded = load_tokenizer(tokenizer, end)
    except UserError as e:
        problems += e.problems
    try:
        found = find_inputs(names, field)
    except UserError as e:
        problems += e.problems
    if problems or loaded is None:
        raise UserError(*problems)
    return Job(found, field, loaded, work)


def _bytes(units: Sequence[Unit]) -> int:
    return sum(chunk.bytes for unit in units for chunk in unit.chunks)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def _one_thread_a_process() -> Iterator[None]:
    """Switch off the threads of the tokenizers library, which has only this variable for it. Workers inherit it."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class _Joiner:
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
        self._unneeded: list[tuple[int, Path]] = []
        self._find_done()

    def _find_done(self) -> None:
        itemsize = DTYPES[self.writer.dtype].itemsize
        behind = 0  # tokens before a unit, as long as every unit before it is done
        for unit in self.units:
            files = UnitFiles(self.job.folder, unit.number)
            done = files.done()
            if done is None:
                behind = -1
                continue
            in_shards = behind >= 0 and behind + done.tokens <= self.writer.finished
            whole = in_shards or _size(files.tokens) == done.tokens * itemsize
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
                self.writer.append(tokens[max(self._written - self._offset, 0) :])
                self._written = stop
                del tokens
            self._unneeded.append((stop, files.tokens))
            while self._unneeded and self._unneeded[0][0] <= self.writer.finished:
                self._unneeded.pop(0)[1].unlink(missing_ok=True)
            self._offset = stop
            self._next += 1

    def finish(self, source: Sequence[str]) -> Index:
        records = [self.done[unit.number] for unit in self.units]
        if not any(record.documents for record in records):
            raise UserError(Problem(f"there is not a single token in {', '.join(source)}; every document is empty"))
        return self.writer.finish(
            self._ends(),
            skipped=sum(record.skipped for record in records),
            text_bytes=sum(record.text_bytes for record in records),
            source=source,
        )

    def _ends(self) -> Iterator[NDArray[Any]]:
        offset = 0
        for unit in self.units:
            yield np.fromfile(UnitFiles(self.job.folder, unit.number).ends, dtype=ENDS) + np.uint64(offset)
            offset += self.done[unit.number].tokens


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
