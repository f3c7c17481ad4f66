"""Detects hangs: each rank writes a heartbeat, and all heartbeats together show which rank did not arrive at a collective.

Progress is a step, an action of the pipeline, or bytes of a checkpoint read or written; a rank that waits for one that makes
progress does not hang either. A thread writes `logs/rank-N.beat`: step, phase, seconds without progress, and for each process group
the last collective begun and the one waited for. The thread keeps writing while the main thread is stuck in a collective; a file
that stops changing means a stopped or frozen process. The file has a fixed size and is written in place, so a full disk does not
silence a healthy rank. Readers compare counters, not clocks, so machines need not agree on the time. The thread is also the last
resort under torchrun or srun, where no agent watches: long after an agent would have acted, it prints what it knows and ends the
process.

The collectives come from PyTorch's flight recorder. It records all collectives of a process group, including those of `fully_shard`
and DistributedDataParallel, on NCCL and on gloo; the group's description is the axis. A rank that waits for collective 17 of a
group waits for the members that have not begun collective 17. The recorder lacks P2P messages on gloo, so the pipeline itself
reports the message it waits for. It also lacks groups in which a rank has begun nothing within the recorder's memory.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from shardwise.ledger import AXIS_OF

if TYPE_CHECKING:
    from shardwise.parallel.mesh import Mesh
    from shardwise.parallel.pipeline import Pipeline

FILE_BYTES = 4096
HEARTBEATS = 8
"""Heartbeats per `train.hang_seconds`, so that silence can be told from slowness; never more than five seconds apart."""
START_SECONDS = 60.0
"""Smallest limit before the first step, while models are built and files are read."""
HUNG = 70
"""Exit code of a rank that ended itself because it hung or could not save in time (EX_SOFTWARE)."""
RECORDED = 256
"""Collectives the flight recorder keeps, unless the environment sets a number."""
NAME_LENGTH = 16
"""Characters of a group's name (a hash) that are written."""


@dataclass(frozen=True)
class GroupProgress:
    """How far a rank has got in one of its process groups."""

    axis: str
    group: str
    begun: int = 0
    """Number of the last collective it has begun there; 0: none is recorded."""
    waits_for: int = 0
    """Number of the first collective that it has begun and that is not over; 0: none."""
    collective: str = ""
    """The name of that collective, or else of the last one begun."""
    seconds: float = 0.0
    """Seconds since it began that collective."""
    sender: int = -1
    """The rank that has to send, for a pipeline's P2P message; -1: a collective."""


@dataclass(frozen=True)
class Heartbeat:
    """What a rank reports about itself."""

    rank: int
    process: int = 0
    count: int = 0
    step: int = 0
    phase: str = "start"
    idle: float = 0.0
    """Seconds without progress."""
    groups: list[GroupProgress] = field(default_factory=list)


def heartbeat_path(logs: Path, rank: int) -> Path:
    """The file of a rank's heartbeat."""
    return logs / f"rank-{rank}.beat"


def read_heartbeat(logs: Path, rank: int) -> Heartbeat | None:
    """The last heartbeat of a rank; None if there is none, or if it is just being written."""
    try:
        values = json.loads(heartbeat_path(logs, rank).read_text())
        return Heartbeat(**(values | {"groups": [GroupProgress(**g) for g in values["groups"]]}))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def interval(hang_seconds: float) -> float:
    """Seconds between two heartbeats."""
    return min(5.0, hang_seconds / HEARTBEATS)


def limit_in(phase: str, hang_seconds: float) -> float:
    """Seconds that a rank may be without progress."""
    return hang_seconds if phase != "start" else max(hang_seconds, START_SECONDS)


class ProgressMonitor:
    """Tells whether any rank of the run makes progress: then the ranks without progress wait for it, and none hangs. Heartbeats are
    read only on demand, and only up to the first that shows progress, since there may be thousands."""

    def __init__(self, logs: Path, hang_seconds: float) -> None:
        self.logs, self.limit = logs, hang_seconds
        self.seen: dict[int, tuple[int, float]] = {}
        """Rank to the count of its last heartbeat and when that was first seen."""
        self._first = 0

    def somebody_moves(self, world: int) -> bool:
        """Whether a rank has made progress within its limit."""
        now = time.monotonic()
        for rank in (self._first % world, *range(world)):
            beat = read_heartbeat(self.logs, rank)
            if beat is None:
                continue
            if self.seen.get(rank, (-1, 0.0))[0] != beat.count:
                self.seen[rank] = (beat.count, now)
            # A heartbeat that does not change belongs to a process that is gone or stopped.
            if beat.idle + now - self.seen[rank][1] <= limit_in(beat.phase, self.limit):
                self._first = rank
                return True
        return False


class HeartbeatThread(threading.Thread):
    """Writes this rank's heartbeat until it is closed. The main thread only sets `step` and `phase`; threads that read or write
    checkpoints count `bytes_done`."""

    def __init__(self, logs: Path, rank: int, world: int, hang_seconds: float) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.logs, self.rank, self.world, self.limit = logs, rank, world, hang_seconds
        self.step, self.phase, self.bytes_done = 0, "start", 0
        self.lookout = ProgressMonitor(logs, hang_seconds)
        self.actions_done: Callable[[], int] = lambda: 0
        self.groups: Callable[[], list[GroupProgress]] = list
        self.deadline: Callable[[], float] = lambda: float("inf")
        self.parent: int | None = None
        self._over = threading.Event()
        self._stacks: int | None = None

    def __enter__(self) -> HeartbeatThread:
        self.logs.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # stderr may be no file
            self._stacks = os.dup(sys.stderr.fileno())
            # Works even while the interpreter is blocked: the agent asks for stacks with SIGUSR2.
            faulthandler.register(signal.SIGUSR2, file=self._stacks, all_threads=True)
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, _: TracebackType | None) -> None:
        self._over.set()
        self.join()
        if self._stacks is not None:
            faulthandler.unregister(signal.SIGUSR2)
            os.close(self._stacks)

    def run(self) -> None:
        """Write heartbeats, and end the process when it cannot continue."""
        file: int | None = None
        pause, count = interval(self.limit), 0
        last, since = self._progress(), time.monotonic()
        while True:
            now = self._progress()
            if now != last:
                last, since = now, time.monotonic()
            idle = time.monotonic() - since
            count += 1
            beat = Heartbeat(self.rank, os.getpid(), count, self.step, self.phase, round(idle, 3), self.groups())
            with contextlib.suppress(OSError):  # a full disk may have room for the next one
                if file is None:
                    file = os.open(heartbeat_path(self.logs, self.rank), os.O_WRONLY | os.O_CREAT, 0o644)
                os.pwrite(file, json.dumps(asdict(beat)).encode()[:FILE_BYTES].ljust(FILE_BYTES), 0)
            if idle > limit_in(self.phase, self.limit) + 4 * pause and not self.lookout.somebody_moves(self.world):
                self._exit(f"no progress for {idle:.0f} s in {self.phase} of step {self.step}")
            if self.parent is not None and os.getppid() != self.parent:
                self._exit("the process that started the ranks is gone")
            if time.monotonic() > self.deadline():
                self._exit("stop requested, but the last checkpoint was not written within train.save_deadline")
            if self._over.wait(pause):
                if file is not None:
                    os.close(file)
                return

    def _progress(self) -> tuple[int, str, int, int]:
        return self.step, self.phase, self.actions_done(), self.bytes_done

    def _exit(self, why: str) -> None:
        """Print everything known about the hang, and end the process, because the main thread is stuck."""
        beats = [beat for rank in range(self.world) if (beat := read_heartbeat(self.logs, rank)) is not None]
        print(f"error: rank {self.rank}: {why}; {explain(beats, [])}", file=sys.stderr, flush=True)
        if self._stacks is not None:
            faulthandler.dump_traceback(file=self._stacks, all_threads=True)
        os._exit(HUNG)


def enable_flight_recorder(environment: Mapping[str, str]) -> None:
    """Turn PyTorch's flight recorder on; must be called before the first process group is made."""
    if "TORCH_FR_BUFFER_SIZE" not in environment and "TORCH_NCCL_TRACE_BUFFER_SIZE" not in environment:
        os.environ["TORCH_FR_BUFFER_SIZE"] = str(RECORDED)


def group_progress(mesh: Mesh, pipeline: Pipeline, now_ns: int) -> list[GroupProgress]:
    """How far this rank has got in each of its process groups."""
    from shardwise.torch_private import flight_record

    found = {name: GroupProgress(axis, name[:NAME_LENGTH]) for name, axis in mesh.axes_by_group().items()}
    for entry in json.loads(flight_record()).get("entries", []):  # oldest first
        name, _ = entry["process_group"]
        # On NCCL, P2P messages have their own numbers, which two ranks cannot compare; a pipeline's are added below.
        if name not in found or entry["is_p2p"]:
            continue
        before, number = found[name], entry["collective_seq_id"]
        over = entry["retired"] or entry["state"] == "completed"
        if before.waits_for:  # an earlier collective is not over yet: report that one
            found[name] = replace(before, begun=number)
            continue
        collective = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
        seconds = round((now_ns - entry["time_created_ns"]) / 1e9, 3)
        found[name] = GroupProgress(before.axis, before.group, number, 0 if over else number, collective, seconds)
    result = list(found.values())
    if pipeline.waiting is not None:
        message, sender = pipeline.waiting
        what = f"{message.kind} of stage {message.stage}, microbatch {message.microbatch}"
        result.append(GroupProgress("pipeline", "message", waits_for=1, collective=what, sender=sender))
    return result


def missing(beats: Sequence[Heartbeat], silent: Sequence[int]) -> list[tuple[int, GroupProgress]]:
    """The ranks that others wait for and that wait for no rank themselves, or are silent; each with the wait that it causes."""
    by_rank = {beat.rank: beat for beat in beats if beat.rank not in silent}
    waiting = {rank for rank, beat in by_rank.items() if any(g.waits_for for g in beat.groups)}
    absent: dict[int, GroupProgress] = {}
    for rank in sorted(waiting):
        for wait in by_rank[rank].groups:
            if not wait.waits_for:
                continue
            if wait.sender >= 0:
                absent.setdefault(wait.sender, wait)
            for beat in beats:
                if any(g.group == wait.group and g.begun < wait.waits_for for g in beat.groups):
                    absent.setdefault(beat.rank, wait)
    culprits = [rank for rank in absent if rank not in waiting]
    return [(rank, absent[rank]) for rank in sorted(culprits or absent)]


def explain(beats: Sequence[Heartbeat], silent: Sequence[int]) -> str:
    """A sentence that names the ranks that did not arrive, and at which collective or message."""
    found = missing(beats, silent)
    parts = [
        f"rank {rank} did not arrive at {wait.collective} number {wait.waits_for} of axis {axis}, "
        f"where others have waited for {wait.seconds:.0f} s"
        if wait.sender < 0
        else f"rank {rank} did not send the {wait.collective}, along axis {axis}"
        for rank, wait, axis in ((rank, wait, AXIS_OF.get(wait.axis, wait.axis)) for rank, wait in found)
    ]
    named = {rank for rank, _ in found}
    parts += [f"rank {rank} gives no sign of life" for rank in sorted(set(silent)) if rank not in named]
    if not parts:
        doing = ", ".join(f"rank {b.rank} in {b.phase} of step {b.step}" for b in beats if b.idle > 0)
        parts = [f"no rank waits for another in a collective that is recorded ({doing})"]
    return "; ".join(parts)
