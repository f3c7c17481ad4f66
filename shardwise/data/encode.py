"""Units of work: read a unit's documents, tokenise them in batches, and write its tokens and document ends to the work folder. The
record of their counts is renamed into place last, and marks the unit as done.

Units run in this process or in parallel in several. A worker gets the job once and then only unit numbers; each uses one thread of
the tokenizers library, so that each worker keeps one core busy.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from shardwise.data.documents import MOST_PROBLEMS, Part, Reader
from shardwise.data.inputs import Input, Unit
from shardwise.data.shards import DTYPES, ENDS, dtype_for
from shardwise.data.tokenizer import Tokenizer
from shardwise.run.problems import Problem, UserError

# Characters tokenised in one call: enough to hide the cost of the call, few enough to stay small in memory.
BATCH = 2**19

_MOST_SHOWN = 20
_RECORD = "json"

Report = Callable[[int, int], None]
"""Called with a number of input bytes and of tokens."""
Finished = Callable[["Unit", "UnitResult"], None]


@dataclass
class UnitResult:
    """The record of a unit, counted up while it is made."""

    tokens: int = 0
    documents: int = 0
    skipped: int = 0
    text_bytes: int = 0
    learned: int = 0
    truncated: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    lines: list[int] = field(default_factory=list)
    row_bytes: int = 0
    margins: int = 0


@dataclass(frozen=True)
class Job:
    """What all units share; each worker process gets it once."""

    inputs: Sequence[Input]
    field: str
    tokenizer: Tokenizer
    folder: Path

    files: ClassVar[tuple[str, ...]] = ("tokens", "ends")
    """What a unit makes besides its record."""

    @property
    def kind(self) -> str:
        """The kind of the resulting set."""
        return "text"

    def settings(self) -> dict[str, Any]:
        """Further settings that determine the result of a build."""
        return {}

    def encode(self, unit: Unit, report: Report) -> UnitResult:
        """Tokenise one unit. `report(bytes, tokens)` is called with the progress since the last call."""
        total, reported = sum(chunk.bytes for chunk in unit.chunks), 0

        def add_progress(consumed: int, tokens: int) -> None:
            nonlocal reported
            consumed = min(consumed, total - reported)  # sizes of row groups are estimates
            reported += consumed
            report(consumed, tokens)

        paths = {name: self.file(unit.number, name) for name in (*self.files, _RECORD)}
        drafts = {name: path.with_name(f"{path.name}.{os.getpid()}.tmp") for name, path in paths.items()}
        try:
            with ExitStack() as stack:
                out = {name: stack.enter_context(open(draft, "wb")) for name, draft in drafts.items()}
                done = self.write(unit, out, add_progress)
                out[_RECORD].write(json.dumps(asdict(done)).encode())
                for file in out.values():  # the record must not outlive them in a power failure
                    file.flush()
                    os.fsync(file.fileno())
            for name, path in paths.items():
                os.replace(drafts[name], path)
        finally:
            for draft in drafts.values():
                draft.unlink(missing_ok=True)
        add_progress(total, 0)
        return done

    def file(self, unit: int, name: str) -> Path:
        """A file of a unit in the work folder."""
        return self.folder / f"{unit:06d}.{name}"

    def record(self, unit: int) -> UnitResult | None:
        """The record of a unit that was finished earlier."""
        try:
            return UnitResult(**json.loads(self.file(unit, _RECORD).read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, unit: Unit, out: Mapping[str, IO[bytes]], report: Report) -> UnitResult:
        """Tokenise one unit into its files."""
        batches = _Batches(self.tokenizer, out, report)
        problems: list[Problem] = []
        for chunk in unit.chunks:
            reader = Reader(self.inputs[chunk.input], chunk, self.field)
            try:
                for part in reader:
                    batches.add(reader, part)
                batches.flush()
            except UserError as e:
                problems += e.problems
                batches.drop()
            if len(problems) >= MOST_PROBLEMS:
                break
        if problems:
            raise UserError(*problems)
        return batches.done


class _Batches:
    """Collects parts of documents, tokenises them in batches and writes the tokens."""

    def __init__(self, tokenizer: Tokenizer, out: Mapping[str, IO[bytes]], report: Report) -> None:
        self.tokenizer = tokenizer
        self.out = out
        self.report = report
        self.dtype = DTYPES[dtype_for(tokenizer.vocab)]
        self.end = np.array([tokenizer.end], dtype=self.dtype)
        self.done = UnitResult()
        self._reader: Reader | None = None
        self._parts: list[Part] = []
        self._characters = self._consumed = 0

    def add(self, reader: Reader, part: Part) -> None:
        self._reader = reader
        self._consumed += part.consumed
        if part.first and part.last and (not part.text or part.text.isspace()):
            self.done.skipped += 1
            return
        self._parts.append(part)
        self._characters += len(part.text)
        if self._characters >= BATCH:
            self.flush()

    def drop(self) -> None:
        """Drop the collected parts: they are written, or the unit has failed."""
        self._parts, self._characters, self._consumed = [], 0, 0

    def flush(self) -> None:
        if self._parts:
            texts = [part.text for part in self._parts]
            self.done.text_bytes += sum(
                len(t) if t.isascii() else len(t.encode("utf-8", "surrogatepass")) for t in texts
            )
            before = self.done.tokens
            arrays: list[NDArray[Any]] = []
            ends: list[int] = []  # written with their tokens: a compressed file is one unit, however large
            for part, ids in zip(self._parts, self._encode(texts), strict=True):
                # A tokenizer that normalises may return no tokens for a text.
                if part.first and part.last and not len(ids):
                    self.done.skipped += 1
                    continue
                arrays.append(ids)
                self.done.tokens += len(ids)
                if part.last:
                    arrays.append(self.end)
                    self.done.tokens += 1
                    ends.append(self.done.tokens)
            if arrays:
                self.out["tokens"].write(np.concatenate(arrays, dtype=self.dtype).data)
            self.out["ends"].write(np.array(ends, dtype=ENDS).tobytes())
            self.done.documents += len(ends)
            self.report(self._consumed, self.done.tokens - before)
        self.drop()

    def _encode(self, texts: list[str]) -> list[NDArray[Any]]:
        try:
            return self.tokenizer.encode_batch(texts)
        except (UnicodeEncodeError, TypeError):
            self._report_surrogates()
            raise

    def _report_surrogates(self) -> None:
        """JSON can contain half of a surrogate pair; report the documents that do."""
        assert self._reader is not None
        for part in self._parts:
            try:
                part.text.encode("utf-8")
            except UnicodeEncodeError as e:
                message = f"holds half of a surrogate pair (character {e.start + 1}), which is not text"
                self._reader.refuse(part.place, message)
        if self._reader.problems:
            raise UserError(*self._reader.problems)


def run_units(job: Job, todo: Sequence[Unit], workers: int, before: int, progress: Report, finished: Finished) -> None:
    """Tokenise the units and call `finished` for each, in completion order. `progress` gets the bytes and tokens done so far;
    `before` bytes were done earlier."""
    workers = min(workers, len(todo))
    if workers > 1:
        _run_pool(job, todo, workers, before, progress, finished)
        return
    counts = [before, 0]

    def report(consumed: int, tokens: int) -> None:
        counts[0] += consumed
        counts[1] += tokens
        progress(counts[0], counts[1])

    for unit in todo:
        finished(unit, job.encode(unit, report))


def _run_pool(job: Job, todo: Sequence[Unit], workers: int, before: int, progress: Report, finished: Finished) -> None:
    # Spawned, not forked: a fork would copy the locks of whatever threads the caller has running.
    context = multiprocessing.get_context("spawn")
    counts = context.Array("q", 2)
    waiting = iter(todo)
    running: dict[Future[UnitResult | list[Problem]], Unit] = {}
    failed: dict[int, list[Problem]] = {}
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(job, counts))
    try:
        while True:
            while not failed and len(running) < 2 * workers and (unit := next(waiting, None)):
                running[pool.submit(_encode, unit)] = unit
            if not running:
                break
            ready, _ = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
            for future in ready:
                unit = running.pop(future)
                result = future.result()
                if isinstance(result, UnitResult):
                    finished(unit, result)
                else:
                    failed[unit.number] = result
            progress(before + counts[0], counts[1])
    except BrokenProcessPool:
        message = (
            "a worker process died, most likely because memory ran out; finished work is kept: run the same "
            "command again, with fewer --workers if it happens again"
        )
        raise UserError(message) from None
    finally:
        pool.shutdown(cancel_futures=True)
    if failed:
        problems = [problem for number in sorted(failed) for problem in failed[number]]
        raise UserError(*problems[:_MOST_SHOWN])


# A worker process gets these once, when it starts: the job, and the counters it shares with its parent.
_worker: list[Any] = []


def _begin(job: Job, counts: Any) -> None:
    begin_worker()
    _worker[:] = [job, counts]


def begin_worker() -> None:
    """Called first in a worker process: its parent alone decides when it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """A parent that is killed cannot stop its workers, which would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def _encode(unit: Unit) -> UnitResult | list[Problem]:
    job, counts = _worker

    def report(consumed: int, tokens: int) -> None:
        with counts.get_lock():
            counts[0] += consumed
            counts[1] += tokens

    try:
        return job.encode(unit, report)
    except UserError as e:
        # As plain values: pickling an exception to another process loses its attributes.
        return e.problems
