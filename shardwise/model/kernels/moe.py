"""The routing of an MoE layer, without a host sync; nothing depends on which program comes first.

Top-k: a program takes the highest remaining score of a few tokens k times. PyTorch's top-k sorts by digits, which pays for
thousands of scores and not for a router's few.
Sort: the row index of each choice when choices are ordered by expert, by a stable counting sort. Choices are counted in blocks, the
counts of earlier blocks are added up for each expert, and each block then knows where its choices go.
Dispatch and combine: tokens are copied to rows ordered by expert, and rows summed back into tokens, one token a program. A token is
read once and written to its k rows, or its k rows are read and added in the order of its choices, in float32. There are no copies
in between. A choice with row index -1 is neither written nor read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SCORES = 2048
"""Scores that a program of top-k holds at once."""
CELLS = 8192
"""Choices times experts that a program of the sort holds at once."""
BLOCK = 4096
"""Elements of a token that a program copies or sums at once."""


@triton.jit
def _best(scores, chosen, tokens, experts_known, K: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    experts = tl.arange(0, EXPERTS)
    there = (token[:, None] < tokens) & (experts[None, :] < experts_known)
    left = tl.load(scores + token[:, None] * experts_known + experts[None, :], mask=there, other=float("-inf"))
    # NaN is never the best; otherwise the highest could be an expert that does not exist.
    left = tl.where(left == left, left, float("-inf"))
    for choice in tl.static_range(K):
        best = tl.argmax(left, 1)
        tl.store(chosen + token * K + choice, best.to(tl.int64), mask=token < tokens)
        left = tl.where(experts[None, :] == best[:, None], float("-inf"), left)


def topk_experts_fused(scores: Tensor, k: int) -> Tensor:
    """The experts of the k highest scores of each token, [..., experts] to [..., k], highest first; of equal scores the first
    expert."""
    scores = scores.contiguous()
    experts = scores.shape[-1]
    tokens, width = scores.numel() // experts, triton.next_power_of_2(experts)
    chosen = torch.empty(*scores.shape[:-1], k, dtype=torch.int64, device=scores.device)
    if tokens:
        block = max(1, SCORES // width)
        _best[(triton.cdiv(tokens, block),)](scores, chosen, tokens, experts, k, width, block)
    return chosen


@triton.jit
def _count(chosen, counted, choices, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    experts = tl.arange(0, EXPERTS)
    expert = tl.load(chosen + at, mask=at < choices, other=-1).to(tl.int32)
    mine = (expert[:, None] == experts[None, :]).to(tl.int32)
    tl.store(counted + block * EXPERTS + experts, tl.sum(mine, 0))


@triton.jit
def _add_up(counted, totals, blocks, EXPERTS: tl.constexpr, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCKS)
    here = counted + at * EXPERTS + expert
    count = tl.load(here, mask=at < blocks, other=0)
    tl.store(here, tl.cumsum(count, 0) - count, mask=at < blocks)
    tl.store(totals + expert, tl.sum(count, 0).to(tl.int64))


@triton.jit
def _place(chosen, before, totals, places, choices, experts_known, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    experts = tl.arange(0, EXPERTS)
    expert = tl.load(chosen + at, mask=at < choices, other=-1).to(tl.int32)
    mine = (expert[:, None] == experts[None, :]).to(tl.int32)
    total = tl.load(totals + experts, mask=experts < experts_known, other=0).to(tl.int32)
    start = tl.cumsum(total, 0) - total + tl.load(before + block * EXPERTS + experts)
    place = tl.sum(mine * (tl.cumsum(mine, 0) - mine + start[None, :]), 1)
    known = (expert >= 0) & (expert < experts_known)
    tl.store(places + at, tl.where(known, place, -1), mask=at < choices)


def sort_by_expert_fused(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The row index of each choice in expert order, int32 in the shape of `chosen`, and the number of choices of each expert,
    int64.

    A choice of an expert that does not exist has index -1.
    """
    chosen = chosen.contiguous()
    choices, width = chosen.numel(), triton.next_power_of_2(experts)
    places = torch.empty_like(chosen, dtype=torch.int32)
    if not choices:
        return places, torch.zeros(experts, dtype=torch.int64, device=chosen.device)
    totals = torch.empty(experts, dtype=torch.int64, device=chosen.device)
    block = max(32, min(256, CELLS // width))
    blocks = triton.cdiv(choices, block)
    counted = torch.empty(blocks, width, dtype=torch.int32, device=chosen.device)
    _count[(blocks,)](chosen, counted, choices, width, block)
    _add_up[(experts,)](counted, totals, blocks, width, triton.next_power_of_2(blocks))
    _place[(blocks,)](chosen, counted, totals, places, choices, experts, width, block)
    return places, totals


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
