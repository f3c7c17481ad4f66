"""Context parallelism: each rank holds a part of every sequence, and attention alone communicates.

A sequence is cut into 2c chunks; rank r takes chunk r and chunk 2c-1-r (zig-zag), so that causal work is the same on every
rank. Activations fall by c. Three ways to attend to the other ranks' keys and values, with n = batch x sequence/c x heads x width:
- ring (Liu et al. 2023): keys and values travel round, 2(c-1) n_kv forward; backward 2(c-1) n_kv, and 2c n_kv of their
  gradients, which go the full round home; blocks are merged by their log-sum-exp, and chunks that lie in the future are never
  computed.
- ulysses (Jacobs et al. 2023): all-to-alls make of a part of the sequence with all heads the whole sequence with a part of
  the heads and back; (c-1)/c of 2 n_q + 2 n_kv forward, the same backward. When c does not divide the key/value heads they
  are repeated for each query head: n_kv is then n_q.
- gather (Llama 3, Grattafiori et al. 2024): keys and values of all ranks are gathered, 2(c-1) n_kv forward, the same backward.
All numbers are for each layer and microbatch. For parameters a context rank is one more data rank (`shard.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.model.attention import DotProductAttention, GroupedAttention, LatentAttention, attention_mask
from shardwise.model.transformer import Block, Transformer
from shardwise.parallel.collectives import Group, all_gather_sequence, all_to_all
from shardwise.parallel.mesh import Mesh


def zigzag_positions(length: int, ranks: int, rank: int) -> np.ndarray:
    """The places in a sequence that a rank holds: one chunk from the front and its mirror image from the back."""
    if ranks == 1:
        return np.arange(length)
    chunk = length // (2 * ranks)
    front, back = rank * chunk, (2 * ranks - 1 - rank) * chunk
    return np.concatenate((np.arange(front, front + chunk), np.arange(back, back + chunk)))


def zigzag(length: int, ranks: int, rank: int) -> Tensor:
    """The same as a tensor."""
    return torch.from_numpy(zigzag_positions(length, ranks, rank))


@dataclass(frozen=True)
class ContextMask:
    """What the attention of a split sequence needs to know: the whole rows' documents (or None) and the sliding window."""

    documents: Tensor | None
    window: int


class ContextMaskBuilder(nn.Module):
    """In the place of the one-device mask: passes on what the masks of blocks are made from."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def forward(self, queries: int, documents: Tensor | None, keys: int, device: torch.device) -> ContextMask:
        return ContextMask(documents, self.window)


def block_mask(
    mask: ContextMask, queries: tuple[int, int], keys: tuple[int, int], device: torch.device
) -> Tensor | None:
    """Which of the keys [start, stop) each of the queries [start, stop) attends to; None for all of them."""
    q, k = torch.arange(*queries, device=device)[:, None], torch.arange(*keys, device=device)
    everything = keys[1] <= queries[0] + 1 and (not mask.window or queries[1] - 1 - keys[0] < mask.window)
    if everything and mask.documents is None:
        return None
    allowed = (k <= q) & (q - k < mask.window) if mask.window else k <= q
    allowed = allowed[None, None]
    if mask.documents is not None:
        rows, columns = mask.documents[:, queries[0] : queries[1]], mask.documents[:, keys[0] : keys[1]]
        allowed = allowed & (rows[:, None, :, None] == columns[:, None, None, :])
    return allowed


def _heads_first(x: Tensor, heads: int) -> Tensor:
    """[batch, sequence, heads, width] to [batch, heads, sequence, width], key/value heads repeated for their queries."""
    x = x.transpose(1, 2)
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def attend_block(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention of some queries to some keys, and the log-sum-exp of its scores, by which blocks are merged."""
    scores = (q @ k.mT) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    lse = scores.logsumexp(dim=-1)
    # A query that sees nothing here has a log-sum-exp of -inf; zero weights, not NaN, are meant.
    weights = (scores - lse.masked_fill(lse == float("-inf"), 0)[..., None]).exp()
    return weights @ v, lse


def attend_block_backward(
    grad: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a block given the log-sum-exp of the whole row and `delta`, the row sums of grad x output."""
    weights = ((q @ k.mT) * scale - lse[..., None]).exp()
    if mask is not None:
        weights = weights.masked_fill(~mask, 0)
    inner = weights * (grad @ v.mT - delta[..., None]) * scale
    return inner @ k, inner.mT @ q, weights.mT @ grad


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two attentions over different keys as one over both (online softmax, Milakov & Gimelshein 2018)."""
    total = torch.logaddexp(lse, more_lse)
    base = total.masked_fill(total == float("-inf"), 0)
    return out * (lse - base).exp()[..., None] + more * (more_lse - base).exp()[..., None], total


class _Ring:
    """Passes tensors round the ranks of a group, one step at a time, in both directions of a pair without deadlock."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.next = dist.get_global_rank(group, (self.rank + 1) % self.ranks)
        self.last = dist.get_global_rank(group, (self.rank - 1) % self.ranks)

    def pass_on(self, x: Tensor) -> tuple[Tensor, list[Any]]:
        """Start sending `x` to the next rank; gives the buffer that fills from the last one, and what to wait for."""
        buffer = torch.empty_like(x)
        operations = [
            dist.P2POp(dist.isend, x.contiguous(), self.next, self.group),
            dist.P2POp(dist.irecv, buffer, self.last, self.group),
        ]
        return buffer, dist.batch_isend_irecv(operations)

    def chunks(self, rank: int, length: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Where the two chunks of a rank lie in the whole sequence, `length` being that of a rank's part."""
        half = length // 2
        front, back = rank * half, (2 * self.ranks - 1 - rank) * half
        return (front, front + half), (back, back + half)

    def pairs(self, owner: int, length: int) -> Iterator[tuple[slice, slice, tuple[int, int], tuple[int, int]]]:
        """Which of my chunks of queries see which chunks of keys of `owner`: slices of the parts, and places in the row."""
        half = length // 2
        halves = (slice(0, half), slice(half, length))
        for mine, queries in zip(halves, self.chunks(self.rank, length), strict=True):
            for theirs, keys in zip(halves, self.chunks(owner, length), strict=True):
                if keys[0] <= queries[0]:
                    yield mine, theirs, queries, keys


class _RingAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: ContextMask, scale: float, group: Any, kernels: Any
    ) -> Tensor:
        ring, length, heads = _Ring(group), q.shape[1], q.shape[2]
        queries = _heads_first(q, heads)
        out = queries.new_zeros(*queries.shape[:-1], v.shape[-1])
        lse = queries.new_full(queries.shape[:-1], float("-inf"))
        kv = torch.cat((k, v), dim=-1)
        for step in range(ring.ranks):
            if step < ring.ranks - 1:
                coming, waiting = ring.pass_on(kv)
            keys, values = (_heads_first(x, heads) for x in kv.split((k.shape[-1], v.shape[-1]), dim=-1))
            for mine, theirs, where_q, where_k in ring.pairs((ring.rank - step) % ring.ranks, length):
                allowed = block_mask(mask, where_q, where_k, q.device)
                block = kernels[0](queries[:, :, mine], keys[:, :, theirs], values[:, :, theirs], scale, allowed)
                out[:, :, mine], lse[:, :, mine] = merge(out[:, :, mine], lse[:, :, mine], *block)
            if step < ring.ranks - 1:
                for work in waiting:
                    work.wait()
                kv = coming
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = mask, scale, group, kernels[1]
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        mask, scale, group, attend_backward = ctx.rest
        ring, length, heads = _Ring(group), q.shape[1], q.shape[2]
        groups = heads // k.shape[2]
        queries, grad = _heads_first(q, heads), grads[0].transpose(1, 2)
        delta = (grad * out).sum(dim=-1)
        dq = torch.zeros_like(queries)
        widths = (k.shape[-1], v.shape[-1])
        kv = torch.cat((k, v), dim=-1)
        # The gradient of keys and values travels with them, and is home after a full round.
        dkv = torch.zeros_like(kv)
        for step in range(ring.ranks):
            if step < ring.ranks - 1:
                coming, waiting = ring.pass_on(kv)
            keys, values = (_heads_first(x, heads) for x in kv.split(widths, dim=-1))
            dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
            for mine, theirs, where_q, where_k in ring.pairs((ring.rank - step) % ring.ranks, length):
                allowed = block_mask(mask, where_q, where_k, q.device)
                gq, gk, gv = attend_backward(
                    grad[:, :, mine], delta[:, :, mine], queries[:, :, mine], keys[:, :, theirs], values[:, :, theirs],
                    lse[:, :, mine], scale, allowed,
                )  # fmt: skip
                dq[:, :, mine] += gq
                dk[:, :, theirs] += gk
                dv[:, :, theirs] += gv
            both = torch.cat((dk, dv), dim=-1).unflatten(1, (-1, groups)).sum(dim=2)
            dkv = dkv + both.transpose(1, 2)
            if step < ring.ranks - 1:
                for work in waiting:
                    work.wait()
                kv = coming
            dkv, waiting_grad = ring.pass_on(dkv)
            for work in waiting_grad:
                work.wait()
        gk, gv = dkv.split(widths, dim=-1)
        return dq.transpose(1, 2), gk, gv, None, None, None, None


class RingAttention(nn.Module):
    """Attention over a ring of ranks. `kernels` compute a block of it, forward and backward: others may be put in their place."""

    def __init__(self, scale: float, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.scale = scale
        self.group = group
        self.kernels: tuple[Callable[..., Any], Callable[..., Any]] = (attend_block, attend_block_backward)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: ContextMask) -> Tensor:
        return _RingAttentionFunction.apply(q, k, v, mask, self.scale, self.group, self.kernels)


class GatherAttention(nn.Module):
    """Attention to keys and values gathered from all ranks."""

    def __init__(self, scale: float, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.inner = DotProductAttention(scale)
        self.group = group

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: ContextMask) -> Tensor:
        ranks, rank, part = dist.get_world_size(self.group), dist.get_rank(self.group), q.shape[1]
        length = part * ranks
        width = k.shape[-1]
        both = all_gather_sequence(torch.cat((k, v), dim=-1), self.group)
        places = torch.cat([zigzag(length, ranks, r) for r in range(ranks)]).to(q.device)
        both = both.index_select(1, places.argsort())
        allowed = attention_mask(length, mask.documents, length, mask.window, q.device)
        if allowed is None:
            everywhere = torch.arange(length, device=q.device)
            allowed = (everywhere <= everywhere[:, None])[None, None]
        allowed = allowed[:, :, zigzag(length, ranks, rank).to(q.device)]
        return self.inner(q, both[..., :width], both[..., width:], allowed)


class UlyssesAttention(nn.Module):
    """Attention over whole sequences, a part of the heads on each rank."""

    def __init__(self, scale: float, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.inner = DotProductAttention(scale)
        self.group = group

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: ContextMask) -> Tensor:
        ranks = dist.get_world_size(self.group)
        if k.shape[2] % ranks:  # too few key/value heads to deal out: repeat each for the query heads that use it
            groups = q.shape[2] // k.shape[2]
            k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
        places = torch.cat([zigzag(q.shape[1] * ranks, ranks, r) for r in range(ranks)]).to(q.device)
        q, k, v = (self._to_heads(x, ranks).index_select(1, places.argsort()) for x in (q, k, v))
        length = q.shape[1]
        out = self.inner(q, k, v, attention_mask(length, mask.documents, length, mask.window, q.device))
        return self._to_sequence(out.index_select(1, places), ranks)

    def _swap(self, x: Tensor, ranks: int) -> Tensor:
        """All-to-all of the first dimension, dealt out evenly."""
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
    """Put attention that sees across the context ranks in the place of the one-device one."""
    group: Group = mesh.group("context")
    if group is None:
        return
    model.mask_builder = ContextMaskBuilder(model.config.sliding_window)
    for block in model.layers.values():
        assert isinstance(block, Block)
        assert isinstance(block.attention, GroupedAttention | LatentAttention)
        one_device = block.attention.core
        assert isinstance(one_device, DotProductAttention)
        block.attention.core = METHODS[method](one_device.scale, group)
