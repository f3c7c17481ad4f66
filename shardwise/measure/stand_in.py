"""Stand-ins for the collectives of one rank of a job whose other ranks do not exist.

A collective returns tensors of the right shape with plausible values: an all-gather repeats this rank's own shard, a reduce-scatter
returns its own slice, a receive returns normally distributed values. So kernels see data like that of training, which matters for
their speed: a GPU that multiplies zeros draws less power. As with NCCL, every group has its own stream, and waiting means a stream
waits for an event. A collective may also hold its stream for its planned time.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.measure.bench.kernels import event_seconds
from shardwise.torch_private import close_library, cuda_sleep, fake_process_group

Hold = Callable[[str, str, int, int], float]
"""Seconds of a collective, from the group's purpose, the operation, the group size and a rank's input bytes."""


class StandInWork(dist.Work):
    """The handle of a collective, complete once its stream has reached the end of it."""

    def __init__(self, done: torch.cuda.Event | None, tensors: list[Tensor]) -> None:
        super().__init__()
        self.done, self.tensors = done, tensors

    def wait(self, timeout: Any = None) -> bool:
        if self.done is not None:
            torch.cuda.current_stream().wait_event(self.done)
        self.tensors = []
        return True

    def is_completed(self) -> bool:
        completed = self.done is None or self.done.query()
        if completed:
            self.tensors = []
        return completed

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future(
            devices=None if self.done is None else [self.tensors[0].device]
        )
        tensors = self.tensors
        self.wait()
        future.set_result(tensors)
        return future


class StandIns:
    """The kernels that replace the backends' collectives, on CPUs and GPUs."""

    def __init__(self, hold: Hold | None) -> None:
        self.hold = hold
        self.streams: dict[str, torch.cuda.Stream] = {}
        self.works: deque[dist.Work] = deque(maxlen=4096)  # C++ does not keep the Python objects alive

    def _do(self, group: Any, operation: str, given: list[Tensor], out: list[Tensor], act: Callable[[], object]) -> Any:
        """Run `act` on the group's stream, after the work already launched on the current stream."""
        group = dist.ProcessGroup.unbox(group)
        done = None
        if out[0].is_cuda:
            if group.group_name not in self.streams:
                self.streams[group.group_name] = torch.cuda.Stream(out[0].device)
            stream = self.streams[group.group_name]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                act()
                if self.hold is not None and group.size() > 1:
                    size = sum(x.numel() * x.element_size() for x in given)
                    spin(self.hold(group.group_desc, operation, group.size(), size))
                done = torch.cuda.Event()
                done.record()
            for x in (*given, *out):
                x.record_stream(stream)
        else:
            act()
        self.works.append(StandInWork(done, out))
        return self.works[-1].boxed()

    def all_gather(self, out: Tensor, mine: Tensor, group: Any, *rest: Any) -> Any:
        return out, self._do(group, "all_gather", [mine], [out], lambda: repeat(mine, out))

    def all_gather_list(self, outs: list[list[Tensor]], mine: list[Tensor], group: Any, *rest: Any) -> Any:
        def act() -> None:
            for many, one in zip(outs, mine, strict=True):
                for out in many:
                    out.copy_(one)

        return outs, self._do(group, "all_gather", mine, [x for many in outs for x in many], act)

    def all_gather_coalesced(self, outs: list[Tensor], mine: list[Tensor], group: Any, *rest: Any) -> Any:
        ranks = dist.ProcessGroup.unbox(group).size()
        return self._do(group, "all_gather", mine, outs, lambda: repeat_all(mine, outs, ranks))

    def reduce_scatter(self, out: Tensor, whole: Tensor, group: Any, *rest: Any) -> Any:
        pg = dist.ProcessGroup.unbox(group)
        own = whole.view(pg.size(), -1)[pg.rank()]
        return out, self._do(group, "reduce_scatter", [whole], [out], lambda: out.view(-1).copy_(own))

    def reduce_scatter_coalesced(self, outs: list[Tensor], wholes: list[Tensor], group: Any, *rest: Any) -> Any:
        pg = dist.ProcessGroup.unbox(group)

        def act() -> None:
            for out, whole in zip(outs, wholes, strict=True):
                out.view(-1).copy_(whole.view(pg.size(), whole.numel() // pg.size())[pg.rank()])

        return self._do(group, "reduce_scatter", wholes, outs, act)

    def all_reduce(self, tensors: list[Tensor], group: Any, *rest: Any) -> Any:
        return tensors, self._do(group, "all_reduce", tensors, tensors, lambda: None)

    def broadcast(self, tensors: list[Tensor], group: Any, *rest: Any) -> Any:
        return tensors, self._do(group, "broadcast", tensors, tensors, lambda: None)

    def all_to_all(self, out: Tensor, rows: Tensor, group: Any, *rest: Any) -> Any:
        return self._do(group, "all_to_all", [rows], [out], lambda: repeat(rows, out))

    def send(self, tensors: list[Tensor], group: Any, *rest: Any) -> Any:
        return self._do(group, "send", tensors, tensors, lambda: None)

    def receive(self, tensors: list[Tensor], group: Any, *rest: Any) -> Any:
        def act() -> None:
            for x in tensors:
                x.copy_(noise(x.shape, x.dtype, x.device))

        return self._do(group, "recv", [], tensors, act)


KERNELS = ("_repeat",)
"""Kernels that only stand-ins launch, besides copies (`kernels/many.py`)."""

OPERATORS: dict[str, Callable[..., Any]] = {
    "_allgather_base_": StandIns.all_gather,
    "allgather_": StandIns.all_gather_list,
    "allgather_into_tensor_coalesced_": StandIns.all_gather_coalesced,
    "_reduce_scatter_base_": StandIns.reduce_scatter,
    "reduce_scatter_tensor_coalesced_": StandIns.reduce_scatter_coalesced,
    "allreduce_": StandIns.all_reduce,
    "broadcast_": StandIns.broadcast,
    "alltoall_base_": StandIns.all_to_all,
    "send": StandIns.send,
    "recv_": StandIns.receive,
}
"""The operators of `c10d` that the trainer uses."""


def repeat(mine: Tensor, out: Tensor) -> None:
    """Fill a tensor by repeating another one, with copies that double; an input that is too large is cut."""
    source, target = mine.reshape(-1), out.view(-1)
    done = min(source.numel(), target.numel())
    target[:done].copy_(source[:done])
    while 0 < done < target.numel():
        more = min(done, target.numel() - done)
        target[done : done + more].copy_(target[:more])
        done += more


def repeat_all(mine: list[Tensor], outs: list[Tensor], ranks: int) -> None:
    """The same for each pair; one launch on a GPU, where a copy for each doubling of nine parameters costs the host 0.2 ms."""
    if all(x.is_cuda and x.is_contiguous() for x in (*mine, *outs)):
        from shardwise.model.kernels import many

        many.repeat(mine, outs, ranks)
        return
    for one, out in zip(mine, outs, strict=True):
        repeat(one, out)


@cache
def noise(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normally distributed values, the same for every call."""
    return torch.randn(shape, device=device).to(dtype)


@cache
def cycles_a_second() -> float:
    """The frequency of the clock that `cuda_sleep` counts in."""
    cycles = 20_000_000
    _, seconds = (event_seconds(lambda: cuda_sleep(cycles)) for _ in range(2))
    return cycles / seconds


def spin(seconds: float) -> None:
    """Hold the current stream for this many seconds."""
    if seconds > 0 and math.isfinite(seconds):
        cuda_sleep(int(seconds * cycles_a_second()))


@contextlib.contextmanager
def stand_in_collectives(rank: int, world: int, hold: Hold | None = None) -> Iterator[None]:
    """While it is open, this process is one rank of a world whose other ranks do not exist."""
    fake_process_group(rank, world)
    library = torch.library.Library("c10d", "IMPL")
    kernels = StandIns(hold)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # replacing the backends' kernels warns, but is intended
        for name, kernel in OPERATORS.items():
            for device in ("CPU", "CUDA"):
                library.impl(name, kernel.__get__(kernels), device)
    try:
        yield
    finally:
        close_library(library)
        dist.destroy_process_group()
