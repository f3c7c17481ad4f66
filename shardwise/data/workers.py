"""Does units of work, in this process or in several side by side. Workers are told the job once and then only
unit numbers; each uses one thread of the tokenizers library, so that as many cores are busy as there are
workers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from shardwise.data.encode import Done, Job
from shardwise.data.inputs import Unit
from shardwise.data.progress import Progress
from shardwise.run.problems import Problem, UserError

_MOST_TOLD = 20

Finished = Callable[[Unit, Done], None]


def run_units(
    job: Job, todo: Sequence[Unit], workers: int, before: int, progress: Progress, finished: Finished
) -> None:
    """Do the units and call `finished` for each, in whatever order they come. `before`: bytes done
    earlier."""
    workers = min(workers, len(todo))
    if workers > 1:
        _run_pool(job, todo, workers, before, progress, finished)
        return
    counts = [before, 0]

    def report(consumed: int, tokens: int) -> None:
        counts[0] += consumed
        counts[1] += tokens
        progress.update(counts[0], counts[1])

    for unit in todo:
        finished(unit, job.encode(unit, report))


def _run_pool(
    job: Job, todo: Sequence[Unit], workers: int, before: int, progress: Progress, finished: Finished
) -> None:
    # Spawned, not forked: a fork would copy the locks of whatever threads the caller has running.
    context = multiprocessing.get_context("spawn")
    counts = context.Array("q", 2)
    waiting = iter(todo)
    running: dict[Future[Done | list[Problem]], Unit] = {}
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
                if isinstance(result, Done):
                    finished(unit, result)
                else:
                    failed[unit.number] = result
            progress.update(before + counts[0], counts[1])
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
        raise UserError(*problems[:_MOST_TOLD])


# What a worker process knows, told once when it starts: the job, and the counters it shares with its parent.
_told: list[Any] = []


def _begin(job: Job, counts: Any) -> None:
    # Ctrl-C reaches the whole group; the parent decides what happens then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _told[:] = [job, counts]
    # A parent that is killed cannot stop its workers, and they would wait for work for ever.
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def _encode(unit: Unit) -> Done | list[Problem]:
    job, counts = _told

    def report(consumed: int, tokens: int) -> None:
        with counts.get_lock():
            counts[0] += consumed
            counts[1] += tokens

    try:
        return job.encode(unit, report)
    except UserError as e:
        # As plain values: an exception loses its parts on the way to another process.
        return e.problems
