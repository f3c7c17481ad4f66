"""The agent of a machine: PyTorch's elastic agent, which meets the agents of other machines, numbers the ranks, and restarts all
ranks when one fails or machines join or leave.

The rendezvous and the loop around it are PyTorch's (`SimpleElasticAgent`). Its ready-made `LocalElasticAgent` is not suitable: it
ends ranks with SIGTERM, which here means "save"; it waits 30 seconds for ranks stuck in a collective; it has no heartbeats, no
back-off, no reset of the failure count after progress, and no exit code that forbids a restart. So this class starts and monitors
the processes itself. A failure is reported in one line that names the rank and the cause.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
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
from shardwise.run.problems import counted
from shardwise.train.faults.goodput import record_event
from shardwise.train.faults.heartbeat import (
    Heartbeat,
    ProgressMonitor,
    explain,
    heartbeat_path,
    interval,
    limit_in,
    read_heartbeat,
)
from shardwise.train.faults.ranks import DOUBLINGS, GRACE, MISTAKE, Ranks, describe_exit, environment_of, free_port
from shardwise.train.faults.stop import PREEMPTED, Preempted, StopRequest, decided

FIRST_HEARTBEAT = 120.0
"""Seconds within which a rank must have written its first heartbeat."""


@dataclass
class Restarts:
    """Counts failures against a limit. A failure after a new checkpoint counts as the first: a run that advances may fail any
    number of times. A run that keeps failing without a new checkpoint is broken, and is given up after `limit` restarts. Each
    restart waits twice as long as the previous one."""

    limit: int
    wait: float
    failures: int = 0
    """Failures since the last new checkpoint."""
    step: int = -1
    """The newest checkpoint's step at the last failure."""

    def after_failure(self, saved_step: int) -> float | None:
        """Seconds to wait before the next start, or None to give up. `saved_step` is the newest checkpoint's step."""
        if saved_step > self.step:
            self.failures = 0
        self.step = saved_step
        self.failures += 1
        if self.failures > self.limit:
            return None
        return self.wait * 2 ** min(self.failures - 1, DOUBLINGS)


class Agent(SimpleElasticAgent):
    """Starts this machine's ranks, monitors them, and decides what to do after a failure. `code` is the exit code."""

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
        self.stop = StopRequest()
        self.started = False  # whether ranks were started, which may have something to save
        self.heartbeats: dict[int, tuple[int, float]] = {}  # rank to its last count and when that was first seen
        self.lookout = ProgressMonitor(ranks.logs, train.hang_seconds)

    def execute(self) -> int:
        """Run until the training ends; returns the exit code."""
        self.out.mkdir(parents=True, exist_ok=True)
        try:
            self.stop.begin(self._on_signal)
            self.run()
        except Preempted:
            self.code = PREEMPTED
            self._say_stopped()
        finally:
            self.started = True  # from here on a signal changes nothing
            self.ranks.end(0.0)
            decided()
            self.stop.end()
            self._record("end" if self.code in (0, PREEMPTED) else "failed", code=self.code)
        return self.code

    # Methods that PyTorch's loop calls.

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        store, workers = worker_group.store, worker_group.workers
        assert store is not None
        world = workers[0].world_size
        arguments = self.arguments(world)
        # The ranks' own store gets a fresh port at every start, so that no rank reaches the store of an earlier one.
        if worker_group.group_rank == 0:
            store.set("shardwise/port", str(free_port()))
        port = int(store.get("shardwise/port"))
        address = worker_group.master_addr or "127.0.0.1"
        environments = {
            w.global_rank: environment_of(w.global_rank, w.local_rank, world, len(workers), address, port)
            | {"SHARDWISE_AGENT": "1"}
            for w in workers
        }
        for rank in environments:
            heartbeat_path(self.ranks.logs, rank).unlink(missing_ok=True)
        self._record("begin", ranks=world, restart=self.starts > 0)
        self.ranks.start(arguments, environments)
        self.heartbeats = {rank: (0, time.monotonic()) for rank in environments}
        self.lookout = ProgressMonitor(self.ranks.logs, self.train.hang_seconds)
        self.started = True
        if self.stop.wanted:  # the signal came during the start
            self.ranks.signal(signal.SIGTERM)
        self.starts += 1
        return {worker.local_rank: self.ranks.pids[worker.global_rank] for worker in workers}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = self.ranks.codes()
        if self.stop.wanted or any(code in (PREEMPTED, -signal.SIGTERM, -signal.SIGUSR1) for code in codes.values()):
            return self._preempted()
        failed = self.ranks.failed()
        if failed is not None:
            return self._failed(*failed)
        if len(codes) == len(self.ranks.pids):
            self.code = 0
            return RunResult(WorkerState.SUCCEEDED, {worker.global_rank: None for worker in worker_group.workers}, {})
        return self._hang() or RunResult(WorkerState.HEALTHY, {}, {})

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:
        """Called before every restart. After a failure no rank runs any more; when machines join or leave the run saves first."""
        if self.ranks.running():
            print("other machines have come; saving, to go on with them", file=sys.stderr, flush=True)
            self.ranks.signal(signal.SIGTERM)
            self.ranks.end(self.train.save_deadline)
            self._record("end", code=PREEMPTED)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self.started = False
        if self.stop.wanted:
            raise Preempted
        wait, self.wait = self.wait, 0.0  # machines that join or leave later are no failure
        time.sleep(wait)
        super()._restart_workers(worker_group)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *_: Any, **__: Any) -> None:
        self.ranks.end(0.0)

    # Decisions of this machine.

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        first = not self.stop.wanted
        self.stop.note(number, frame)
        if not self.started:
            raise Preempted
        if first:
            self.ranks.signal(signal.SIGTERM)

    def _preempted(self) -> RunResult:
        """Wait until all ranks have saved after the same step and ended; ranks that are too late are killed. If a rank ended in any
        other way, the others cannot save without it and get only a short grace period."""
        since = self.stop.since if self.stop.wanted else time.monotonic()
        if not self.stop.wanted:
            self.ranks.signal(signal.SIGTERM)
        deadline = since + self.train.save_deadline
        while self.ranks.running() and time.monotonic() < deadline:
            if any(code not in (0, PREEMPTED) for code in self.ranks.codes().values()):
                deadline = min(deadline, time.monotonic() + GRACE)
            time.sleep(0.02)
        self.ranks.end(0.0)
        codes = self.ranks.codes()
        self.code = PREEMPTED if any(codes.values()) else 0
        for rank, code in codes.items():
            if code == -signal.SIGKILL and time.monotonic() > since + self.train.save_deadline:
                print(f"error: rank {rank} {describe_exit(code)}: it had not saved in time", file=sys.stderr)
        if self.code:
            self._say_stopped()
        return self._over()

    def _say_stopped(self) -> None:
        step = self.saved_step()
        saved = f"its last checkpoint is of step {step}" if step >= 0 else "it has no checkpoint yet"
        print(f"stop requested: the run can be resumed; {saved}", file=sys.stderr, flush=True)

    def _failed(self, rank: int, code: int, why: str = "") -> RunResult:
        """A rank failed: end the others, report it, and start again or give up."""
        self.ranks.end(GRACE if not why else 0.0)
        message = why or self.ranks.failure(rank, code)
        if code == MISTAKE:
            print(message, file=sys.stderr, flush=True)
            self.code = MISTAKE
            return self._over()
        step = self.saved_step()
        wait = self.restarts.after_failure(step)
        failures, limit = self.restarts.failures, self.restarts.limit
        if wait is None:
            often = f"; it has failed {counted(failures, 'time')} without a new checkpoint" if limit else ""
            where = f"\nthe other ranks were stopped; their output is in {self.ranks.logs}"
            print(f"error: {message}{often}{where}", file=sys.stderr, flush=True)
            self._record("gave up", rank=rank, why=message)
            self.code = 1
            return self._over()
        going = f"going on from step {step}" if step >= 0 else "restarting from the beginning"
        again = f"{going} in {wait:.1f} s (restart {failures} of {limit})"
        print(f"warning: {message}; all ranks are stopped, {again}", file=sys.stderr, flush=True)
        self._record("failed", rank=rank, why=message)
        self.wait = wait
        self._remaining_restarts = self._worker_group.spec.max_restarts
        return RunResult(WorkerState.UNHEALTHY, {}, {})

    def _over(self) -> RunResult:
        self._remaining_restarts = 0
        return RunResult(WorkerState.FAILED, {}, {})

    def _hang(self) -> RunResult | None:
        """Check the heartbeats. A rank without progress for too long ends this start, unless some rank makes progress: then it only
        waits for that one."""
        limit, now = self.train.hang_seconds, time.monotonic()
        idle = max((b.idle for b in self._read_heartbeats() if b.idle > limit_in(b.phase, limit)), default=0.0)
        for count, since in self.heartbeats.values():
            if now - since > (limit if count else max(limit, FIRST_HEARTBEAT)):
                idle = max(idle, now - since)
        self.lookout.seen.update(self.heartbeats)  # these were watched continuously
        if not idle or self.lookout.somebody_moves(self._worker_group.workers[0].world_size):
            return None
        # After a pause every live rank has written another heartbeat; ranks that have not are silent.
        pause = 2.5 * interval(limit)
        before = {rank: count for rank, (count, _) in self.heartbeats.items()}
        time.sleep(pause)
        beats = self._read_heartbeats()
        running = self.ranks.running()
        silent = [rank for rank, (count, _) in self.heartbeats.items() if count == before[rank] and rank in running]
        self.ranks.signal(signal.SIGUSR2, [rank for rank in running if not self.ranks.stopped(rank)])
        time.sleep(0.2)
        elsewhere = set(range(self._worker_group.workers[0].world_size)) - set(self.heartbeats)
        others = [beat for rank in elsewhere if (beat := read_heartbeat(self.ranks.logs, rank))]
        why = explain([*beats, *others], silent)
        stopped = [rank for rank in silent if self.ranks.stopped(rank)]
        if stopped:
            why += f" ({'its process is' if len(stopped) == 1 else 'their processes are'} stopped by a signal)"
        why = f"no progress for {idle:.0f} s: {why}; stacks are in {self.ranks.logs}"
        self._record("hang", seconds=round(idle + pause, 3), why=why)
        culprit = silent[0] if silent else max(beats, key=lambda b: b.idle).rank if beats else 0
        return self._failed(culprit, -signal.SIGKILL, why)

    def _read_heartbeats(self) -> list[Heartbeat]:
        beats = [beat for rank in self.heartbeats if (beat := read_heartbeat(self.ranks.logs, rank)) is not None]
        for beat in beats:
            if beat.count != self.heartbeats[beat.rank][0]:
                self.heartbeats[beat.rank] = (beat.count, time.monotonic())
        return beats

    def _record(self, what: str, **values: Any) -> None:
        if self._worker_group.group_rank in (0, None):  # one machine records for all
            record_event(self.out, what, **values)
