"""Attention whose bits for a token depend only on its sequence up to that token. The same functions serve a server's pages and
training documents, since the rows of a tensor are pages of one token each.

On a CPU, the position of a token fixes everything: a block is `ROWS` positions from a multiple of `ROWS` on, its keys are all
positions from the first to the end of the block, and missing ones are zero. So a token meets operators with the same shape, at the
same index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.model.varlen import Mask, VarlenMask, cu_seqlens_of, varlen_attention, varlen_attention_reference

ROWS = 16
"""Positions in a block on a CPU."""


def with_ordinary_gradient(
    exact: Callable[..., Tensor], ordinary: Callable[..., Tensor], *inputs: Tensor | None
) -> Tensor:
    """`exact(*inputs)`, with the gradients of `ordinary(*inputs)`, a nearly equal function: for kernels without a backward pass.
    That pass recomputes the other function, so only the inputs are saved."""
    if not torch.is_grad_enabled():
        return exact(*inputs)
    return _OrdinaryGradient.apply(exact, ordinary, *inputs)


class _OrdinaryGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exact: Callable[..., Tensor], ordinary: Callable[..., Tensor], *inputs: Tensor | None
    ) -> Tensor:
        ctx.ordinary = ordinary
        ctx.save_for_backward(*inputs)
        return exact(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2:]
        with torch.enable_grad():
            inputs = [
                None if x is None else x.detach().requires_grad_(each)
                for x, each in zip(ctx.saved_tensors, wanted, strict=True)
            ]
            out = ctx.ordinary(*inputs)
            found = iter(torch.autograd.grad(out, [x for x in inputs if x is not None and x.requires_grad], grads))
        return None, None, *(next(found) if each else None for each in wanted)


class InvariantMaskBuilder(nn.Module):
    """Masks as `attend_documents` takes them: where documents begin, and the window."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def forward(self, length: int, documents: Tensor | None, device: torch.device) -> VarlenMask:
        if documents is not None and documents.dim() == 2:
            documents = torch.from_numpy(cu_seqlens_of(documents.cpu().numpy())).to(device)
        return VarlenMask(documents, self.window)


def attend_documents(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
    """Attention of heads [rows, length, heads, width] inside documents. Gradients come from flash attention where it supports such
    heads."""
    assert isinstance(mask, VarlenMask), "an invariant network's masks are those of `InvariantMaskBuilder`"

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, length = q.shape[:2]
        total = rows * length
        # The page of the n-th token of a document that begins at row s is row s + n, so page tables overlap.
        pages = torch.arange(total + 1 + length, dtype=torch.int32, device=q.device).clamp(max=total - 1)
        table = pages.as_strided((total + 1, length), (1, 1))
        keys, values = (x.flatten(0, 1)[:, :, None] for x in (k, v))
        given = mask.cu_seqlens
        if q.is_cuda:
            each = torch.arange(0, total + 1, length, dtype=torch.int32, device=q.device)
            bounds = each if given is None else given
            made = _on_device(q.flatten(0, 1), keys, values, table, bounds, length, scale, mask.window)
        else:
            begins = list(range(0, total + 1, length)) if given is None else given.tolist()
            counts = [stop - begin for begin, stop in pairwise(begins)]
            where = (table, begins[:-1], [0] * len(counts), counts)
            made = attend_blocks(q.flatten(0, 1), keys, values, *where, scale, mask.window)
        return made.unflatten(0, (rows, length))

    def ordinary(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        flash = q.is_cuda and q.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
        return (varlen_attention if flash else varlen_attention_reference)(q, k, v, mask, scale)

    return with_ordinary_gradient(exact, ordinary, q, k, v)


def _on_device(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, bounds: Tensor, longest: int, scale: float, window: int
) -> Tensor:  # fmt: skip
    """The kernel, for documents whose lengths the host does not know."""
    from shardwise.model.kernels.attention.invariant import invariant_attention, tokens_of_tile
    from shardwise.model.kernels.gemm.invariant import grouped_tiles

    token = torch.arange(len(q), dtype=torch.int32, device=q.device)
    document = torch.searchsorted(bounds, token, right=True) - 1
    each = tokens_of_tile(q.shape[1], keys.shape[1], q.shape[2])
    tiles = grouped_tiles(bounds.diff(), each, len(q) // each + len(bounds) - 1)
    tiles = torch.stack((tiles[:, 0], tiles[:, 1] - bounds[tiles[:, 0].long()]), dim=1)
    positions = token - bounds[document]
    where = (table, bounds[:-1], torch.zeros_like(bounds[:-1]), bounds, tiles.flatten(), positions)
    return invariant_attention(q, keys, values, *where, longest, scale, window)


def attend_blocks(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, slots: Sequence[int], starts: Sequence[int],
    counts: Sequence[int], scale: float, window: int,
) -> Tensor:  # fmt: skip
    """Attention of new tokens [tokens, heads, width] of several sequences, `counts` of each, whose keys and values are in their
    pages. `starts` is the number of earlier tokens of each sequence, and `slots` its row in the page table."""
    out = q.new_empty(*q.shape[:2], values.shape[-1])
    page_tokens, done = keys.shape[2], 0
    for slot, start, count in zip(slots, starts, counts, strict=True):
        at = start
        while at < start + count:
            first = at // ROWS * ROWS
            stop = min(first + ROWS, start + count)
            new, key = slice(done, done + stop - at), torch.arange(first + ROWS)
            position = key[first:, None]
            pages = table[slot, (key // page_tokens).clamp(max=(stop - 1) // page_tokens)].long().clamp(min=0)
            there = key < stop
            if window:
                there &= at - key < window
            # Keys and values that no query sees may hold anything, even NaN, and zero times NaN is not zero.
            k, v = (
                torch.where(there[:, None, None], x[pages, :, key % page_tokens].to(q.dtype), 0) for x in (keys, values)
            )
            seen = key <= position
            if window:
                seen &= position - key < window
            queries = q.new_zeros(ROWS, *q.shape[1:])
            queries[at - first : stop - first] = q[new]
            grouped = k.shape[1] != q.shape[1]
            queries, k, v = (x.transpose(0, 1)[None] for x in (queries, k, v))
            made = F.scaled_dot_product_attention(queries, k, v, attn_mask=seen, scale=scale, enable_gqa=grouped)
            out[new] = made[0, :, at - first : stop - first].transpose(0, 1)
            done, at = new.stop, stop
    return out
