"""Point-to-point transfers of tensors. Gloo accepts GPU tensors for collectives only: here they pass through host memory.

NCCL makes a communicator for two ranks of a group at their first message, and blocks the host of whichever rank comes first until
the other makes the same call. In the order of a schedule two ranks may then wait for each other. So all pairs of a pipeline are
opened beforehand, in one order.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.parallel.mesh import Mesh
from shardwise.schedules import Schedule


class _Arriving:
    """A receive into host memory; `wait` copies it to its buffer."""

    def __init__(self, buffer: Tensor, peer: int, group: dist.ProcessGroup | None) -> None:
        self.buffer, self.host = buffer, buffer.new_empty(buffer.shape, device="cpu")
        self.work: Any = dist.irecv(self.host, peer, group=group)

    def wait(self) -> None:
        self.work.wait()
        self.buffer.copy_(self.host)


class _Leaving:
    """A send from host memory, which it keeps until the send is complete."""

    def __init__(self, x: Tensor, peer: int, group: dist.ProcessGroup | None) -> None:
        self.host = x.cpu()
        work: Any = dist.isend(self.host, peer, group=group)
        self.wait, self.is_completed = work.wait, work.is_completed


def _through_the_host(x: Tensor, group: dist.ProcessGroup | None) -> bool:
    return x.is_cuda and dist.get_backend(group) == "gloo"


def isend(x: Tensor, peer: int, group: dist.ProcessGroup | None) -> Any:
    """Start sending a contiguous tensor to a global rank; returns the work to wait for."""
    return (_Leaving if _through_the_host(x, group) else dist.isend)(x, peer, group=group)


def irecv(buffer: Tensor, peer: int, group: dist.ProcessGroup | None) -> Any:
    """Start receiving from a global rank; returns the work to wait for."""
    return (_Arriving if _through_the_host(buffer, group) else dist.irecv)(buffer, peer, group=group)


def exchange(x: Tensor, receiver: int, buffer: Tensor, sender: int, group: dist.ProcessGroup | None) -> list[Any]:
    """Start sending to one rank and receiving from another; two ranks that exchange with each other do not deadlock."""
    if _through_the_host(x, group):
        return [isend(x, receiver, group), irecv(buffer, sender, group)]
    sent = dist.P2POp(dist.isend, x, receiver, group)
    return dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, buffer, sender, group)])


def group_of(mesh: Mesh, sender: int, receiver: int) -> dist.ProcessGroup | None:
    """The group for messages between two ranks of a pipeline. Each direction has a communicator of its own, so that a send never
    queues behind a receive that waits for it."""
    return mesh.group("pipeline_back" if sender > receiver else "pipeline")


def opening_order(schedule: Schedule) -> list[tuple[int, int]]:
    """All pairs (sender, receiver) of a pipeline that any number of microbatches may need, in the order in which they are opened.
    Of the pairs that are not open yet, both ranks of the first one come to it next: so nothing waits for ever. Those of even ranks
    come first, so that half of all neighbours are opened at a time, not one after the other."""
    both = list(pairwise(schedule.placement))
    if schedule.partners:
        ranks = range(len(schedule.ranks))
        both += zip(ranks, reversed(ranks), strict=True)
    pairs = {pair for one, other in both if one != other for pair in ((one, other), (other, one))}
    return sorted(pairs, key=lambda pair: (min(pair) % 2, pair))


def open_pairs(mesh: Mesh, schedule: Schedule, device: torch.device) -> None:
    """Send one element between each two ranks of this pipeline that will exchange messages, so that their communicators exist."""
    ranks, me = mesh.pipeline_ranks(), mesh.index("pipeline")
    for sender, receiver in opening_order(schedule):
        if me in (sender, receiver):
            x, group = torch.zeros(1, device=device), group_of(mesh, sender, receiver)
            (isend(x, ranks[receiver], group) if me == sender else irecv(x, ranks[sender], group)).wait()
