"""Attention of a block of queries to a block of keys of a longer sequence, with the log-sum-exp that merges blocks.

On a GPU in 16 bits these are this project's kernels, which return float32 outputs: PyTorch's kernels round outputs to 16 bits, and
merging them would round once more per block. The backward pass of a block without a mask, or with a causal one, is the kernel that
PyTorch would choose (cuDNN's or flash attention). Elsewhere it is plain PyTorch, in float32 for 16-bit inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardwise.model.layers import at_least_float32
from shardwise.torch_private import fused_attention_backward, fused_sdp_choice


class Bounds(NamedTuple):
    """Which keys each query sees: those at positions `low[batch or 1, query]` to its own. Key positions increase."""

    low: Tensor
    place: Tensor
    key_place: Tensor
    pairs: float
    """Number of (query, visible key) pairs, if every row is one document."""

    def dense(self) -> Tensor:
        """The same as a boolean mask [batch or 1, 1, queries, keys]."""
        seen = (self.key_place >= self.low[..., None]) & (self.key_place <= self.place[:, None])
        return seen[:, None]


class Causal:
    """Queries and keys have the same positions: each query sees the keys up to its own position."""


CAUSAL = Causal()
BlockMask = Bounds | Causal | None
"""None: every query sees every key."""

Kernels = tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., tuple[Tensor, Tensor, Tensor]]]


def row_bounds(documents: Tensor | None, window: int, length: int, device: torch.device) -> Tensor | None:
    """The first position that each position of a row sees, [batch or 1, length]; None where that is always the row's first."""
    if documents is None and not 0 < window < length:
        return None
    place = torch.arange(length, device=device, dtype=torch.int32)[None]
    low = torch.zeros_like(place)
    if documents is not None:
        changes = torch.zeros_like(documents, dtype=torch.bool)
        changes[:, 1:] = documents[:, 1:] != documents[:, :-1]
        low = torch.where(changes, place, 0).cummax(dim=1).values.to(torch.int32)
    return torch.maximum(low, place - window + 1) if window else low


def block_mask(
    low: Tensor | None, window: int, packed: bool, queries: np.ndarray, keys: np.ndarray, device: torch.device
) -> BlockMask:
    """The mask of queries at some positions over keys at some positions, where no key comes after the last query. `low` holds the
    bounds of rows; where they do not come from `packed` documents, a block well inside the window needs none."""
    same = len(queries) == len(keys) and bool((queries == keys).all())
    simple = same or bool(keys[-1] <= queries[0])
    inside = low is None or (not packed and window > queries[-1] - keys[0])
    if inside and simple:
        return CAUSAL if same else None
    place, key_place = (torch.from_numpy(x.astype(np.int32)).to(device) for x in (queries, keys))
    first = queries - window + 1 if window else np.zeros_like(queries)
    pairs = float((np.searchsorted(keys, queries, "right") - np.searchsorted(keys, first)).sum())
    lowest = torch.zeros_like(place)[None] if low is None else low.index_select(1, place)
    return Bounds(lowest, place, key_place, pairs)


def _fits_kernels(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)


def _dense(mask: BlockMask, q: Tensor, k: Tensor) -> Tensor | None:
    if isinstance(mask, Causal):
        return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()[None, None]
    return None if mask is None else mask.dense()


def _backend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> str:
    """The kernel that PyTorch would choose for such inputs; all of them return the log-sum-exp."""
    from torch.nn.attention import SDPBackend

    grouped = k.shape[1] != q.shape[1]
    chosen = fused_sdp_choice(q, k, v, None, 0.0, causal, scale=None, enable_gqa=grouped)
    if chosen == SDPBackend.CUDNN_ATTENTION.value:
        return "cudnn"
    return "flash" if chosen == SDPBackend.FLASH_ATTENTION.value else "efficient"


def _for_queries(x: Tensor, heads: int) -> Tensor:
    """Key/value heads repeated for the query heads that use them."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def attend_block(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: BlockMask) -> tuple[Tensor, Tensor]:
    """Attention of queries [batch, heads, queries, width] to keys and values with the same number of heads or fewer, and the
    log-sum-exp of its scores; both results may have a higher precision than the inputs."""
    if _fits_kernels(q):
        from shardwise.model.kernels.attention.bounded import bounded_attention, whole_attention

        if isinstance(mask, Bounds):
            return bounded_attention(q, k, v, scale, *mask[:3])
        return whole_attention(q, k, v, scale, causal=mask is not None)
    q, k, v = (at_least_float32(x) for x in (q, k, v))
    scores = (q @ _for_queries(k, q.shape[1]).mT) * scale
    allowed = _dense(mask, q, k)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    lse = scores.logsumexp(dim=-1)
    # A query that sees no key here has a log-sum-exp of -inf; its weights must be zero, not NaN.
    weights = (scores - lse.masked_fill(lse == float("-inf"), 0)[..., None]).exp()
    return weights @ _for_queries(v, q.shape[1]), lse


def attend_block_backward(
    grad: Tensor,
    out: Tensor,
    delta: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    scale: float,
    mask: BlockMask,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a block, given each row's output and log-sum-exp over all its keys, and `delta`, the row sums of grad x
    output."""
    if _fits_kernels(q):
        if isinstance(mask, Bounds):
            from shardwise.model.kernels.attention.bounded import bounded_attention_backward

            return bounded_attention_backward(grad, delta, q, k, v, lse, scale, *mask[:3])
        causal = mask is not None
        return fused_attention_backward(grad, out, q, k, v, lse, scale, causal, _backend(q, k, v, causal))
    heads, kv_heads = q.shape[1], k.shape[1]
    grad, q, k, v = (at_least_float32(x) for x in (grad, q, k, v))
    every_k, every_v = _for_queries(k, heads), _for_queries(v, heads)
    weights = ((q @ every_k.mT) * scale - lse[..., None]).exp()
    allowed = _dense(mask, q, k)
    if allowed is not None:
        weights = weights.masked_fill(~allowed, 0)
    inner = weights * (grad @ every_v.mT - delta[..., None]) * scale
    dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(dim=2) for x in (inner.mT @ q, weights.mT @ grad))
    return inner @ every_k, dk, dv


KERNELS: Kernels = (attend_block, attend_block_backward)


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Merge attention over more keys into that over others (online softmax, Milakov & Gimelshein 2018). In place: outputs are in
    float32, and each copy of one is a pass over the largest tensor here."""
    total = torch.logaddexp(lse, more_lse)
    base = total.masked_fill(total == float("-inf"), 0)
    out.mul_((lse - base).exp()[..., None]).addcmul_(more, (more_lse - base).exp()[..., None])
    lse.copy_(total)


def row_sums(grad: Tensor, out: Tensor) -> Tensor:
    """The row sums of grad x output, needed by the backward pass of every block."""
    if grad.is_cuda and grad.dtype != torch.float64:
        from shardwise.model.kernels.attention.row_sums import row_sums_of_products

        return row_sums_of_products(grad, out)
    return (at_least_float32(grad) * at_least_float32(out)).sum(dim=-1)


class Part(NamedTuple):
    """One attention call: its slices of the queries and keys on this rank, and its mask."""

    queries: slice
    keys: slice
    mask: BlockMask


class Blockwise(torch.autograd.Function):
    """Attention of queries to keys that are all on this rank, part by part, heads laid out [batch, sequence, heads, width]. For
    each key that a query sees, some part contains both. `parts` is called twice, so that no mask is saved for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, parts: Callable[[], list[Part]], scale: float, kernels: Kernels
    ) -> Tensor:
        queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
        found: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        for rows, columns, mask in parts():
            block = kernels[0](queries[:, :, rows], keys[:, :, columns], values[:, :, columns], scale, mask)
            place = (rows.start, rows.stop)
            if place in found:
                merge(*found[place], *block)
            else:
                found[place] = block
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        for (start, stop), (one, _) in found.items():
            out[:, start:stop].transpose(1, 2).copy_(one)
        lse = torch.cat([found[place][1] for place in sorted(found)], dim=2)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = parts, scale, kernels[1]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        parts, scale, attend_backward = ctx.rest
        queries, keys, values, out, grad = (x.transpose(1, 2) for x in (q, k, v, out, grads[0]))
        delta = row_sums(grad, out)
        found: tuple[Pieces, Pieces, Pieces] = ([], [], [])
        for rows, columns, mask in parts():
            block = attend_backward(
                grad[:, :, rows], out[:, :, rows], delta[:, :, rows], queries[:, :, rows], keys[:, :, columns],
                values[:, :, columns], lse[:, :, rows], scale, mask,
            )  # fmt: skip
            for pieces, place, one in zip(found, (rows, columns, columns), block, strict=True):
                pieces.append((place, one))
            del block, one
        return *(joined(x, pieces) for x, pieces in zip((q, k, v), found, strict=True)), None, None, None


Pieces = list[tuple[slice, Tensor]]
"""Gradients of slices of a sequence, heads laid out [batch, heads, sequence, width]."""


def joined(like: Tensor, pieces: Pieces) -> Tensor:
    """The sum of these gradients, rounded once, in the layout and dtype of a tensor [batch, sequence, heads, width]. `pieces` is
    emptied."""
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    cuts = sorted({0, like.shape[1], *(end for place, _ in pieces for end in (place.start, place.stop))})
    for start, stop in pairwise(cuts):
        here = [(x, place.start) for place, x in pieces if place.start <= start and stop <= place.stop]
        terms = [x[:, :, start - first : stop - first] for x, first in here]
        target = out[:, start:stop].transpose(1, 2)
        if not terms:
            target.zero_()
        elif len(terms) == 1:
            target.copy_(terms[0])
        elif len(terms) == 2:
            torch.add(*terms, out=target)
        else:
            total = terms[0].to(torch.promote_types(like.dtype, torch.float32), copy=True)
            for term in terms[1:]:
                total += term
            target.copy_(total)
    pieces.clear()
    return out


def zeros_for_sums(x: Tensor) -> Tensor:
    """Zeros of the same shape, in a dtype to accumulate in."""
    return torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
