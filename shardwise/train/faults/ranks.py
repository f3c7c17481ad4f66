"""The ranks of one machine as processes: started together, polled, asked for their stacks, and ended.

Every rank has a session of its own, so that it can be ended with all it started and a terminal's Ctrl-C reaches the parent
alone. Its messages are kept in `logs/rank-N.log`, those of later starts behind those of earlier ones; the first rank also
speaks to the terminal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardwise.train.faults.nursery import Nursery, can_fork

GRACE = 3.0
"""Seconds that ranks have to end by themselves once one has failed."""
MISTAKE = 2
"""Exit code of a user's mistake, which a restart does not mend."""


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def environment_of(rank: int, local_rank: int, world: int, here: int, address: str, port: int) -> dict[str, str]:
    """What a rank is told about its place, in the words of torchrun. `here` is the number of ranks on this machine."""
    cores = max(1, (os.cpu_count() or 1) // here)
    return dict(
        os.environ,
        RANK=str(rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(here),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
        OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", str(cores)),
    )


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


class Ranks:
    """Running ranks, by their number in the whole run. Best made before anything else of the command, since it forks."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.pids: dict[int, int] = {}
        self._nursery = Nursery(fork=can_fork())
        self._start = 0
        self._codes: dict[int, int] = {}
        self._begins: dict[int, int] = {}

    def start(self, arguments: Sequence[str], environments: Mapping[int, Mapping[str, str]]) -> None:
        """Run `shardwise ARGUMENTS` once for each environment."""
        self.logs.mkdir(parents=True, exist_ok=True)
        if not self._nursery.alive:
            self._nursery.close()
            self._nursery = Nursery(fork=False)
        self._start += 1
        self.pids, self._codes = {}, {}
        births = {}
        for rank, environment in environments.items():
            log = self.logs.absolute() / f"rank-{rank}.log"
            with log.open("ab") as file:
                self._begins[rank] = file.tell()
            births[rank] = dict(environment=dict(environment), log=str(log), speaks=rank == 0)
        self._nursery.ask(start=self._start, arguments=list(arguments), births=births)
        while len(self.pids) < len(births):
            self._listen(wait=1.0)
            if not self._nursery.alive:
                self._codes |= dict.fromkeys(births, -signal.SIGKILL)
                self.pids = dict.fromkeys(births, 0) | self.pids

    def _listen(self, wait: float = 0.0) -> None:
        for told in self._nursery.answers(wait):
            if told["start"] == self._start:
                if "code" in told:
                    self._codes[told["rank"]] = told["code"]
                else:
                    self.pids[told["rank"]] = told["pid"]
        if not self._nursery.alive:  # nobody is left to tell how they end
            self._abandon()

    def _abandon(self) -> None:
        """End ranks whose nursery is gone, and see that they are, since the first one holds the run folder."""
        for rank, pid in self.pids.items():
            deadline = time.monotonic() + GRACE
            with contextlib.suppress(ProcessLookupError, PermissionError):
                while rank not in self._codes and self._state(rank) not in ("Z", "X") and time.monotonic() < deadline:
                    os.killpg(pid, signal.SIGKILL)
                    time.sleep(0.01)
            self._codes.setdefault(rank, -signal.SIGKILL)

    def codes(self) -> dict[int, int]:
        """The exit codes of those that have ended; negative for a signal."""
        self._listen()
        return self._codes

    def failed(self) -> tuple[int, int] | None:
        """A rank that has failed and its code. Ranks that see another go fail soon after it, with an error of their own; so one
        that was killed comes first, then a user's mistake."""
        failed = {rank: code for rank, code in self.codes().items() if code}
        return min(failed.items(), key=lambda item: (item[1] > 0, item[1] != MISTAKE, item[0]), default=None)

    def story(self, rank: int, code: int) -> str:
        """What is to be told about a rank that failed: its own sentences for a user's mistake, or else how it ended."""
        said = self.said(rank)
        if code == MISTAKE:
            return "\n".join(line for line in said if line.startswith("error: "))
        last = f": {said[-1]}" if said and code > 0 else ""
        return f"rank {rank} {how_it_ended(code)}{last}"

    def running(self) -> list[int]:
        """Those that have not ended."""
        ended = self.codes()
        return [rank for rank in self.pids if rank not in ended]

    def signal(self, number: signal.Signals, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to the processes of ranks (all that run)."""
        for rank in self.running() if ranks is None else ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)

    def stopped(self, rank: int) -> bool:
        """Whether a rank's process is halted by a signal, as Linux tells it."""
        return self._state(rank) in ("T", "t")

    def _state(self, rank: int) -> str:
        """Linux's letter for the state of a rank's process; empty where there is none."""
        try:
            return Path(f"/proc/{self.pids[rank]}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return ""

    def end(self, grace: float) -> None:
        """Give all ranks `grace` seconds to end by themselves, then kill them with all they started."""
        deadline = time.monotonic() + grace
        while self.running() and (left := deadline - time.monotonic()) > 0:
            self._listen(wait=min(left, 1.0))
        for rank in self.running():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pids[rank], signal.SIGKILL)
        while self.running():
            self._listen(wait=1.0)

    def close(self) -> None:
        """End all there is."""
        self.end(0.0)
        self._nursery.close()

    def said(self, rank: int) -> list[str]:
        """What a rank has written since it was started, line by line."""
        path = self.logs / f"rank-{rank}.log"
        with contextlib.suppress(OSError):
            text = path.read_bytes()[self._begins.get(rank, 0) :].decode(errors="replace")
            return [line for line in text.splitlines() if line.strip()]
        return []
