"""Communication inside the forward pass, each with its gradient. A group of None is one rank: nothing is sent.

If all ranks of a group hold the same result and continue alike, each rank's gradient is already complete
(`all_reduce_replicated`). If they continue with different work on a common input, their gradients are partial and are added
(`all_gather_sequence`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None


def all_gather(x: Tensor, group: Group, dim: int) -> Tensor:
    """The shards of all ranks, one after another along `dim`."""
    if group is None:
        return x
    size = dist.get_world_size(group)
    out = x.new_empty((size * x.shape[0], *x.shape[1:]))
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out if dim == 0 else torch.cat(out.chunk(size), dim=dim)


def reduce_scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    """The sum over ranks, of which each rank gets its shard along `dim`."""
    if group is None:
        return x
    size = dist.get_world_size(group)
    stacked = x.contiguous() if dim == 0 else torch.cat(x.chunk(size, dim=dim))
    out = stacked.new_empty((stacked.shape[0] // size, *stacked.shape[1:]))
    dist.reduce_scatter_tensor(out, stacked, group=group)
    return out


class _AllGatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return all_gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(grads[0], ctx.group, ctx.dim), None, None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return reduce_scatter(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grads[0], ctx.group, ctx.dim), None, None


class _AllReduceReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        out = x.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, received: list[int], sent: list[int]) -> Tensor:
        ctx.group, ctx.received, ctx.sent = group, received, sent
        return _all_to_all(x, group, received, sent)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grads[0], ctx.group, ctx.sent, ctx.received), None, None, None


def _all_to_all(x: Tensor, group: Group, received: list[int], sent: list[int]) -> Tensor:
    out = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


def all_gather_sequence(x: Tensor, group: Group, dim: int = 1) -> Tensor:
    """All shards of a sequence; the ranks go on with different work, so their gradients are added and scattered."""
    return x if group is None else _AllGatherSequence.apply(x, group, dim)


def reduce_scatter_sequence(x: Tensor, group: Group, dim: int = 1) -> Tensor:
    """Partial results added, each rank keeping its shard of the sequence."""
    return x if group is None else _ReduceScatterSequence.apply(x, group, dim)


def all_reduce_replicated(x: Tensor, group: Group) -> Tensor:
    """Partial results added, the whole on each rank, which each takes the gradient of."""
    return x if group is None else _AllReduceReplicated.apply(x, group)


def all_to_all(x: Tensor, group: Group, received: list[int], sent: list[int]) -> Tensor:
    """All-to-all of rows: `sent[r]` of mine go to rank r, `received[r]` of rank r's come here, in the order of ranks."""
    return x if group is None else _AllToAll.apply(x, group, received, sent)
