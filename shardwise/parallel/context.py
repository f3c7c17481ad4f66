"""Context parallelism: each rank holds a shard of every sequence, and only attention communicates.

A sequence is cut into 2c chunks; rank r takes chunk r and chunk 2c-1-r (zig-zag), so that causal work is the same on every rank.
Activations shrink by c. There are three ways to attend to the other ranks' keys and values, with n = batch x sequence/c x heads x
width:
- ring (Liu et al. 2023): keys and values travel round the ring, 2(c-1) n_kv forward; backward 2(c-1) n_kv, and 2c n_kv of their
  gradients, which travel the full round home. Blocks are merged by their log-sum-exp, and chunks in the future are never computed.
- ulysses (Jacobs et al. 2023): all-to-alls turn a shard of the sequence with all heads into the whole sequence with a shard of the
  heads, and back; (c-1)/c of 2 n_q + 2 n_kv forward, the same backward. When c does not divide the key/value heads, they are
  repeated for each query head: n_kv is then n_q.
- gather (Llama 3, Grattafiori et al. 2024): keys and values of all ranks are all-gathered, 2(c-1) n_kv forward, the same backward.
All numbers are per layer and microbatch. For parameters a context rank is one more data rank (`shard.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.model.attention import DotProductAttention, GroupedAttention, LatentAttention
from shardwise.model.layers import at_least_float32
from shardwise.model.transformer import Block, Transformer
from shardwise.parallel.blockwise import (
    KERNELS,
    Blockwise,
    Kernels,
    Part,
    block_mask,
    merge,
    row_bounds,
    row_sums,
    zeros_for_sums,
)
from shardwise.parallel.collectives import Group, all_gather_sequence, all_to_all
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.p2p import exchange


def zigzag_positions(length: int, ranks: int, rank: int) -> np.ndarray:
    """The positions of a sequence that a rank holds: one chunk from the front and its mirror image from the back."""
    if ranks == 1:
        return np.arange(length)
    chunk = length // (2 * ranks)
    front, back = rank * chunk, (2 * ranks - 1 - rank) * chunk
    return np.concatenate((np.arange(front, front + chunk), np.arange(back, back + chunk)))


def zigzag_order(length: int, ranks: int) -> Tensor:
    """The positions of all ranks, one after the other."""
    return torch.from_numpy(np.concatenate([zigzag_positions(length, ranks, rank) for rank in range(ranks)]))


def by_position(x: Tensor, ranks: int) -> Tensor:
    """A sequence whose shards lie one rank after the other, in order. Chunks are moved as they are, and so are their gradients; an
    index would add these up row by row."""
    front, back = x.unflatten(1, (ranks, 2, -1)).unbind(2)
    return torch.cat((front, back.flip(1)), dim=1).flatten(1, 2)


def by_rank(x: Tensor, ranks: int) -> Tensor:
    """The inverse of `by_position`."""
    front, back = x.unflatten(1, (2 * ranks, -1)).chunk(2, dim=1)
    return torch.stack((front, back.flip(1)), dim=2).flatten(1, 3)


@dataclass(frozen=True)
class ContextMask:
    """What the attention of a split sequence needs: the documents of whole rows as given (or None), the sliding window, and,
    computed from both, the first position that each position of a row sees (None: the row's first)."""

    documents: Tensor | None
    window: int
    low: Tensor | None = None


class ContextMaskBuilder(nn.Module):
    """Replaces the one-device mask builder: passes on the inputs of the blocks' masks."""

    def __init__(self, window: int, ranks: int, whole_rows: bool) -> None:
        super().__init__()
        self.window, self.ranks, self.whole_rows = window, ranks, whole_rows

    def forward(self, length: int, documents: Tensor | None, device: torch.device) -> ContextMask:
        low = None if self.whole_rows else row_bounds(documents, self.window, length * self.ranks, device)
        return ContextMask(documents, self.window, low)


class _Ring:
    """Passes tensors round the ranks of a group, one step at a time; two ranks that exchange with each other do not deadlock."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.next = dist.get_global_rank(group, (self.rank + 1) % self.ranks)
        self.last = dist.get_global_rank(group, (self.rank - 1) % self.ranks)

    def pass_on(self, x: Tensor) -> tuple[Tensor, list[Any]]:
        """Start sending `x` to the next rank; returns the buffer that fills from the previous rank, and the work to wait for."""
        buffer = torch.empty_like(x)
        return buffer, exchange(x.contiguous(), self.next, buffer, self.last, self.group)

    def rounds(self, k: Tensor, v: Tensor, mask: ContextMask) -> Iterator[tuple[Tensor, Tensor, Part]]:
        """The keys and values of one rank after the other, this rank's first, and which of its queries see them. The next ones
        travel meanwhile."""
        kv = torch.cat((k, v), dim=-1)
        for step in range(self.ranks):
            if step < self.ranks - 1:
                coming, waiting = self.pass_on(kv)
            keys, values = (x.transpose(1, 2) for x in kv.split((k.shape[-1], v.shape[-1]), dim=-1))
            part = ring_part(self.rank, (self.rank - step) % self.ranks, self.ranks, k.shape[1], mask, k.device)
            yield keys[:, :, part.keys], values[:, :, part.keys], part
            if step < self.ranks - 1:
                for work in waiting:
                    work.wait()
                kv = coming


def ring_part(rank: int, owner: int, ranks: int, length: int, mask: ContextMask, device: torch.device) -> Part:
    """Which queries of a rank see which keys of `owner`; `length` is that of a rank's shard of the sequence. All queries see the
    front chunk of an earlier rank; only the back chunk sees a later rank, both its chunks. The other pairs lie in the future."""
    half, whole = length // 2, length * ranks
    mine = slice(half, length) if owner > rank else slice(0, length)
    theirs = slice(0, half) if owner < rank else slice(0, length)
    places = zigzag_positions(whole, ranks, rank)[mine], zigzag_positions(whole, ranks, owner)[theirs]
    return Part(mine, theirs, block_mask(mask.low, mask.window, mask.documents is not None, *places, device))


def gather_parts(rank: int, ranks: int, length: int, mask: ContextMask, device: torch.device) -> list[Part]:
    """Each of a rank's two chunks of queries with the keys before it, and with the keys at its own positions."""
    half, place = length // 2, zigzag_positions(length * ranks, ranks, rank)
    found = []
    for mine in (slice(0, half), slice(half, 2 * half)):
        start = int(place[mine.start])
        for keys in (slice(0, start), slice(start, start + half)):
            if keys.stop > keys.start:
                at = np.arange(keys.start, keys.stop)
                seen = block_mask(mask.low, mask.window, mask.documents is not None, place[mine], at, device)
                found.append(Part(mine, keys, seen))
    return found


class _RingAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: ContextMask, scale: float, group: Any, kernels: Kernels
    ) -> Tensor:
        queries = q.transpose(1, 2)
        out = lse = torch.empty(0)
        for step, (keys, values, (mine, _, seen)) in enumerate(_Ring(group).rounds(k, v, mask)):
            block = kernels[0](queries[:, :, mine], keys, values, scale, seen)
            if step:
                merge(out[:, :, mine], lse[:, :, mine], *block)
            else:  # this rank's own keys, which all of its queries see
                out, lse = at_least_float32(block[0]), block[1]
        rounded = q.new_empty(*q.shape[:-1], v.shape[-1])
        rounded.transpose(1, 2).copy_(out)
        ctx.save_for_backward(q, k, v, rounded, lse)
        ctx.rest = mask, scale, group, kernels[1]
        return rounded

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        mask, scale, group, attend_backward = ctx.rest
        ring = _Ring(group)
        queries, out, grad = (x.transpose(1, 2) for x in (q, out, grads[0]))
        delta = row_sums(grad, out)
        dq = zeros_for_sums(queries)
        # The gradient of keys and values travels with them, and is home after a full round.
        dkv = k.new_zeros(*k.shape[:-1], k.shape[-1] + v.shape[-1])
        for keys, values, (mine, theirs, seen) in ring.rounds(k, v, mask):
            gq, gk, gv = attend_backward(
                grad[:, :, mine], out[:, :, mine], delta[:, :, mine], queries[:, :, mine], keys, values,
                lse[:, :, mine], scale, seen,
            )  # fmt: skip
            dq[:, :, mine] += gq
            dkv[:, theirs] += torch.cat((gk, gv), dim=-1).transpose(1, 2)
            dkv, waiting = ring.pass_on(dkv)
            for work in waiting:
                work.wait()
        gk, gv = dkv.split((k.shape[-1], v.shape[-1]), dim=-1)
        return dq.to(q.dtype).transpose(1, 2), gk, gv, None, None, None, None


class BlockwiseAttention(nn.Module):
    """Attention block by block. `kernels` compute a block of it, forward and backward, and may be replaced."""

    def __init__(self, scale: float, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.scale, self.group, self.kernels = scale, group, KERNELS


class RingAttention(BlockwiseAttention):
    """Attention over a ring of ranks."""

    @torch.compiler.disable  # the compiler does not know P2P messages
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: ContextMask) -> Tensor:
        return _RingAttentionFunction.apply(q, k, v, mask, self.scale, self.group, self.kernels)


class GatherAttention(BlockwiseAttention):
    """Attention to keys and values gathered from all ranks. A chunk of queries sees all keys before it, and the keys at its own
    positions causally, so no mask is needed."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: ContextMask) -> Tensor:
        ranks = dist.get_world_size(self.group)
        width = k.shape[-1]
        both = by_position(all_gather_sequence(torch.cat((k, v), dim=-1), self.group, again=False), ranks)
        return self._attend(q, both[..., :width], both[..., width:], mask)

    @torch.compiler.disable
    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: ContextMask) -> Tensor:
        rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        parts = partial(gather_parts, rank, ranks, q.shape[1], mask, q.device)
        return Blockwise.apply(q, k, v, parts, self.scale, self.kernels)


class UlyssesAttention(nn.Module):
    """Attention over whole sequences, with a shard of the heads on each rank; `masks` makes its mask, as on one device."""

    masks: nn.Module

    def __init__(self, scale: float, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.inner = DotProductAttention(scale)
        self.group = group

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: ContextMask) -> Tensor:
        ranks = dist.get_world_size(self.group)
        if k.shape[2] % ranks:  # too few key/value heads to divide: repeat each for the query heads that use it
            groups = q.shape[2] // k.shape[2]
            k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
        q, k, v = (by_position(self._to_heads(x, ranks), ranks) for x in (q, k, v))
        out = self.inner(q, k, v, self.masks(q.shape[1], mask.documents, q.device))
        return self._to_sequence(by_rank(out, ranks), ranks)

    def _swap(self, x: Tensor, ranks: int) -> Tensor:
        """All-to-all over the first dimension, in equal shares."""
        rows = [x.shape[0] // ranks] * ranks
        return all_to_all(x, self.group, rows, rows)

    def _to_heads(self, x: Tensor, ranks: int) -> Tensor:
        batch, part, heads, width = x.shape
        x = x.view(batch, part, ranks, heads // ranks, width).permute(2, 0, 1, 3, 4).contiguous()
        return self._swap(x, ranks).permute(1, 0, 2, 3, 4).reshape(batch, ranks * part, heads // ranks, width)

    def _to_sequence(self, x: Tensor, ranks: int) -> Tensor:
        batch, length, heads, width = x.shape
        x = x.view(batch, ranks, length // ranks, heads, width).transpose(0, 1).contiguous()
        return self._swap(x, ranks).permute(1, 2, 0, 3, 4).reshape(batch, length // ranks, heads * ranks, width)


METHODS: dict[str, Callable[[float, dist.ProcessGroup], nn.Module]] = {
    "ring": RingAttention,
    "ulysses": UlyssesAttention,
    "gather": GatherAttention,
}


def apply_context(model: Transformer, mesh: Mesh, method: str) -> None:
    """Replace one-device attention by attention across the context ranks."""
    group: Group = mesh.group("context")
    if group is None:
        return
    one_device_masks = model.mask_builder
    model.mask_builder = ContextMaskBuilder(model.config.sliding_window, mesh.size("context"), method == "ulysses")
    for block in model.layers.values():
        assert isinstance(block, Block)
        assert isinstance(block.attention, GroupedAttention | LatentAttention)
        one_device = block.attention.core
        assert isinstance(one_device, DotProductAttention)
        core = METHODS[method](one_device.scale, group)
        if isinstance(core, UlyssesAttention):
            core.masks = one_device_masks
        block.attention.core = core
