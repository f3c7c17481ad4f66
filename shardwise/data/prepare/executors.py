"""Who does the tasks of a stage: processes of this machine, or Ray's workers. Both may do a task twice and lose workers; the
result is the same, because a task's folder appears whole or not at all."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from shardwise.data.encode import leave_with_parent
from shardwise.data.prepare.stages import perform
from shardwise.run.problems import Problem, UserError, install

Done = Callable[[int], None]
_LOST = 3
"""How often workers may die before any task of a stage is finished."""


def attempt(folder: str, work: str, digest: str, stage: str, number: int) -> list[Problem]:
    """Do a task; what is wrong is returned, since an exception loses its parts on the way to another process."""
    try:
        perform(Path(folder), Path(work), digest, stage, number)
    except UserError as e:
        return e.problems
    except OSError as e:
        full = e.errno in (errno.ENOSPC, errno.EDQUOT)
        message = (
            f"cannot be {'written' if full else 'used'}: {e.strerror or e}; finished work is kept for the same command"
        )
        return [Problem(message, "--out" if full else "", str(e.filename or folder))]
    return []


def run_local(folder: Path, work: Path, digest: str, stage: str, todo: Sequence[int], workers: int, done: Done) -> None:
    """Processes of this machine."""
    if min(workers, len(todo)) <= 1:
        for number in todo:
            _raise(attempt(str(folder), str(work), digest, stage, number))
            done(number)
        return
    left = list(todo)
    lost = 0
    while left:
        try:
            _run_pool(folder, work, digest, stage, left, workers, done)
        except BrokenProcessPool:
            before = len(left)
            left = [number for number in left if not (work / stage / f"{number:06d}").is_dir()]
            lost = lost + 1 if len(left) == before else 0
            if lost >= _LOST:
                message = (
                    "worker processes die, most likely because memory runs out; finished work is kept: run the same "
                    "command again, with fewer --workers"
                )
                raise UserError(message) from None
        else:
            return


def _raise(problems: list[Problem]) -> None:
    if problems:
        raise UserError(*problems)


def _run_pool(folder: Path, work: Path, digest: str, stage: str, todo: Sequence[int], workers: int, done: Done) -> None:
    context = multiprocessing.get_context("spawn")
    waiting = iter(todo)
    running: dict[Future[list[Problem]], int] = {}
    problems: list[Problem] = []
    with ProcessPoolExecutor(min(workers, len(todo)), mp_context=context, initializer=_begin) as pool:
        try:
            while True:
                while not problems and len(running) < 2 * workers and (number := next(waiting, None)) is not None:
                    running[pool.submit(attempt, str(folder), str(work), digest, stage, number)] = number
                if not running:
                    break
                ready, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in ready:
                    number = running.pop(future)
                    found = future.result()
                    problems += found
                    if not found:
                        done(number)
        finally:
            pool.shutdown(cancel_futures=True)
    _raise(problems)


def _begin() -> None:
    # Ctrl-C reaches the whole group; the parent decides what happens then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=leave_with_parent, daemon=True).start()


def run_ray(folder: Path, work: Path, digest: str, stage: str, todo: Sequence[int], workers: int, done: Done) -> None:
    """Ray's workers: of the cluster that RAY_ADDRESS names, else of this machine. A worker that dies is replaced and its task
    done again. All machines must see the folder."""
    try:
        import ray
    except ModuleNotFoundError:
        raise UserError(Problem(f'"ray" is not installed: {install("ray")}', "--executor")) from None
    if not ray.is_initialized():
        own = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": workers}
        ray.init(logging_level="error", log_to_driver=False, include_dashboard=False, **own)
    remote = ray.remote(num_cpus=1, max_retries=-1)(attempt)
    waiting = iter(todo)
    running: dict[Any, int] = {}
    problems: list[Problem] = []
    while True:
        while not problems and len(running) < 2 * workers and (number := next(waiting, None)) is not None:
            running[remote.remote(str(folder), str(work), digest, stage, number)] = number
        if not running:
            break
        ready, _ = ray.wait(list(running), num_returns=1)
        for reference in ready:
            number = running.pop(reference)
            found = ray.get(reference)
            problems += found
            if not found:
                done(number)
    _raise(problems)


EXECUTORS = {"local": run_local, "ray": run_ray}
