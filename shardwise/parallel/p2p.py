"""Point-to-point transfers of tensors. Gloo accepts GPU tensors for collectives only: here they pass through host memory."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor


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
