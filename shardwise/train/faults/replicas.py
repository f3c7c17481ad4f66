"""The command of a run whose replicas come and go (`layout.sync_elastic`): it starts each as a world of its own, and restarts one
without the others.

The ranks of a replica live and die together. When one of them fails or hangs, the others of its replica are killed, the coordinator
leaves the replica out, and it is started again; it rejoins with the state of a replica that is there. A replica that fails again
and again without coming as far as an exchange is given up, and the run with the last of them. Told to stop, all replicas end behind
the next exchange, and one saves.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from shardwise.checkpoint.job import lock_folder
from shardwise.parallel.members import REPLICA, Place
from shardwise.run import Run, counted
from shardwise.run.coordinates import RankCoordinates
from shardwise.train.faults.agent import FIRST_HEARTBEAT, Restarts
from shardwise.train.faults.coordinator import Coordinator
from shardwise.train.faults.goodput import record_event
from shardwise.train.faults.heartbeat import Heartbeat, explain, heartbeat_path, limit_in, read_heartbeat
from shardwise.train.faults.ranks import MISTAKE, Ranks, environment_of, free_port
from shardwise.train.faults.stop import PREEMPTED, SIGNALS, StopRequest, decided

POLL = 0.05


@dataclass
class _Replica:
    """One replica's processes."""

    number: int
    ranks: Ranks
    restarts: Restarts
    start: int = -1
    due: float = 0.0
    """When it is to be started; infinite while it runs, or is over."""
    seen: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Rank to the count of its last heartbeat, and when that was first seen."""
    code: int | None = None
    """Its outcome, where there is one."""


class Replicas:
    """Starts and watches the replicas of a run on this machine."""

    def __init__(self, run: Run, out: Path, arguments: Sequence[str]) -> None:
        self.run, self.out, self.arguments = run, out, list(arguments)
        self.size = run.layout.world // run.layout.replicate
        self.stop = StopRequest()
        train = run.train
        self.replicas = [
            _Replica(n, Ranks(out / "logs"), Restarts(train.restarts, train.restart_wait))
            for n in range(run.layout.replicate)
        ]
        self.numbers = [
            [r for r in range(run.layout.world) if RankCoordinates(run.layout, r).index("replicate") == n]
            for n in range(run.layout.replicate)
        ]

    def execute(self) -> int:
        """Run until all is done; returns the exit code."""
        lock = lock_folder(self.run, self.out)
        before = {number: signal.getsignal(number) for number in SIGNALS}
        code = 1
        try:
            for number in SIGNALS:
                signal.signal(number, self._on_signal)
            record_event(self.out, "begin", ranks=self.run.layout.world, restart=False)
            with Coordinator(len(self.replicas), self.size, self._say) as self.coordinator:
                code = self._watch()
        finally:
            for each in self.replicas:
                each.ranks.end(0.0)
            decided()
            for number, handler in before.items():
                signal.signal(number, handler)
            record_event(self.out, "end" if code in (0, PREEMPTED) else "failed", code=code)
            lock.release()
        return code

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        first = not self.stop.wanted
        self.stop.note(number, frame)
        if first:
            for each in self.replicas:
                each.ranks.signal(signal.SIGTERM)

    def _watch(self) -> int:
        membership = self.coordinator.membership
        while True:
            for each in self.replicas:
                if time.monotonic() >= each.due and not self.stop.wanted:
                    self._start(each)
                code = self._look_at(each)
                if code is not None:
                    return code
            running = [each for each in self.replicas if each.ranks.running()]
            if membership.over:
                return self._end(running)
            if self.stop.wanted:
                waited = time.monotonic() - self.stop.since
                nobody = not membership.members or not running  # who could save
                if nobody or waited > self.run.train.save_deadline:
                    print("stop requested: the run can be resumed, from its last checkpoint", file=sys.stderr)
                    return PREEMPTED
            elif not running and all(each.due == float("inf") for each in self.replicas):
                print("error: no replica is left", file=sys.stderr, flush=True)
                return 1
            time.sleep(POLL)

    def _end(self, running: list[_Replica]) -> int:
        """The end of the run is written: the others end by themselves."""
        deadline = time.monotonic() + self.run.train.save_deadline
        members = set(self.coordinator.membership.members)
        while any(each.number in members and each.ranks.running() for each in running):
            if time.monotonic() > deadline:
                break
            time.sleep(POLL)
        codes = {code for n in members for code in self.replicas[n].ranks.codes().values()}
        for code in (MISTAKE, PREEMPTED):
            if code in codes:
                if code == MISTAKE:
                    self._print_mistake(members)
                return code
        return 0

    def _print_mistake(self, members: set[int]) -> None:
        failed = [self.replicas[n].ranks.failed() for n in members]
        for number, found in zip(members, failed, strict=True):
            if found is not None and found[1] == MISTAKE:
                print(self.replicas[number].ranks.failure(*found), file=sys.stderr, flush=True)
                return

    def _start(self, each: _Replica) -> None:
        each.start, each.due = self.coordinator.membership.desks[each.number].start, float("inf")
        world, port = self.run.layout.world, free_port()
        environments = {}
        for rank, number in enumerate(self.numbers[each.number]):
            store = self.coordinator.store.port
            place = Place(each.number, each.start, rank, "127.0.0.1", self.coordinator.port, store)
            environments[number] = environment_of(rank, number, self.size, world, "127.0.0.1", port) | {
                "SHARDWISE_AGENT": "1",
                REPLICA: place.to_variable(),
            }
            heartbeat_path(self.out / "logs", number).unlink(missing_ok=True)
        each.seen = {number: (0, time.monotonic()) for number in environments}
        each.ranks.start(self.arguments, environments)

    def _look_at(self, each: _Replica) -> int | None:
        """See to a replica that failed or hangs; returns the exit code where that ends the run."""
        if not each.ranks.pids or each.due < float("inf"):
            return None
        failed = each.ranks.failed()
        if failed is not None and failed[1] == PREEMPTED:
            return None
        why = each.ranks.failure(*failed) if failed is not None else self._hang(each)
        if not why or each.code is not None:
            return None
        if failed is not None and failed[1] == MISTAKE:
            print(why, file=sys.stderr, flush=True)
            return MISTAKE
        each.ranks.end(0.0)
        membership = self.coordinator.membership
        if membership.over or self.stop.wanted:
            membership.leave(each.number, each.start)
            return None
        wait = each.restarts.after_failure(membership.reached[each.number])
        membership.leave(each.number, each.start)
        record_event(self.out, "replica failed", replica=each.number, why=why)
        if wait is None:
            often = counted(each.restarts.failures, "time")
            print(
                f"error: {why}; replica {each.number} has failed {often} without an exchange and is given up",
                file=sys.stderr,
                flush=True,
            )
            membership.give_up(each.number)
            each.code = 1
            return None
        others = "the others go on" if membership.members else "it was the last"
        print(
            f"warning: {why}; replica {each.number} starts again in {wait:.1f} s, {others}", file=sys.stderr, flush=True
        )
        each.due = time.monotonic() + wait
        return None

    def _hang(self, each: _Replica) -> str:
        """Why a replica counts as hung; "" where it does not: one of its ranks has made progress."""
        limit, now, beats = self.run.train.hang_seconds, time.monotonic(), list[Heartbeat]()
        idle = float("inf")
        for number, (count, since) in each.seen.items():
            beat = read_heartbeat(self.out / "logs", number)
            if beat is None:
                idle = min(idle, now - since - max(limit, FIRST_HEARTBEAT))
                continue
            beats.append(beat)
            if beat.count != count:
                each.seen[number] = (beat.count, now)
            idle = min(idle, beat.idle + now - each.seen[number][1] - limit_in(beat.phase, limit))
        if idle <= 0:
            return ""
        idle += max((limit_in(beat.phase, limit) for beat in beats), default=max(limit, FIRST_HEARTBEAT))
        silent = [number for number in each.ranks.running() if each.ranks.stopped(number)]
        record_event(self.out, "hang", seconds=round(idle, 3), replica=each.number)
        return f"replica {each.number} has made no progress for {idle:.0f} s: {explain(beats, silent)}"

    def _say(self, what: str, **values: Any) -> None:
        """What the coordinator decided, for people and for the record."""
        record_event(self.out, what, **values)
        if what == "exchange":
            return
        here = f"{len(values['members'])} of {counted(len(self.replicas), 'replica')}"
        if what == "left":
            sentence = f"replica {values['replica']} has left behind step {values['step']}: {here} go on"
        else:
            sentence = f"replica {values['replica']} joins behind step {values['step']}, from replica {values['source']}: {here}"
        print(sentence, file=sys.stderr, flush=True)
