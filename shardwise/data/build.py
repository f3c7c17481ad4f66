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
from typing import TYPE_CHECKING

from shardwise.data.encode import Job, run_units
from shardwise.data.inputs import Unit, find_inputs, refuse_changed, split_into_units
from shardwise.data.join import Joiner
from shardwise.data.plan import WORK, locked, make_plan, prepare
from shardwise.data.shard_writer import ShardWriter
from shardwise.data.shards import SHARD_TOKENS, Index, read_index
from shardwise.data.tokenizer import load_tokenizer
from shardwise.run.problems import Problem, UserError

if TYPE_CHECKING:
    from shardwise.data.chat.job import ChatOptions


@dataclass(frozen=True)
class Progress:
    """The progress of a build, in bytes of input, whose total is known from the start."""

    total: int
    before: int  # bytes done by an earlier, interrupted build
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
    resumed: int  # units done by an earlier, interrupted build
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
    chat: ChatOptions | None = None,
    source: Sequence[str] = (),
) -> Summary:
    """Turn text, JSONL and Parquet files, or folders of them, into a token set in the folder `out`. 0 workers: one for each core.
    Run again after an interruption, it resumes. With `chat`, rows are conversations, and only some of their tokens are learned.
    The set records `source` as its origin instead of the inputs."""
    begun = time.monotonic()
    folder = Path(out)
    job = _job(inputs, folder / WORK, tokenizer, end, field if chat is None else None, workers, shard_tokens)
    if chat is not None:
        from shardwise.data.chat.job import chat_job

        job = chat_job(job, chat, tokenizer)
    units = split_into_units(job.inputs)
    plan = make_plan(job.inputs, job.tokenizer, field, shard_tokens, job.settings())
    with locked(folder), _one_thread_a_process():
        try:
            if prepare(folder, plan, restart):
                return Summary(
                    folder, read_index(folder), time.monotonic() - begun, len(units), len(units), already=True
                )
            with ShardWriter(folder, job.tokenizer, shard_tokens, job.kind) as writer:
                joiner = Joiner(job, writer, units)
                todo = joiner.missing()
                before = _bytes(units) - _bytes(todo)
                started = time.monotonic()

                def report(done: int, tokens: int) -> None:
                    progress(Progress(_bytes(units), before, done, tokens, time.monotonic() - started))

                report(before, 0)
                joiner.advance()
                run_units(job, todo, workers or cores(), before, report, joiner.add)
                refuse_changed(job.inputs)
                index = joiner.finish(list(source) or [str(name) for name in inputs])
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
    field: str | None,
    workers: int,
    shard_tokens: int,
) -> Job:
    """Check everything before work starts, so that all mistakes are reported at once."""
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
    return Job(found, field or "", loaded, work)


def _bytes(units: Sequence[Unit]) -> int:
    return sum(chunk.bytes for unit in units for chunk in unit.chunks)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def _one_thread_a_process() -> Iterator[None]:
    """Switch off the threads of the tokenizers library, which only this environment variable can do. Workers inherit it."""
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
