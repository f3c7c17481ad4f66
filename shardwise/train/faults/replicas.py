"""The command of a run with elastic replicas (`layout.sync_elastic`): it starts the replicas of its machine, each as a separate
world, and restarts one without stopping the others.

The ranks of a replica live and die together. When one of them fails or hangs, the other ranks of its replica are killed, the
coordinator excludes the replica, and the replica is started again and rejoins with the state of another one. A replica that keeps
failing before it reaches an exchange is given up; the run ends when the last replica is given up. When asked to stop, all replicas
end after the next exchange, and one saves.
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
from shardwise.run.ranks.coordinates import ranks_of_replica
from shardwise.train.faults.agent import FIRST_HEARTBEAT, Restarts
from shardwise.train.faults.coordinator import Coordinator, meet
from shardwise.train.faults.goodput import record_event
from shardwise.train.faults.heartbeat import Heartbeat, explain, heartbeat_path, limit_in, read_heartbeat
from shardwise.train.faults.ranks import MISTAKE, Ranks, environment_of, free_port
from shardwise.train.faults.stop import PREEMPTED, StopRequest, decided

POLL = 0.05


@dataclass
class _Replica:
    """One replica's processes."""

    number: int
    ranks: Ranks
    restarts: Restarts
    start: int = -1
    due: float = 0.0
    """The time of its next start; infinite while it runs or once it is over."""
    seen: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Rank to the count of its last heartbeat, and when that was first seen."""
    code: int | None = None
    """Its outcome, once there is one."""


class Replicas:
    """Starts and watches the replicas of a run on this machine."""

    def __init__(self, run: Run, out: Path, arguments: Sequence[str]) -> None:
        self.run, self.out, self.arguments = run, out, list(arguments)
        self.size = run.layout.world // run.layout.replicate
        self.stop = StopRequest()
        self.replicas: list[_Replica] = []
        self.numbers = [ranks_of_replica(run.layout, n) for n in range(run.layout.replicate)]

    def execute(self) -> int:
        """Run until the training ends; returns the exit code."""
        self.board = meet(self.run, self._say)
        first = isinstance(self.board, Coordinator)  # this command records for all machines
        lock = lock_folder(self.run, self.out) if first else None
        train, here = self.run.train, self.run.cluster.devices_per_node // self.size
        self.replicas = [
            _Replica(n, Ranks(self.out / "logs"), Restarts(train.restarts, train.restart_wait))
            for n in range(self.board.machine * here, (self.board.machine + 1) * here)
        ]
        code = 1
        try:
            self.stop.begin(self._on_signal)
            if first:
                record_event(self.out, "begin", ranks=self.run.layout.world, restart=False)
            code = self._watch()
        except ConnectionError as e:
            print(f"error: {e}", file=sys.stderr, flush=True)
        finally:
            self.board.close()
            for each in self.replicas:
                each.ranks.end(0.0)
            decided()
            self.stop.end()
            if lock is not None:
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
        while True:
            view = self.board.view()
            for each in self.replicas:
                if time.monotonic() >= each.due and not self.stop.wanted:
                    self._start(each, view["starts"][each.number])
                code = self._look_at(each)
                if code is not None:
                    return code
            running = [each for each in self.replicas if each.ranks.running()]
            if view["over"]:
                return self._end(running, view["members"])
            if self.stop.wanted:
                waited = time.monotonic() - self.stop.since
                nobody = not view["members"] or not running  # no replica could save
                if nobody or waited > self.run.train.save_deadline:
                    print("stop requested: the run can be resumed, from its last checkpoint", file=sys.stderr)
                    return PREEMPTED
            elif not running and all(each.due == float("inf") for each in self.replicas):
                print("error: no replica is left", file=sys.stderr, flush=True)
                return 1
            time.sleep(POLL)

    def _end(self, running: list[_Replica], members: list[int]) -> int:
        """The end of the run is written: wait for the remaining ranks to end by themselves; returns the exit code."""
        deadline = time.monotonic() + self.run.train.save_deadline
        ours = [each for each in self.replicas if each.number in members]
        while any(each.ranks.running() for each in ours) and time.monotonic() < deadline:
            time.sleep(POLL)
        codes = {code for each in ours for code in each.ranks.codes().values()}
        for code in (MISTAKE, PREEMPTED):
            if code in codes:
                for each in ours:
                    if code == MISTAKE and (found := each.ranks.failed()) is not None and found[1] == MISTAKE:
                        print(each.ranks.failure(*found), file=sys.stderr, flush=True)
                return code
        return 0

    def _start(self, each: _Replica, start: int) -> None:
        each.start, each.due = start, float("inf")
        here, port, board = self.run.cluster.devices_per_node, free_port(), self.board
        environments = {}
        for rank, number in enumerate(self.numbers[each.number]):
            place = Place(each.number, start, rank, board.address, board.port, board.store)
            local_rank = self.replicas.index(each) * self.size + rank
            environments[number] = environment_of(rank, local_rank, self.size, here, "127.0.0.1", port) | {
                "SHARDWISE_AGENT": "1",
                REPLICA: place.to_variable(),
            }
            heartbeat_path(self.out / "logs", number).unlink(missing_ok=True)
        each.seen = {number: (0, time.monotonic()) for number in environments}
        each.ranks.start(self.arguments, environments)

    def _look_at(self, each: _Replica) -> int | None:
        """Handle a replica that failed or hangs; returns the exit code if that ends the run."""
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
        view = self.board.view()
        self.board.leave(each.number, each.start)
        if view["over"] or self.stop.wanted:
            return None
        wait = each.restarts.after_failure(view["reached"][each.number])
        record_event(self.out, "replica failed", replica=each.number, why=why)
        if wait is None:
            often = counted(each.restarts.failures, "time")
            print(
                f"error: {why}; replica {each.number} has failed {often} without an exchange and is given up",
                file=sys.stderr,
                flush=True,
            )
            self.board.give_up(each.number)
            each.code = 1
            return None
        others = "the others go on" if set(view["members"]) - {each.number} else "it was the last"
        print(
            f"warning: {why}; replica {each.number} starts again in {wait:.1f} s, {others}", file=sys.stderr, flush=True
        )
        each.due = time.monotonic() + wait
        return None

    def _hang(self, each: _Replica) -> str:
        """Why a replica counts as hung; "" if it does not, because one of its ranks has made progress."""
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
        """Print and record a decision of the coordinator."""
        record_event(self.out, what, **values)
        if what == "exchange":
            return
        here = f"{len(values['members'])} of {counted(self.run.layout.replicate, 'replica')}"
        if what == "left":
            sentence = f"replica {values['replica']} has left behind step {values['step']}: {here} go on"
        else:
            sentence = f"replica {values['replica']} joins behind step {values['step']}, from replica {values['source']}: {here}"
        print(sentence, file=sys.stderr, flush=True)
