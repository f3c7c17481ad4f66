"""Where ranks are born: a process forked from the command before anything has started a thread or touched a GPU, with everything
imported that a rank needs. Each rank is forked from it in turn, so that importing PyTorch is paid once and not at every start of
every rank: a restart takes a second and not many.

The command writes what to start, a line of JSON, to one pipe; the nursery answers on another with process ids and, when ranks end,
their exit codes. When the command dies, however it dies, its pipe closes, and the nursery ends all ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import traceback
from typing import Any, NoReturn

LOOK = 0.05
"""Seconds between two looks at who has ended."""
FORK_IS_ENOUGH = sys.platform == "linux"
"""Elsewhere system libraries do not survive a fork, so a rank begins with a fresh interpreter."""


def can_fork() -> bool:
    """Whether what this process has become by now would survive a fork: a GPU that is in use would not, nor would threads."""
    torch = sys.modules.get("torch")
    return (torch is None or not torch.cuda.is_initialized()) and threading.active_count() == 1


class Nursery:
    """The command's end of it."""

    def __init__(self, fork: bool = True) -> None:
        """`fork` it from this process, which must not have any threads yet; or else start it anew."""
        sys.stdout.flush()
        sys.stderr.flush()
        reads, self._requests = os.pipe()
        self._reports, writes = os.pipe()
        self._rest = b""
        self.alive = True
        if fork:
            self.pid = os.fork()
            if self.pid == 0:
                os.close(self._requests)
                os.close(self._reports)
                try:
                    _serve(reads, writes)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(0)
        else:
            command = [sys.executable, "-m", "shardwise.train.faults.nursery", str(reads), str(writes)]
            self.pid = subprocess.Popen(command, pass_fds=(reads, writes)).pid
        os.close(reads)
        os.close(writes)

    def ask(self, **request: Any) -> None:
        """Have ranks started."""
        with contextlib.suppress(BrokenPipeError):  # whether it is still there, the answers tell
            os.write(self._requests, json.dumps(request).encode() + b"\n")

    def answers(self, wait: float = 0.0) -> list[dict[str, Any]]:
        """What the nursery has told since the last call, after waiting at most `wait` seconds for it to say something."""
        while self.alive and select.select([self._reports], [], [], wait)[0]:
            told = os.read(self._reports, 65536)
            self.alive = bool(told)
            self._rest += told
            wait = 0.0
        *lines, self._rest = self._rest.split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """End it, and what it has started."""
        with contextlib.suppress(OSError):
            os.close(self._requests)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        os.close(self._reports)


def _serve(requests: int, reports: int) -> None:
    """The nursery's own life."""
    os.setsid()  # a terminal's Ctrl-C is not for it
    if FORK_IS_ENOUGH:
        import torch._dynamo  # what building a model imports late
        import torch.distributed.fsdp  # noqa: F401

        import shardwise.train.loop  # noqa: F401
    running: dict[int, tuple[int, int]] = {}  # process to (start, rank)
    rest = b""
    while True:
        if select.select([requests], [], [], LOOK)[0]:
            told = os.read(requests, 65536)
            if not told:
                break
            *lines, rest = (rest + told).split(b"\n")
            for line in lines:
                request = json.loads(line)
                for rank, birth in request["births"].items():
                    pid = _bear(request["arguments"], birth, (requests, reports))
                    running[pid] = (request["start"], int(rank))
                    _tell(reports, start=request["start"], rank=int(rank), pid=pid)
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                start, rank = running.pop(pid)
                _tell(reports, start=start, rank=rank, code=os.waitstatus_to_exitcode(status))
    for pid in running:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def _tell(reports: int, **what: Any) -> None:
    os.write(reports, json.dumps(what).encode() + b"\n")


def _bear(arguments: list[str], birth: dict[str, Any], pipes: tuple[int, ...]) -> int:
    """Fork a rank. Its environment is set before the fork, so that whatever runs at a fork sees it."""
    os.environ.clear()
    os.environ.update(birth["environment"])
    pid = os.fork()
    if pid == 0:
        _live(arguments, birth, pipes)
    return pid


def _live(arguments: list[str], birth: dict[str, Any], pipes: tuple[int, ...]) -> NoReturn:
    """Be a rank."""
    code = 1
    try:
        _settle(birth, pipes)
        if not FORK_IS_ENOUGH:
            os.execv(sys.executable, [sys.executable, "-m", "shardwise", *arguments])
        import torch

        # The variable is read when the library is loaded, which was before it was set.
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        sys.argv[1:] = arguments
        runpy.run_module("shardwise", run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _settle(birth: dict[str, Any], pipes: tuple[int, ...]) -> None:
    """A session and files of its own."""
    os.setsid()
    for pipe in pipes:
        os.close(pipe)
    log = os.open(birth["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 2)
    if not birth["speaks"]:
        os.dup2(log, 1)
    os.close(log)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]))
