"""Ranks for tests, started once and used by every distributed test: importing torch for each case would cost minutes.

A pool holds processes that wait for work. A case names a function and its arguments; the first `world` processes each fork, and
what they forked form a process group, call it, and send back what it returns. There are as many as the largest case so far has
needed. Where a fork is safe they come from one process that has imported torch, so that this is paid once for all ranks, and a
case leaves nothing behind: gloo's threads, of which each group has several, look a hundred times a second for work, and outlive
their group for as long as anything refers to it.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from patience import HANG_SECONDS

NEEDED = ["torch._dynamo", "torch.distributed.fsdp", "shardwise.train.loop"]
"""What cases need, imported where the ranks are forked from."""


def _serve(rank: int, pipe: Connection, store: str, forks: bool) -> None:
    import torch

    if forks:
        os.setpgid(0, 0)  # so that what it forks ends with it
    torch.set_num_threads(1)
    os.fsync = os.fdatasync = lambda handle: None  # as in the process of the tests (conftest.py)
    gc.freeze()  # what is imported stays, and need not be looked through whenever a case collects what it left
    while True:
        task = pipe.recv()
        if task is None:
            return
        if not forks:
            _execute(rank, pipe, store, *task)
        elif child := os.fork():
            ended = os.pidfd_open(child)
            if pipe in wait([pipe, ended]):  # the pool is gone, or has all answers and goes on
                os.kill(child, signal.SIGKILL)
            os.close(ended)
            _, status = os.waitpid(child, 0)
            if status:
                _send(pipe, task[0], False, f"rank {rank} ended with {os.waitstatus_to_exitcode(status)}")
        else:
            # PyTorch makes the pool of a forked process anew when it is first asked for, and fails where two threads ask at once:
            # autograd's threads in a build for GPUs do. Here there is one thread yet.
            torch.set_num_threads(1)
            _execute(rank, pipe, store, *task)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)


def _execute(
    rank: int, pipe: Connection, store: str, number: int, world: int, function: Callable[..., Any], arguments: Any
) -> None:
    """Call the function of a case as a rank of its process group."""
    import torch.distributed as dist

    try:
        if world > 1:
            dist.init_process_group("gloo", init_method=f"file://{store}{number}", rank=rank, world_size=world)
        _send(pipe, number, True, function(rank, *arguments))
    except BaseException:
        _send(pipe, number, False, traceback.format_exc())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _send(pipe: Connection, *answer: Any) -> None:
    """By value: tensors that were sent as shared memory would end with the process that sent them."""
    pipe.send_bytes(pickle.dumps(answer))


class RankPool:
    """Processes that run distributed cases one after another."""

    def __init__(self, patience: float = HANG_SECONDS) -> None:
        import torch

        # A GPU's driver does not survive a fork once anything has asked for it, nor do the system libraries of a Mac.
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
        self.forks = sys.platform == "linux" and (torch.version.cuda is None or hidden)
        self.context: Any = multiprocessing.get_context("forkserver" if self.forks else "spawn")
        if self.forks:
            self.context.set_forkserver_preload(NEEDED)
        self.folder = tempfile.TemporaryDirectory()
        self.number = 0
        self.patience = patience
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        atexit.register(self.close)

    def grow(self, size: int) -> None:
        """Start ranks until there are so many."""
        environment = dict(os.environ)
        os.environ["OMP_NUM_THREADS"] = "1"
        for rank in range(len(self.processes), size):
            here, there = self.context.Pipe()
            arguments = (rank, there, f"{self.folder.name}/store", self.forks)
            process = self.context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)
        os.environ.clear()
        os.environ.update(environment)

    def run(self, world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call `function(rank, *arguments)` on each rank of a world; gives what each returned."""
        self.grow(world)
        self.number += 1
        for pipe in self.pipes[:world]:
            pipe.send((self.number, world, function, arguments))
        results, failures = [], []
        for rank, pipe in enumerate(self.pipes[:world]):
            # A rank that failed leaves the others waiting; theirs is not the failure to show.
            if not pipe.poll(self.patience if not failures else 1.0):
                failures.append(f"rank {rank} did not answer")
                continue
            number, good, value = pickle.loads(pipe.recv_bytes())
            while number != self.number:  # of a case that was over when its rank ended badly
                number, good, value = pickle.loads(pipe.recv_bytes())
            (results if good else failures).append(value)
        if failures:
            self.close()  # some of them may hang
            raise AssertionError("\n".join(failures))
        return results

    def close(self) -> None:
        """End the processes; the next case finds fresh ones."""
        for process in self.processes:
            if self.forks:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
        self.pipes.clear()
        self.processes.clear()
