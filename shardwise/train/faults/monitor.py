"""The fault monitor of one rank while it trains: signals to stop, the heartbeat, bad steps, stragglers, and the events from which
goodput is computed.

A signal to stop (`stop.py`) may reach the command, which passes it on, or any single rank. A training rank only sets a flag, which
travels in an all-reduce that every step has anyway. So all ranks end after the same step, save, and exit with code 75, "try again
later" in sysexits.h. Before the first step there is nothing to save, and the process ends at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from shardwise.run import Run, UserError
from shardwise.train.faults.goodput import Goodput, goodput, read_events, record_event
from shardwise.train.faults.guard import Guard
from shardwise.train.faults.heartbeat import HeartbeatThread, group_progress
from shardwise.train.faults.ranks import command_name
from shardwise.train.faults.stop import Preempted, StopRequest, decided
from shardwise.train.progress.metrics import read_metrics
from shardwise.train.progress.result import StepResult
from shardwise.train.progress.speed import Stragglers
from shardwise.train.step import TrainState


class RollBack(Exception):
    """Raised on every rank to exclude a bad batch: go back to the last checkpoint, and continue without that batch."""

    def __init__(self, batch: int, fault: str) -> None:
        super().__init__(fault)
        self.batch = batch


class FaultMonitor:
    """Open while a rank trains. `has_agent`: the process that started this rank records when ranks begin and end."""

    def __init__(self, run: Run, out: Path, rank: int, has_agent: bool) -> None:
        self.run, self.out, self.rank, self.has_agent = run, out, rank, has_agent
        self.records: Callable[[], bool] = lambda: rank == 0  # whether this rank records events
        self.stop = StopRequest()
        self.heartbeat = HeartbeatThread(out / "logs", rank, run.layout.world, run.train.hang_seconds)
        self.heartbeat.deadline = self._deadline
        self.heartbeat.parent = os.getppid() if has_agent else None
        self._open = ExitStack()

    def __enter__(self) -> FaultMonitor:
        self.out.mkdir(parents=True, exist_ok=True)
        if self.run.layout.world > 1:  # a single rank waits for nobody
            self._open.enter_context(self.heartbeat)
        if not self.has_agent:
            metrics = self.out / "metrics.jsonl"
            self.event("begin", heard=metrics.stat().st_mtime if metrics.exists() else 0.0)
        return self

    def __exit__(self, *exception: Any) -> None:
        decided()
        self.stop.end()
        self._open.__exit__(*exception)
        if not self.has_agent:
            good = exception[0] is None or issubclass(exception[0], Preempted)
            self.event("end" if good else "failed", why=str(exception[1] or ""))

    def attach(self, train_state: TrainState) -> None:
        """Monitor a train state that is about to run its first step."""
        self.train_state = train_state
        self.guard = Guard(self.run.train, train_state.history)
        mesh, pipeline = train_state.mesh, train_state.parallel.pipeline
        self.heartbeat.actions_done = lambda: len(pipeline.executed)
        self.heartbeat.groups = lambda: group_progress(mesh, pipeline, time.time_ns())
        self.stragglers = Stragglers(
            self.run.train.compare_every, train_state.device, train_state.dtype, mesh.layout.world, mesh.rank
        )
        self.stop.begin()
        self.event("training", step=train_state.step)

    def detach(self) -> None:
        """Release the train state, so that the next one can use its memory."""
        del self.train_state, self.guard
        self.heartbeat.actions_done, self.heartbeat.groups = lambda: 0, list
        self.stop.end()

    def note_bytes(self, count: int) -> None:
        """Count checkpoint bytes read or written, by any thread, as progress: a slow disk is not a hang."""
        self.heartbeat.bytes_done += count

    def event(self, what: str, **values: Any) -> None:
        """Record an event; one rank does it for all."""
        if self.records():
            record_event(self.out, what, **values)

    @contextmanager
    def phase(self, name: str, done: str) -> Iterator[None]:
        """A context in which the run is in this phase; its seconds are recorded as the event `done`."""
        before, self.heartbeat.phase = self.heartbeat.phase, name
        start = time.perf_counter()
        yield
        self.heartbeat.phase = before
        self.event(done, step=self.train_state.step, seconds=round(time.perf_counter() - start, 6))

    def step(self, batch: Any) -> StepResult:
        """Run one training step, with the guard and the recheck that the run asks for."""
        train, number = self.run.train, self.train_state.step + 1
        self.heartbeat.step, self.heartbeat.phase = number, "training"
        return self.train_state.train_step(
            batch,
            stop=self.stop.wanted,
            accept=(lambda *values: self.guard.fault(*values) is None) if train.guard == "skip" else None,
            recheck=bool(train.recheck_every) and number % train.recheck_every == 0,
        )

    def judge(self, loss: float, norm: float, result: StepResult, log: Callable[[str], None]) -> bool:
        """Apply the run's guard policy to a finished step; returns whether it was skipped."""
        fault = self.guard.note(loss, norm, result.rescaled)
        if fault is None:
            if not result.usable:
                log(f"step {result.step}: gradients overflowed in float16; skipped, and the loss scale is halved")
            return not result.usable
        step, policy, limit = result.step, self.run.train.guard, self.run.train.guard_limit
        history = self.guard.history
        batch = history.batch_of(step)
        self.event("bad", step=step, batch=batch, fault=fault, policy=policy)
        if policy == "stop":
            advice = f'train.guard = "skip" or "rollback" would go on without batch {batch}'
            raise UserError(f"step {step}: {fault}; {advice}")
        if history.bad >= limit:  # too many in a row to be an accident
            raise UserError(f"step {step}: {fault}; that makes {history.bad} bad steps in a row (train.guard_limit)")
        if policy == "rollback":
            if len(history.excluded) >= limit:
                raise UserError(f"step {step}: {fault}; train.guard_limit batches have been left out already")
            raise RollBack(batch, fault)
        log(f"step {step}: {fault}; batch {batch} is skipped")
        return True

    def goodput(self) -> Goodput:
        """The account of the folder's life until now."""
        return goodput(read_events(self.out), read_metrics(self.out), time.time(), command_name())

    def _deadline(self) -> float:
        """The time by which a rank that was asked to stop must have saved."""
        return self.stop.since + self.run.train.save_deadline if self.stop.wanted else float("inf")
