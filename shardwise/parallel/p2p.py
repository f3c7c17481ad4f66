"""Tensors from one rank to another. Gloo takes those of a GPU for collectives only: here they pass through the host's memory."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor


class _Arriving:
    """A receive into the host's memory, which is copied to where it belongs by whoever waits for it."""

    def __init__(self, buffer: Tensor, peer: int, group: dist.ProcessGroup | None) -> None:
        self.buffer, self.host = buffer, buffer.new_empty(buffer.shape, device="cpu")
        self.work: Any = dist.irecv(self.host, peer, group=group)

    def wait(self) -> None:
        self.work.wait()
        self.buffer.copy_(self.host)


class _Leaving:
    """A send from the host's memory, which it holds until it is gone."""

    def __init__(self, x: Tensor, peer: int, group: dist.ProcessGroup | None) -> None:
        self.host = x.cpu()
        work: Any = dist.isend(self.host, peer, group=group)
        self.wait, self.is_completed = work.wait, work.is_completed


def _through_the_host(x: Tensor, group: dist.ProcessGroup | None) -> bool:
    return x.is_cuda and dist.get_backend(group) == "gloo"


def isend(x: Tensor, peer: int, group: dist.ProcessGroup | None) -> Any:
    """Start sending a contiguous tensor to a global rank; gives what to wait for."""
    return (_Leaving if _through_the_host(x, group) else dist.isend)(x, peer, group=group)


def irecv(buffer: Tensor, peer: int, group: dist.ProcessGroup | None) -> Any:
    """Start receiving from a global rank; gives what to wait for."""
    return (_Arriving if _through_the_host(buffer, group) else dist.irecv)(buffer, peer, group=group)


def exchange(x: Tensor, receiver: int, buffer: Tensor, sender: int, group: dist.ProcessGroup | None) -> list[Any]:
    """Start sending to one rank and receiving from another, in both directions of a pair without deadlock."""
    if _through_the_host(x, group):
        return [isend(x, receiver, group), irecv(buffer, sender, group)]
    sent = dist.P2POp(dist.isend, x, receiver, group)
    return dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, buffer, sender, group)])
