"""The ranks of one machine as processes: started together, polled, asked for their stacks, and killed.

They are `multiprocessing` processes. The fork server imports PyTorch once, so a restart takes a second instead of one import per
rank; if it is not available (not on Linux, or no socket can be made), every rank is a fresh interpreter. `_run_rank` adds what the
standard library lacks. Each rank has its own session, so that it can be killed with all its children and a terminal's Ctrl-C
reaches only the command. It has its own environment. Its output goes to `logs/rank-N.log`, appended at every start; the first rank
also writes to the terminal. And it ends when the command dies, which the fork server and its ranks would otherwise outlive.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

from shardwise.train.faults.stop import SIGNALS

GRACE = 3.0
"""Seconds that ranks have to end by themselves after one has failed."""
DOUBLINGS = 6
"""How often the wait before a restart doubles, at most."""
MISTAKE = 2
"""Exit code of a user's mistake, which a restart does not fix."""
COMMAND = "SHARDWISE_COMMAND"
"""The environment variable that names the command that started a rank."""
THREADS = "OMP_NUM_THREADS"
UNKNOWN = 255
"""The exit code that the standard library returns for a process whose fork server was killed."""


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def environment_of(rank: int, local_rank: int, world: int, here: int, address: str, port: int) -> dict[str, str]:
    """The environment of a rank, with torchrun's variables. `here` is the number of ranks on this machine."""
    threads = os.environ.get(THREADS, "")
    if threads_of(threads) is None:
        threads = str(max(1, (os.cpu_count() or 1) // here))
    return dict(
        os.environ,
        RANK=str(rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(here),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
    ) | {THREADS: threads, COMMAND: command_name()}


def command_name() -> str:
    """The name of this process's command, or of the command that started it as a rank."""
    return os.environ.get(COMMAND) or f"{socket.gethostname()}-{os.getpid()}"


def threads_of(value: str) -> int | None:
    """The number of threads that a value of OMP_NUM_THREADS asks for: the first number of its list, which has one for each level of
    nested parallel regions (OpenMP 5.2, section 21.1.2). None if OpenMP would ignore the value."""
    try:
        levels = [int(level) for level in value.split(",")]
    except ValueError:
        return None
    return levels[0] if min(levels) > 0 and max(levels) < 1 << 31 else None


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def start_fork_server() -> ForkServerContext | SpawnContext:
    """The context that starts ranks, with its fork server running. Called early, it lets the server import PyTorch while the
    command does; called again, it starts a new server if the last one was killed."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # no temporary folder, or its path is too long for a socket
            forkserver.set_forkserver_preload(["shardwise.train.faults.preload"])
            resource_tracker.ensure_running()  # resets the signal mask, so it comes first
            # Until the server has left the command's process group, signals to that group must not reach it: it
            # inherits this mask.
            masked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            try:
                forkserver.ensure_running()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, masked)
            return multiprocessing.get_context("forkserver")
    return multiprocessing.get_context("spawn")


class Ranks:
    """Running ranks, by their global rank."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.pids: dict[int, int] = {}
        self._processes: dict[int, BaseProcess] = {}
        self._codes: dict[int, int] = {}
        self._lifelines: list[Connection] = []
        self._log_starts: dict[int, int] = {}

    def start(self, arguments: Sequence[str], environments: Mapping[int, Mapping[str, str]]) -> None:
        """Run `shardwise ARGUMENTS` once for each environment."""
        context = start_fork_server()
        self.logs.mkdir(parents=True, exist_ok=True)
        self.pids, self._processes, self._codes, self._lifelines = {}, {}, {}, []
        for rank, environment in environments.items():
            log = Connection(os.open(self._log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), readable=False)
            self._log_starts[rank] = os.fstat(log.fileno()).st_size
            out = Connection(os.dup(1 if rank == 0 else log.fileno()), readable=False)
            lifeline, ours = context.Pipe(duplex=False)
            process = context.Process(target=_run_rank, args=(list(arguments), dict(environment), lifeline, out, log))
            try:
                process.start()
                self.pids[rank], self._processes[rank] = process.pid or 0, process
            except (OSError, EOFError):  # the fork server was killed meanwhile
                self.pids[rank], self._codes[rank] = 0, -signal.SIGKILL
            self._lifelines.append(ours)
            for handed_over in (lifeline, out, log):
                handed_over.close()

    def codes(self) -> dict[int, int]:
        """The exit codes of the ranks that have ended; negative for a signal."""
        for rank, process in self._processes.items():
            if rank not in self._codes and (code := process.exitcode) is not None:
                if code == UNKNOWN:
                    self._kill_orphan(rank)
                    code = -signal.SIGKILL
                # A signal handler that interrupted this line has already read the code, which can be read only once.
                self._codes.setdefault(rank, code)
        return self._codes

    def _kill_orphan(self, rank: int) -> None:
        """Kill a rank whose fork server is gone, and wait until it is dead, since the first rank holds the lock of the run
        folder."""
        deadline = time.monotonic() + GRACE
        while self._state(rank) not in ("", "Z", "X") and time.monotonic() < deadline:
            self._kill(rank)
            time.sleep(0.01)

    def _kill(self, rank: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pids[rank], signal.SIGKILL)  # it may have no process group of its own yet
            os.killpg(self.pids[rank], signal.SIGKILL)

    def failed(self) -> tuple[int, int] | None:
        """A failed rank and its exit code. When a rank fails, the others soon fail too, with errors of their own. So a rank that
        was killed takes precedence, then a user's mistake."""
        failed = {rank: code for rank, code in self.codes().items() if code}
        return min(failed.items(), key=lambda item: (item[1] > 0, item[1] != MISTAKE, item[0]), default=None)

    def failure(self, rank: int, code: int) -> str:
        """The message about a failed rank: its own error lines for a user's mistake, otherwise how it ended."""
        lines = self.log_lines(rank)
        if code == MISTAKE:
            return "\n".join(line for line in lines if line.startswith("error: "))
        last = f": {lines[-1]}" if lines and code > 0 else ""
        return f"rank {rank} {describe_exit(code)}{last}"

    def running(self) -> list[int]:
        """The ranks that have not ended."""
        ended = self.codes()
        return [rank for rank in self.pids if rank not in ended]

    def signal(self, number: signal.Signals, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to the processes of these ranks, by default all that run."""
        for rank in self.running() if ranks is None else ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)

    def stopped(self, rank: int) -> bool:
        """Whether a rank's process is stopped by a signal, as Linux reports it."""
        return self._state(rank) in ("T", "t")

    def _state(self, rank: int) -> str:
        """Linux's letter for the state of a rank's process; empty if there is none."""
        try:
            return Path(f"/proc/{self.pids[rank]}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return ""

    def end(self, grace: float) -> None:
        """Give all ranks `grace` seconds to end by themselves, then kill them with all their children."""
        deadline = time.monotonic() + grace
        while (running := self.running()) and (left := deadline - time.monotonic()) > 0:
            wait([self._processes[rank].sentinel for rank in running], min(left, 1.0))
        while running := self.running():
            for rank in running:
                self._kill(rank)
            wait([self._processes[rank].sentinel for rank in running], 0.1)

    def log_lines(self, rank: int) -> list[str]:
        """The lines that a rank has written since its last start."""
        with contextlib.suppress(OSError):
            text = self._log(rank).read_bytes()[self._log_starts.get(rank, 0) :].decode(errors="replace")
            return [line for line in text.splitlines() if line.strip()]
        return []

    def _log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"


def _run_rank(
    arguments: list[str], environment: dict[str, str], lifeline: Connection, out: Connection, log: Connection
) -> NoReturn:
    """Run a rank, in the new process."""
    code = 1
    try:
        os.setsid()
        _die_with_command(lifeline)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out.fileno(), 1)
        os.dup2(log.fileno(), 2)
        os.environ.clear()
        os.environ.update(environment)
        import torch

        # OpenMP reads the variable when it is loaded, which happened in the fork server, before the variable was set.
        torch.set_num_threads(threads_of(environment[THREADS]) or 1)
        sys.argv = ["shardwise", *arguments]
        runpy.run_module("shardwise", run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # without waiting for threads


def _die_with_command(lifeline: Connection) -> None:
    """Kill this rank and all its children when the other end of a pipe is closed, which only the command holds. On Linux the kernel
    does it, so that even a rank that is stopped, or stuck in native code, does not survive."""
    if sys.platform == "linux":
        file = lifeline.fileno()
        fcntl.fcntl(file, fcntl.F_SETOWN, -os.getpid())
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_ASYNC)
        if lifeline.poll():  # the command had already closed it
            os.killpg(0, signal.SIGKILL)
        return

    def wait_and_die() -> None:
        lifeline.poll(None)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait_and_die, daemon=True).start()
