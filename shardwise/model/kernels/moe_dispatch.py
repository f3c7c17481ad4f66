"""Copies tokens to rows ordered by expert, and sums rows back into tokens, one token a program. A token is read once and written
to its k rows, or its k rows are read and added in the order of its choices, in float32. There are no copies in between, and
nothing depends on which program comes first. A choice with row index -1 is neither written nor read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _spread(x, places, rows, K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    for first in range(0, WIDTH, BLOCK):
        at = first + tl.arange(0, BLOCK)
        value = tl.load(x + token * WIDTH + at, mask=at < WIDTH)
        for choice in tl.static_range(K):
            place = tl.load(places + token * K + choice).to(tl.int64)
            tl.store(rows + place * WIDTH + at, value, mask=at < tl.where(place >= 0, WIDTH, 0))


@triton.jit
def _collect(  # type: ignore[no-untyped-def]
    rows, places, weights, out, K: tl.constexpr, WEIGHED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    for first in range(0, WIDTH, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        for choice in tl.static_range(K):
            place = tl.load(places + token * K + choice).to(tl.int64)
            row = tl.load(rows + place * WIDTH + at, mask=at < tl.where(place >= 0, WIDTH, 0), other=0.0).to(tl.float32)
            if WEIGHED:
                row = row * tl.load(weights + token * K + choice).to(tl.float32)
            total += row
        tl.store(out + token * WIDTH + at, total, mask=at < WIDTH)


@triton.jit
def _combine_weighted_backward(  # type: ignore[no-untyped-def]
    gradient, rows, places, weights, to_rows, to_weights, K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    for choice in tl.static_range(K):
        place = tl.load(places + token * K + choice).to(tl.int64)
        weight = tl.load(weights + token * K + choice).to(tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, WIDTH, BLOCK):
            at = first + tl.arange(0, BLOCK)
            there = at < tl.where(place >= 0, WIDTH, 0)
            given = tl.load(gradient + token * WIDTH + at, mask=at < WIDTH, other=0.0).to(tl.float32)
            total += given * tl.load(rows + place * WIDTH + at, mask=there, other=0.0).to(tl.float32)
            tl.store(to_rows + place * WIDTH + at, given * weight, mask=there)
        tl.store(to_weights + token * K + choice, tl.sum(total, 0))


def _shape(width: int) -> dict[str, int]:
    """Elements that a program takes at once, and the warps for them: 16 bytes a thread, twice."""
    block = min(BLOCK, triton.next_power_of_2(width))
    return dict(WIDTH=width, BLOCK=block, num_warps=max(1, min(8, block // 512)))


def dispatch_fused(x: Tensor, places: Tensor, rows: int) -> Tensor:
    """Each token [tokens, width] copied to its row indices [tokens, k] among `rows` rows."""
    x = x.contiguous()
    (tokens, width), k = x.shape, places.shape[1]
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if tokens:
        _spread[(tokens,)](x, places, out, k, **_shape(width))
    return out


def combine_fused(rows: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """For each token, the sum of the rows at its indices, weighted by [tokens, k] if weights are given."""
    rows = rows.contiguous()
    (tokens, k), width = places.shape, rows.shape[1]
    out = torch.empty(tokens, width, dtype=rows.dtype, device=rows.device)
    if tokens:
        given = places if weights is None else weights.contiguous()
        _collect[(tokens,)](rows, places, given, out, k, weights is not None, **_shape(width))
    return out


def combine_weighted_backward_fused(
    gradient: Tensor, rows: Tensor, places: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of the rows and of the weights of `combine_fused`."""
    gradient, rows, weights = gradient.contiguous(), rows.contiguous(), weights.contiguous()
    (tokens, k), width = places.shape, rows.shape[1]
    to_rows, to_weights = torch.empty_like(rows), torch.empty_like(weights)
    if tokens:
        _combine_weighted_backward[(tokens,)](gradient, rows, places, weights, to_rows, to_weights, k, **_shape(width))
    return to_rows, to_weights
