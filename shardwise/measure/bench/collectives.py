"""Benchmarks every collective over message sizes, in the columns and conventions of nccl-tests.

Bytes are those of the full buffer (the gathered output of an all-gather, the full input of a reduce-scatter); `count` is the
number of elements of one rank's share if the buffer is divided. `algbw` is bytes over time; `busbw` is what the busiest link
carried (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md), which is comparable between group sizes. In `send`
every rank sends to the next one and receives from the previous one, as a pipeline does.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.hardware import COLLECTIVES
from shardwise.parallel.collectives import all_gather_single, reduce_scatter_single

Point = dict[str, Any]

SMALLEST, LARGEST = 2**10, 2**26
DIVIDED = ("all_gather", "reduce_scatter", "all_to_all")
SUMS = ("all_reduce", "reduce_scatter")
SAMPLES = 3


def bus_factor(operation: str, size: int) -> float:
    """The ratio of `busbw` to `algbw` for a group of `size` ranks."""
    if operation == "all_reduce":
        return 2 * (size - 1) / size
    return (size - 1) / size if operation in DIVIDED else 1.0


def collective(
    operation: str, size: int, bytes: int, device: torch.device, group: Any
) -> tuple[Callable[[], object], int]:
    """Returns one call of a collective over about `bytes`, and its exact bytes: every rank's share has the same number of
    elements."""
    shard_numel = max(1, bytes // 4 // size)
    numel = shard_numel * size if operation in DIVIDED else max(1, bytes // 4)
    whole, shard = torch.ones(numel, device=device), torch.ones(shard_numel, device=device)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: all_gather_single(whole, shard, group=group),
        "reduce_scatter": lambda: reduce_scatter_single(shard, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, src=0, group=group),
        "send": lambda: _send_to_next(whole, size, group),
    }
    return calls[operation], numel * 4


def _send_to_next(message: Tensor, size: int, group: Any) -> None:
    rank, received = dist.get_rank(group), torch.empty_like(message)
    send = dist.P2POp(dist.isend, message, group=group, group_peer=(rank + 1) % size)
    receive = dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()


def collective_points(
    device: torch.device, seconds: float, quick: bool, progress: Callable[[float], None] = lambda share: None
) -> list[Point]:
    """Benchmark every collective over all ranks, then over half of them, and so on down to two. Every rank calls this; the ranks of
    a group get its points."""
    world = dist.get_world_size()
    groups = [world >> halving for halving in range(world.bit_length()) if world >> halving > 1]
    step = 4 if quick else 2
    sizes = [2**power for power in range(SMALLEST.bit_length() - 1, LARGEST.bit_length(), step)]
    operations = [name for name in COLLECTIVES if name != "send" or not _shares_gpu(device)]
    cases = [(size, name, bytes) for size in groups for bytes in sizes for name in operations]
    process_groups = {size: dist.new_group(list(range(size))) for size in groups}  # every rank must create every group
    # PyTorch 2.13 renames two collectives; the old names work in every version.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    points: list[Point] = []
    ends = time.perf_counter() + seconds
    for done, (size, operation, bytes) in enumerate(cases):
        progress(done / len(cases))
        left = _max_over_ranks(ends - time.perf_counter(), device)
        if left <= 0:
            break
        if dist.get_rank() < size:
            points.append(_point(operation, size, bytes, device, process_groups[size], left / (len(cases) - done)))
    progress(1.0)
    return points


def _shares_gpu(device: torch.device) -> bool:
    """Whether ranks share a GPU and so use gloo, which has no point-to-point operations on CUDA tensors."""
    return device.type == "cuda" and "nccl" not in dist.get_backend_config()


def _max_over_ranks(value: float, device: torch.device, group: Any = None) -> float:
    """The maximum over ranks, so that all make the same decision."""
    shared = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
    return shared.item()


def _point(operation: str, size: int, bytes: int, device: torch.device, group: Any, budget: float) -> Point:
    call, moved = collective(operation, size, bytes, device, group)
    _timed(call, 1, device, group)
    once = _timed(call, 1, device, group)
    repeats = max(1, min(100, int(budget / SAMPLES / once)))
    seconds = statistics.median(_timed(call, repeats, device, group) for _ in range(SAMPLES))
    algbw = moved / seconds / 1e9
    return dict(
        operation=operation,
        bytes=moved,
        size=size,
        count=moved // 4 // (size if operation in DIVIDED else 1),
        type="float",
        redop="sum" if operation in SUMS else "none",
        seconds=seconds,
        algbw=algbw,
        busbw=algbw * bus_factor(operation, size),
    )


def _timed(call: Callable[[], object], repeats: int, device: torch.device, group: Any) -> float:
    """Seconds of one call on the slowest rank, averaged over `repeats` calls back to back."""
    dist.barrier(group)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return _max_over_ranks((time.perf_counter() - start) / repeats, device, group)
