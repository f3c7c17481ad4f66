"""The agent of a machine: PyTorch's elastic agent, which meets those of other machines, numbers the ranks and starts all of them
anew when one fails or machines come and go.

Taken from PyTorch are the rendezvous and the loop around it (`SimpleElasticAgent`). Its ready-made `LocalElasticAgent` is not
used, for what it lacks: it ends ranks with SIGTERM, which here means "save"; it waits 30 seconds for those stuck in a collective;
it knows no heartbeats, no back-off, no progress that forgives earlier failures, and no exit code that forbids a restart. So this
class starts and watches the processes itself. A failure is told in one line that names the rank and what it died of.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)

from shardwise.run.config import TrainConfig
from shardwise.train.faults.arrivals import Beat, explain
from shardwise.train.faults.events import record
from shardwise.train.faults.heartbeat import interval, limit_in, path_of, read_beat
from shardwise.train.faults.ranks import GRACE, MISTAKE, Ranks, environment_of, free_port, describe_exit
from shardwise.train.faults.restarts import Restarts
from shardwise.train.faults.stop import PREEMPTED, SIGNALS, Preempted

FIRST_BEAT = 120.0
"""Seconds within which a rank must have given its first sign of life."""


class Agent(SimpleElasticAgent):
    """Starts this machine's ranks, watches them, and decides what a failure leads to. `code` is the outcome."""

    def __init__(
        self,
        spec: WorkerSpec,
        train: TrainConfig,
        out: Path,
        ranks: Ranks,
        arguments: Callable[[int], list[str]],
        saved_step: Callable[[], int],
    ) -> None:
        super().__init__(spec, exit_barrier_timeout=train.save_deadline)
        self.train, self.out, self.arguments, self.saved_step = train, out, arguments, saved_step
        self.ranks = ranks
        self.restarts = Restarts(train.restarts, train.restart_wait)
        self.code = 1
        self.starts = 0
        self.wait = 0.0
        self.told: float | None = None  # when this machine was told to stop
        self.blocked = False  # waiting where only an exception gets out
        self.heard: dict[int, tuple[int, float]] = {}

    def execute(self) -> int:
        """Run until all is done; gives the exit code."""
        self.out.mkdir(parents=True, exist_ok=True)
        before = {number: signal.signal(number, self._told_to_stop) for number in SIGNALS}
        try:
            self.run()
        except Preempted:
            self.code = PREEMPTED
        finally:
            self.ranks.end(0.0)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._record("end" if self.code in (0, PREEMPTED) else "failed", code=self.code)
        return self.code

    # What PyTorch's loop calls.

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        store, workers = worker_group.store, worker_group.workers
        assert store is not None
        world = workers[0].world_size
        arguments = self.arguments(world)
        # The ranks' own store gets a fresh port at every start, so that nothing of an earlier one can be mistaken for it.
        if worker_group.group_rank == 0:
            store.set("shardwise/port", str(free_port()))
        port = int(store.get("shardwise/port"))
        address = worker_group.master_addr or "127.0.0.1"
        environments = {
            w.global_rank: environment_of(w.global_rank, w.local_rank, world, len(workers), address, port)
            | {"SHARDWISE_WATCHED": "1"}
            for w in workers
        }
        for rank in environments:
            path_of(self.ranks.logs, rank).unlink(missing_ok=True)
        self.heard = {rank: (0, time.monotonic()) for rank in environments}
        self._record("begin", ranks=world, restart=self.starts > 0)
        self.ranks.start(arguments, environments)
        self.starts += 1
        return {worker.local_rank: self.ranks.pids[worker.global_rank] for worker in workers}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = self.ranks.codes()
        if PREEMPTED in codes.values() or self.told is not None:
            return self._preempted()
        failed = self.ranks.failed()
        if failed is not None:
            return self._failed(*failed)
        if len(codes) == len(self.ranks.pids):
            self.code = 0
            return RunResult(WorkerState.SUCCEEDED, {worker.global_rank: None for worker in worker_group.workers}, {})
        hang = self._hang()
        return hang if hang is not None else RunResult(WorkerState.HEALTHY, {}, {})

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:
        """Called before every restart: after a failure nothing runs any more; when machines come or go the run saves first."""
        if self.ranks.running():
            print("other machines have come; saving, to go on with them", file=sys.stderr, flush=True)
            self.ranks.signal(signal.SIGTERM)
            self.ranks.end(self.train.save_deadline)
            self._record("end", code=PREEMPTED)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        deadline = time.monotonic() + self.wait
        while (left := deadline - time.monotonic()) > 0:
            if self.told is not None:
                raise Preempted("told to stop between two starts")
            time.sleep(min(0.1, left))
        super()._restart_workers(worker_group)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self.blocked = True
        try:
            if self.told is not None:
                raise Preempted("told to stop between two starts")
            super()._rendezvous(worker_group)
        finally:
            self.blocked = False

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *_: Any, **__: Any) -> None:
        self.ranks.end(0.0)

    # What this machine decides.

    def _told_to_stop(self, number: int, frame: FrameType | None) -> None:
        if self.told is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.told is None:
            self.told = time.monotonic()
            self.ranks.signal(signal.SIGTERM)
        if self.blocked:
            raise Preempted("told to stop while waiting for other machines")

    def _preempted(self) -> RunResult:
        """All ranks save after the same step and end; those that do not in time are ended."""
        since = self.told if self.told is not None else time.monotonic()
        self.ranks.end(max(0.0, since + self.train.save_deadline - time.monotonic()))
        codes = self.ranks.codes()
        failed = {rank: code for rank, code in codes.items() if code not in (0, PREEMPTED)}
        self.code = 0 if not any(codes.values()) else PREEMPTED
        step = self.saved_step()
        saved = f"its last checkpoint is of step {step}" if step >= 0 else "it has no checkpoint yet"
        for rank, code in failed.items():
            print(f"error: rank {rank} {describe_exit(code)} while the run was to be saved", file=sys.stderr)
        if self.code:
            print(f"told to stop: the run can go on later; {saved}", file=sys.stderr, flush=True)
        return self._over()

    def _failed(self, rank: int, code: int, why: str = "") -> RunResult:
        """One rank failed: end the others, tell it, and start again or give up."""
        self.ranks.end(GRACE if not why else 0.0)
        message = why or self.ranks.failure(rank, code)
        if code == MISTAKE:
            print(message, file=sys.stderr, flush=True)
            self.code = MISTAKE
            return self._over()
        step = self.saved_step()
        wait = self.restarts.after_failure(step)
        if wait is None:
            limit = self.restarts.limit
            often = f"; it has failed {self.restarts.failures} times without a new checkpoint" if limit else ""
            where = f"\nthe other ranks were stopped; all they said is in {self.ranks.logs}"
            print(f"error: {message}{often}{where}", file=sys.stderr, flush=True)
            self._record("gave up", rank=rank, why=message)
            self.code = 1
            return self._over()
        going = f"going on from step {step}" if step >= 0 else "starting again"
        again = f"{going} in {wait:.1f} s (restart {self.restarts.failures} of {self.restarts.limit})"
        print(f"warning: {message}; all ranks are stopped, {again}", file=sys.stderr, flush=True)
        self._record("failed", rank=rank, why=message)
        self.wait = wait
        self._remaining_restarts = self._worker_group.spec.max_restarts
        return RunResult(WorkerState.UNHEALTHY, {}, {})

    def _over(self) -> RunResult:
        self._remaining_restarts = 0
        return RunResult(WorkerState.FAILED, {}, {})

    def _hang(self) -> RunResult | None:
        """Look at the heartbeats; a rank that gets nothing done for too long ends this start."""
        limit, now = self.train.hang_seconds, time.monotonic()
        beats = self._listen()
        idle = max((b.idle for b in beats if b.idle > limit_in(b.phase, limit)), default=0.0)
        for count, heard in self.heard.values():
            if now - heard > (limit if count else max(limit, FIRST_BEAT)):
                idle = max(idle, now - heard)
        if not idle:
            return None
        # A little later every rank has told where it stands, and those that have not are the silent ones.
        pause = 2.5 * interval(limit)
        before = {rank: count for rank, (count, _) in self.heard.items()}
        time.sleep(pause)
        beats = self._listen()
        running = self.ranks.running()
        silent = [rank for rank, (count, _) in self.heard.items() if count == before[rank] and rank in running]
        asked = [rank for rank in running if not self.ranks.stopped(rank)]
        self.ranks.signal(signal.SIGUSR2, asked)
        time.sleep(0.2)
        world = self._worker_group.workers[0].world_size
        others = [b for rank in range(world) if rank not in self.heard and (b := read_beat(self.ranks.logs, rank))]
        why = explain([*beats, *others], silent)
        halted = [rank for rank in silent if self.ranks.stopped(rank)]
        if halted:
            why += f" ({'its process is' if len(halted) == 1 else 'their processes are'} stopped by a signal)"
        why = f"no progress for {idle:.0f} s: {why}; stacks are in {self.ranks.logs}"
        self._record("hang", seconds=round(idle + pause, 3), why=why)
        culprit = silent[0] if silent else max(beats, key=lambda b: b.idle).rank if beats else 0
        return self._failed(culprit, -signal.SIGKILL, why)

    def _listen(self) -> list[Beat]:
        beats = [beat for rank in self.heard if (beat := read_beat(self.ranks.logs, rank)) is not None]
        for beat in beats:
            if beat.count != self.heard[beat.rank][0]:
                self.heard[beat.rank] = (beat.count, time.monotonic())
        return beats

    def _record(self, what: str, **values: Any) -> None:
        if self._worker_group.group_rank in (0, None):  # one machine keeps the account for all
            record(self.out, what, **values)
