"""Asynchronous tensor parallelism (Wang et al. 2023, "Overlap communication with dependent computation"): the all-gather before a
GEMM, or the reduce-scatter after it, is cut into chunks, and one chunk is multiplied while the next one travels.

Traffic is that of `tensor.py` in more and smaller messages, overlapped with the GEMM; memory is the same plus one chunk. In the
backward pass the reduce-scatter of the input's gradient runs while the weight's gradient is computed. The backend must run its
collectives beside the computation: NCCL does, and gloo, which has its own threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.model.attention import GroupedAttention
from shardwise.model.layers import FeedForward, Linear
from shardwise.parallel.activations.saving import note
from shardwise.parallel.collectives import Group, all_gather, all_gather_single, reduce_scatter_single

CHUNKS = 2


def _arriving(x: Tensor, group: Group) -> Iterator[tuple[int, int, Tensor]]:
    """All-gather a sequence in chunks: yields (number, chunks, [ranks, batch, sequence of a chunk, width]) as each arrives."""
    ranks = dist.get_world_size(group)
    chunks = CHUNKS if x.shape[1] % CHUNKS == 0 else 1
    sent = []
    for chunk in x.chunk(chunks, dim=1):
        out = x.new_empty((ranks, *chunk.shape))
        sent.append((out, all_gather_single(out.flatten(0, 1), chunk.contiguous(), group=group, async_op=True)))
    for number, (out, work) in enumerate(sent):
        work.wait()
        yield number, chunks, out


def _in_chunks(x: Tensor, ranks: int, chunks: int) -> Tensor:
    """A view of a whole sequence [batch, sequence, width] as [batch, rank, chunk, sequence of a chunk, width]."""
    return x.unflatten(1, (ranks, chunks, -1))


def _scatter_async(x: Tensor, group: Group) -> tuple[Tensor, Any]:
    """Start a reduce-scatter of [ranks, batch, sequence, width]; each rank keeps its own shard."""
    out = x.new_empty(x.shape[1:])
    return out, reduce_scatter_single(out, x.flatten(0, 1), group=group, async_op=True)


def _times(x: Tensor, matrix: Tensor) -> Tensor:
    """Rows times a matrix in one GEMM; PyTorch would run many GEMMs of slices where the matrix needs no gradient."""
    return (x.flatten(0, -2) @ matrix).unflatten(0, x.shape[:-1])


class _AllGatherGemm(torch.autograd.Function):
    """All-gathers a sequence, and computes its GEMM with one matrix while it arrives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        ranks = dist.get_world_size(group)
        batch, length, width = x.shape
        whole = x.new_empty(batch, ranks * length, width)
        out = x.new_empty(batch, ranks * length, weight.shape[0])
        for number, chunks, arrived in _arriving(x, group):
            _in_chunks(whole, ranks, chunks)[:, :, number] = arrived.transpose(0, 1)
            _in_chunks(out, ranks, chunks)[:, :, number] = _times(arrived, weight.mT).transpose(0, 1)
        note(whole, (x,), lambda shard: all_gather(shard, group, 1))
        learns = ctx.needs_input_grad[1]  # a frozen matrix does not need its input again
        ctx.save_for_backward(whole if learns else None, weight)
        ctx.group = group
        return whole, out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        whole, weight = ctx.saved_tensors
        ranks = dist.get_world_size(ctx.group)
        total = grads[0] + _times(grads[1], weight)
        scattered, work = _scatter_async(total.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous(), ctx.group)
        weight_grad = None if whole is None else grads[1].flatten(0, 1).mT @ whole.flatten(0, 1)
        work.wait()
        return scattered, weight_grad, None


class GemmReduceScatter(torch.autograd.Function):
    """A GEMM whose partial sums are reduce-scattered chunk by chunk, while the next chunk is computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Group, more: Tensor | None) -> Tensor:
        ranks = dist.get_world_size(group)
        length = x.shape[1] // ranks
        chunks = CHUNKS if length % CHUNKS == 0 else 1
        sent = []
        for number in range(chunks):
            chunk = _times(_in_chunks(x, ranks, chunks)[:, :, number].transpose(0, 1), weight.mT)
            if more is not None:
                chunk += _in_chunks(more, ranks, chunks)[:, :, number].transpose(0, 1)
            sent.append(_scatter_async(chunk, group))
        for _, work in sent:
            work.wait()
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.group, ctx.adds = group, more is not None
        return torch.cat([out for out, _ in sent], dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, Tensor | None]:
        x, weight = ctx.saved_tensors
        ranks = dist.get_world_size(ctx.group)
        batch, length = grads[0].shape[0], grads[0].shape[1] * ranks
        whole = grads[0].new_empty(batch, length, weight.shape[0])
        x_grad = grads[0].new_empty(batch, length, weight.shape[1])
        for number, chunks, arrived in _arriving(grads[0], ctx.group):
            _in_chunks(whole, ranks, chunks)[:, :, number] = arrived.transpose(0, 1)
            _in_chunks(x_grad, ranks, chunks)[:, :, number] = _times(arrived, weight).transpose(0, 1)
        weight_grad = None if x is None else whole.flatten(0, 1).mT @ x.flatten(0, 1)
        return x_grad, weight_grad, None, whole if ctx.adds else None


@torch.compiler.disable
def gemm_reduce_scatter(x: Tensor, weight: Tensor, group: Group, more: Tensor | None = None) -> Tensor:
    """The same as a function, which the compiler does not trace; `more` partial sums are added to those of the GEMM."""
    return GemmReduceScatter.apply(x, weight, group, more)


class GatheredLinear(Linear):
    """The first matrix after an all-gather: its GEMM was computed while the sequence arrived."""

    ready: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out, self.ready = self.ready, None
        assert out is not None, "the GEMM is computed by the hook that gathers the input"
        low_rank = self.low_rank(x)
        out = out if low_rank is None else out + low_rank
        return out if self.bias is None else out + self.bias.to(x.dtype)


def all_gather_into_gemm(first: GatheredLinear, group: Group) -> Any:
    """A hook that gathers a module's input and multiplies it by the module's first matrix as it arrives."""

    @torch.compiler.disable  # the compiler does not know asynchronous collectives
    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        whole, first.ready = _AllGatherGemm.apply(args[0], first.weight.to(args[0].dtype), group)
        return (whole, *args[1:])

    return hook


def first_matrix(module: nn.Module) -> str | None:
    """The name of the column-parallel matrix that a module first multiplies its input by, if it has one."""
    if isinstance(module, GroupedAttention):
        return "q"
    if isinstance(module, FeedForward):
        return "gate" if module.gate is not None else "up"
    return None
