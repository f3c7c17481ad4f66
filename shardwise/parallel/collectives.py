"""Collectives inside the forward pass, each with its gradient. A group of None is one rank: nothing is sent.

If all ranks of a group hold the same result and continue identically, each rank's gradient is already complete
(`all_reduce_replicated`). If they do different work on a common input, their gradients are partial and are summed
(`all_gather_sequence`).

Inside compiled layers they are custom operators, which the compiler does not break up; elsewhere they are autograd functions, so
that message counters see PyTorch's own collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.model.operator import differentiate, operator, shape_of
from shardwise.parallel.activations.saving import note
from shardwise.torch_private import group_named

Group = dist.ProcessGroup | None
# PyTorch 2.13 has new names for these two, and warns of the old ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
AT_ONCE = 64
"""So many rows of a microbatch have their shards sent from their places, and to them, in one call. Of more rows the shards are
joined: the copies of two rows took a tenth of a step of Llama 1 33B on 4 tensor ranks."""


def at_once(x: Tensor, group: dist.ProcessGroup, rows: int) -> bool:
    """Whether one call sends these rows. gloo reads several tensors as if they were the host's, and dies of a GPU's."""
    return rows == 1 or (1 < rows <= AT_ONCE and not (x.is_cuda and dist.get_backend(group) == "gloo"))


def all_gather(x: Tensor, group: Group, dim: int) -> Tensor:
    """The shards of all ranks, concatenated along `dim`."""
    if group is None:
        return x
    if torch.compiler.is_compiling():
        return _all_gather_op(x, group.group_name, dim, False)
    size = dist.get_world_size(group)
    rows = x.shape[:dim].numel()
    if at_once(x, group, rows):
        out = x.new_empty((*x.shape[:dim], size * x.shape[dim], *x.shape[dim + 1 :]))
        if rows == 1:
            all_gather_single(out.view(-1), x.contiguous().view(-1), group=group)
        else:
            group.allgather_into_tensor_coalesced([*out.view(rows, -1)], [*x.contiguous().view(rows, -1)]).wait()
        return out
    out = x.new_empty((size * x.shape[0], *x.shape[1:]))
    all_gather_single(out, x.contiguous(), group=group)
    return torch.cat(out.chunk(size), dim=dim)


def reduce_scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    """The sum over ranks; each rank gets its shard along `dim`."""
    if group is None:
        return x
    size, rows = dist.get_world_size(group), x.shape[:dim].numel()
    out = x.new_empty((*x.shape[:dim], x.shape[dim] // size, *x.shape[dim + 1 :]))
    if rows > 1 and at_once(x, group, rows):
        group.reduce_scatter_tensor_coalesced([*out.view(rows, -1)], [*x.contiguous().view(rows, -1)]).wait()
        return out
    stacked = x.contiguous() if rows == 1 else torch.cat(x.chunk(size, dim=dim))
    reduce_scatter_single(out.view(-1), stacked.view(-1), group=group)
    return out


def _gathered(x: Tensor, group: Group, dim: int, again: bool) -> Tensor:
    """The same; with `again`, a backward pass may save only the shard and gather it again."""
    whole = all_gather(x, group, dim)
    if again:
        note(whole, (x,), lambda shard: all_gather(shard, group, dim))
    return whole


class Collective(torch.autograd.Function):
    """A collective whose backward pass is another function of the gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.backward_of = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.backward_of(grads[0]), None, None


def _all_to_all(x: Tensor, group: Group, received: list[int], sent: list[int]) -> Tensor:
    out = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


@operator("all_gather(Tensor x, str group, int dim, bool again) -> Tensor", differentiable=True)
def _all_gather_op(x: Tensor, group: str, dim: int, again: bool) -> Tensor:
    # Compiled code reuses the memory of dead tensors, so a shard to gather again must have its own.
    return _gathered(x.clone() if again else x, group_named(group), dim, again)


@shape_of(_all_gather_op)
def _(x: Tensor, group: str, dim: int, again: bool) -> Tensor:
    return x.new_empty(
        [n * (dist.get_world_size(group_named(group)) if d == dim else 1) for d, n in enumerate(x.shape)]
    )


@operator("reduce_scatter(Tensor x, str group, int dim) -> Tensor", differentiable=True)
def _reduce_scatter_op(x: Tensor, group: str, dim: int) -> Tensor:
    return reduce_scatter(x, group_named(group), dim)


@shape_of(_reduce_scatter_op)
def _(x: Tensor, group: str, dim: int) -> Tensor:
    return x.new_empty(
        [n // (dist.get_world_size(group_named(group)) if d == dim else 1) for d, n in enumerate(x.shape)]
    )


@operator("all_reduce(Tensor x, str group) -> Tensor", differentiable=True)
def _all_reduce_op(x: Tensor, group: str) -> Tensor:
    return all_reduced(x.clone(), group_named(group))


@shape_of(_all_reduce_op)
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x)


@operator("all_to_all(Tensor x, str group, int[] received, int[] sent) -> Tensor", differentiable=True)
def _all_to_all_op(x: Tensor, group: str, received: list[int], sent: list[int]) -> Tensor:
    return _all_to_all(x, group_named(group), received, sent)


@shape_of(_all_to_all_op)
def _(x: Tensor, group: str, received: list[int], sent: list[int]) -> Tensor:
    return x.new_empty((sum(received), *x.shape[1:]))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.rest = inputs[1:]


differentiate(
    _all_gather_op, lambda ctx, grad: (_reduce_scatter_op(grad, *ctx.rest[:2]), None, None, None), keep=_remember
)
differentiate(
    _reduce_scatter_op, lambda ctx, grad: (_all_gather_op(grad, *ctx.rest, False), None, None), keep=_remember
)
differentiate(_all_reduce_op, lambda ctx, grad: (grad, None), keep=_remember)
differentiate(
    _all_to_all_op,
    lambda ctx, grad: (_all_to_all_op(grad, ctx.rest[0], ctx.rest[2], ctx.rest[1]), None, None, None),
    keep=_remember,
)


def all_gather_sequence(x: Tensor, group: Group, *, again: bool = True) -> Tensor:
    """All shards of a sequence; the ranks continue with different work, so their gradients are reduce-scattered. With `again`, a
    backward pass saves only the shard, and gathers it again (`activations/saving.py`)."""
    if group is None:
        return x
    if torch.compiler.is_compiling():
        return _all_gather_op(x, group.group_name, 1, again)
    back = partial(reduce_scatter, group=group, dim=1)
    return Collective.apply(x, partial(_gathered, group=group, dim=1, again=again), back)


def reduce_scatter_sequence(x: Tensor, group: Group) -> Tensor:
    """Sum of partial results; each rank keeps its shard of the sequence."""
    if group is None:
        return x
    if torch.compiler.is_compiling():
        return _reduce_scatter_op(x, group.group_name, 1)
    return Collective.apply(x, partial(reduce_scatter, group=group, dim=1), partial(all_gather, group=group, dim=1))


def all_reduce_replicated(x: Tensor, group: Group) -> Tensor:
    """Sum of partial results; every rank holds the full sum, and takes its gradient."""
    if group is None:
        return x
    if torch.compiler.is_compiling():
        return _all_reduce_op(x, group.group_name)
    return Collective.apply(x, lambda x: all_reduced(x.clone(), group), lambda grad: grad)


def all_to_all(x: Tensor, group: Group, received: list[int], sent: list[int]) -> Tensor:
    """All-to-all of rows: `sent[r]` rows go to rank r, `received[r]` rows come from rank r, in rank order."""
    if group is None:
        return x
    if torch.compiler.is_compiling():
        return _all_to_all_op(x, group.group_name, received, sent)
    to, back = (partial(_all_to_all, group=group, received=a, sent=b) for a, b in ((received, sent), (sent, received)))
    return Collective.apply(x, to, back)


def all_reduced(x: Tensor, group: Group) -> Tensor:
    """A sum over the ranks of a group, without a gradient; written in place."""
    dist.all_reduce(x, group=group)
    return x
