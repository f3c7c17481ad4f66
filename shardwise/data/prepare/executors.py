"""Run the tasks of a stage in processes of this machine or in Ray workers. Both may run a task twice and lose workers; the result
is the same, because a task's folder appears complete or not at all."""

from __future__ import annotations

import errno
import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.data.encode import begin_worker
from shardwise.data.prepare.stages import perform
from shardwise.run.problems import Problem, UserError, install

Done = Callable[[int], None]
Job = tuple[str, str, str]
"""What all tasks of a stage share: the folder of the plan, the recipe's digest, and the stage's name."""
_LOST = 3
"""How often workers may die before any task of a stage is finished."""


def attempt(folder: str, digest: str, stage: str, number: int) -> list[Problem]:
    """Run a task and return its problems: pickling an exception to another process would lose its attributes."""
    try:
        perform(Path(folder), digest, stage, number)
    except UserError as e:
        return e.problems
    except OSError as e:
        full = e.errno in (errno.ENOSPC, errno.EDQUOT)
        message = (
            f"cannot be {'written' if full else 'used'}: {e.strerror or e}; finished work is kept for the same command"
        )
        return [Problem(message, "--out" if full else "", str(e.filename or folder))]
    return []


def _keep_busy(
    workers: int,
    todo: Iterable[int],
    start: Callable[[int], Any],
    ended: Callable[[list[Any]], Iterable[Any]],
    result: Callable[[Any], list[Problem]],
    done: Done,
) -> None:
    """Start tasks so that each worker has the next one waiting, and call `done` for each. `ended` waits until a started task has
    ended, `result` returns its problems. After a task with problems no more are started."""
    waiting = iter(todo)
    running: dict[Any, int] = {}
    problems: list[Problem] = []
    while True:
        while not problems and len(running) < 2 * workers and (number := next(waiting, None)) is not None:
            running[start(number)] = number
        if not running:
            break
        for task in ended(list(running)):
            number, found = running.pop(task), result(task)
            problems += found
            if not found:
                done(number)
    _raise(problems)


class Local:
    """Processes of this machine, which are kept from stage to stage."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._pool: ProcessPoolExecutor | None = None

    def run(self, job: Job, todo: Sequence[int], done: Done) -> None:
        """Run the tasks and call `done` for each. Workers that die are replaced, and their tasks run again."""
        if self._workers <= 1:
            for number in todo:
                _raise(attempt(*job, number))
                done(number)
            return
        left, lost = set(todo), 0
        while left:
            before = len(left)
            try:
                self._run_pool(job, left, done)
            except BrokenProcessPool:
                self.close()
                lost = lost + 1 if len(left) == before else 0
                if lost >= _LOST:
                    message = (
                        "worker processes die, most likely because memory runs out; finished work is kept: run the same "
                        "command again, with fewer --workers"
                    )
                    raise UserError(message) from None

    def _run_pool(self, job: Job, left: set[int], done: Done) -> None:
        if self._pool is None:
            # Spawned, not forked: a fork would copy the locks of whatever threads the caller has running.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._workers, mp_context=context, initializer=begin_worker)
        pool = self._pool

        def start(number: int) -> Future[list[Problem]]:
            return pool.submit(attempt, *job, number)

        def ended(running: list[Future[list[Problem]]]) -> set[Future[list[Problem]]]:
            return wait(running, return_when=FIRST_COMPLETED).done

        def settled(number: int) -> None:
            left.discard(number)
            done(number)

        _keep_busy(self._workers, sorted(left), start, ended, Future.result, settled)

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def _raise(problems: list[Problem]) -> None:
    if problems:
        raise UserError(*problems)


class Ray:
    """Ray workers of the cluster that RAY_ADDRESS names, else of this machine. A worker that dies is replaced and its task runs
    again. All machines must see the folder."""

    def __init__(self, workers: int) -> None:
        try:
            import ray
        except ModuleNotFoundError:
            raise UserError(Problem(f'"ray" is not installed: {install("ray")}', "--executor")) from None
        self._ray, self._workers = ray, workers
        self._own = not ray.is_initialized()
        if self._own:
            here = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": workers}
            ray.init(logging_level="error", log_to_driver=False, include_dashboard=False, **here)
        self._attempt = ray.remote(num_cpus=1, max_retries=-1)(attempt)

    def run(self, job: Job, todo: Sequence[int], done: Done) -> None:
        """Run the tasks and call `done` for each."""
        start = partial(self._attempt.remote, *job)
        _keep_busy(self._workers, todo, start, lambda running: self._ray.wait(running)[0], self._ray.get, done)

    def close(self) -> None:
        """Leave the cluster, if it was joined here."""
        if self._own:
            self._ray.shutdown()


EXECUTORS: dict[str, type[Local] | type[Ray]] = {"local": Local, "ray": Ray}
