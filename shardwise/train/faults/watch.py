"""The watch over one rank while it trains, for the loop to hold: what it is doing, whether it was told to stop, whether a step was
bad, how long it works compared with others, and the account of the time that steps do not use."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from shardwise.run import Run, UserError
from shardwise.train.faults.arrivals import arrivals
from shardwise.train.faults.events import read_events, record
from shardwise.train.faults.goodput import Goodput, goodput
from shardwise.train.faults.guard import Guard
from shardwise.train.faults.heartbeat import Heart
from shardwise.train.faults.stop import Preempted, StopRequest
from shardwise.train.faults.stragglers import Stragglers
from shardwise.train.metrics import read_metrics
from shardwise.train.step import StepResult, TrainState


class RollBack(Exception):
    """Raised on every rank when a bad batch is to be left out: go back to the last checkpoint, and on without it."""

    def __init__(self, batch: int, fault: str) -> None:
        super().__init__(fault)
        self.batch = batch


class Watch:
    """Open while a rank trains. `watched` says that the process which started this rank keeps the account of its life."""

    def __init__(self, run: Run, out: Path, rank: int, watched: bool) -> None:
        self.run, self.out, self.rank, self.watched = run, out, rank, watched
        self.stop = StopRequest()
        self.heart = Heart(out / "logs", rank, run.layout.world, run.train.hang_seconds)
        self.heart.deadline = self._deadline
        self.heart.parent = os.getppid() if watched else None
        self._open = ExitStack()

    def __enter__(self) -> Watch:
        self.out.mkdir(parents=True, exist_ok=True)
        self._open.enter_context(self.stop)
        if self.run.layout.world > 1:  # alone, there is nobody to wait for and nobody to tell
            self._open.enter_context(self.heart)
        if not self.watched:
            metrics = self.out / "metrics.jsonl"
            self.event("begin", heard=metrics.stat().st_mtime if metrics.exists() else 0.0)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._open.__exit__(*exception)
        if not self.watched:
            good = exception[0] is None or issubclass(exception[0], Preempted)
            self.event("end" if good else "failed", why=str(exception[1] or ""))

    def begin(self, train_state: TrainState) -> None:
        """Take a trainee that is about to make its first step under watch."""
        self.train_state = train_state
        self.guard = Guard(self.run.train, train_state.history)
        mesh, pipeline = train_state.mesh, train_state.parallel.pipeline
        self.heart.done_so_far = lambda: len(pipeline.executed)
        self.heart.arrivals = lambda: arrivals(mesh, pipeline, time.time_ns())
        self.stragglers = Stragglers(
            self.run.train.compare_every, train_state.device, train_state.dtype, self.run.layout.world, self.rank
        )
        self.stop.training = True
        self.event("training", step=train_state.step)

    def end(self) -> None:
        """Let go of the trainee, so that another can have its memory."""
        del self.train_state, self.guard
        self.heart.done_so_far, self.heart.arrivals, self.stop.training = lambda: 0, list, False

    def event(self, what: str, **values: Any) -> None:
        """Note what happened; the first rank does it for all."""
        if self.rank == 0:
            record(self.out, what, **values)

    @contextmanager
    def phase(self, name: str, done: str = "") -> Iterator[None]:
        """What follows is this part of the run; its time goes into the account as the event `done`."""
        before, self.heart.phase = self.heart.phase, name
        start = time.perf_counter()
        yield
        self.heart.phase = before
        if done:
            self.event(done, step=self.train_state.step, seconds=round(time.perf_counter() - start, 6))

    def step(self, batch: Any) -> StepResult:
        """One step of the trainee, under the run's policy."""
        train, number = self.run.train, self.train_state.step + 1
        self.heart.step, self.heart.phase = number, "training"
        return self.train_state.train_step(
            batch,
            stop=self.stop.wanted,
            accept=self.guard.accept if train.guard == "skip" else None,
            recheck=bool(train.recheck_every) and number % train.recheck_every == 0,
        )

    def judge(self, loss: float, norm: float, result: StepResult, log: Callable[[str], None]) -> bool:
        """Act on a finished step by the run's policy; gives whether it was skipped."""
        fault = self.guard.note(loss, norm, result.rescaled)
        if fault is None:
            if not result.usable:
                log(f"step {result.step}: gradients overflowed in float16; skipped, and the loss scale is halved")
            return not result.usable
        step, policy = result.step, self.run.train.guard
        batch = self.guard.history.batch_of(step)
        self.event("bad", step=step, batch=batch, fault=fault, policy=policy)
        if policy == "stop":
            raise UserError(
                f'step {step}: {fault}; train.guard = "skip" or "rollback" would go on without batch {batch}'
            )
        if self.guard.exhausted:
            raise UserError(
                f"step {step}: {fault}; that makes {self.guard.history.bad} bad steps in a row (train.guard_limit)"
            )
        if policy == "rollback":
            if len(self.guard.history.excluded) >= self.run.train.guard_limit:
                raise UserError(f"step {step}: {fault}; train.guard_limit batches have been left out already")
            raise RollBack(batch, fault)
        log(f"step {step}: {fault}; batch {batch} is skipped")
        return True

    def goodput(self) -> Goodput:
        """The account of the folder's life until now."""
        return goodput(read_events(self.out), read_metrics(self.out), time.time())

    def _deadline(self) -> float:
        """When a rank that was told to stop must have saved."""
        return self.stop.since + self.run.train.save_deadline if self.stop.wanted else float("inf")
