"""Heartbeats: a small file a rank, `logs/rank-N.beat`, that says what the rank is doing, since when, and what it waits for.

A thread writes it, so that it goes on while the main thread is stuck in a collective; when the whole process is stopped or
frozen, the file stands still, and that is a sign too. The main thread only sets two attributes, which costs nothing. The file has
one fixed size and is written in place, so that a full disk does not silence a healthy rank. Readers compare counters, not
clocks, so machines need not agree on the time. The thread is also the last resort of a rank that nobody watches (under torchrun
or srun): long after a watcher would have acted, it tells what it knows and ends the process.
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
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from shardwise.train.faults.arrivals import Arrival, Beat, explain

SIZE = 4096
BEATS = 8
"""Beats in `train.hang_seconds`, so that silence is told from slowness; never more than five seconds apart."""
START = 60.0
"""Before the first step, while models are built and files are read, nobody is blamed for less than this."""
HUNG = 70
"""Exit code of a rank that ended itself because it hung or could not save in time (EX_SOFTWARE)."""


def path_of(logs: Path, rank: int) -> Path:
    """The file of a rank's heartbeat."""
    return logs / f"rank-{rank}.beat"


def read_beat(logs: Path, rank: int) -> Beat | None:
    """The last beat of a rank; None when there is none, or when it is just being written."""
    try:
        values = json.loads(path_of(logs, rank).read_text())
        return Beat(**(values | {"arrivals": [Arrival(**a) for a in values["arrivals"]]}))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def interval(hang_seconds: float) -> float:
    """Seconds between two beats."""
    return min(5.0, hang_seconds / BEATS)


def limit_in(phase: str, hang_seconds: float) -> float:
    """Seconds that a rank may get nothing done."""
    return hang_seconds if phase != "start" else max(hang_seconds, START)


class Heart(threading.Thread):
    """Beats for this rank until it is closed."""

    def __init__(self, logs: Path, rank: int, world: int, hang_seconds: float) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.logs, self.rank, self.world, self.limit = logs, rank, world, hang_seconds
        self.step, self.phase = 0, "start"
        self.done_so_far: Callable[[], int] = lambda: 0
        self.arrivals: Callable[[], list[Arrival]] = list
        self.deadline: Callable[[], float] = lambda: float("inf")
        self.parent: int | None = None
        self._over = threading.Event()
        self._dumps: int | None = None

    def __enter__(self) -> Heart:
        self.logs.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(
            OSError, ValueError, RuntimeError
        ):  # where stderr is no file, there is nothing to dump to
            self._dumps = os.dup(sys.stderr.fileno())
            # Works even while the interpreter is held up: whoever watches this rank asks for stacks with SIGUSR2.
            faulthandler.register(signal.SIGUSR2, file=self._dumps, all_threads=True)
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, _: TracebackType | None) -> None:
        self._over.set()
        self.join()
        if self._dumps is not None:
            faulthandler.unregister(signal.SIGUSR2)
            os.close(self._dumps)

    def run(self) -> None:
        """Beat, and look after oneself."""
        file = os.open(path_of(self.logs, self.rank), os.O_WRONLY | os.O_CREAT, 0o644)
        wait, count = interval(self.limit), 0
        seen, since = self._now(), time.monotonic()
        while True:
            now = self._now()
            if now != seen:
                seen, since = now, time.monotonic()
            idle = time.monotonic() - since
            count += 1
            beat = Beat(self.rank, os.getpid(), count, self.step, self.phase, round(idle, 3), self.arrivals())
            with contextlib.suppress(OSError):
                os.pwrite(file, json.dumps(asdict(beat)).encode()[:SIZE].ljust(SIZE), 0)
            if idle > limit_in(self.phase, self.limit) + 4 * wait:
                self._give_up(f"no progress for {idle:.0f} s in {self.phase} of step {self.step}")
            if self.parent is not None and os.getppid() != self.parent:
                self._give_up("the process that started the ranks is gone")
            if time.monotonic() > self.deadline():
                self._give_up("told to stop, but the last checkpoint was not written within train.save_deadline")
            if self._over.wait(wait):
                os.close(file)
                return

    def _now(self) -> tuple[int, str, int]:
        return self.step, self.phase, self.done_so_far()

    def _give_up(self, why: str) -> None:
        """Tell all there is to tell, and end the process: the main thread will not."""
        beats = [beat for rank in range(self.world) if (beat := read_beat(self.logs, rank)) is not None]
        print(f"error: rank {self.rank}: {why}; {explain(beats, [])}", file=sys.stderr, flush=True)
        if self._dumps is not None:
            faulthandler.dump_traceback(file=self._dumps, all_threads=True)
        os._exit(HUNG)
