"""The row index of each choice when choices are ordered by expert: a stable counting sort. Choices are counted in blocks, the
counts of earlier blocks are added up for each expert, and each block then knows where its choices go. No sum depends on which
program comes first, and there is no host sync.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CELLS = 8192
"""Choices times experts that a program holds at once."""


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
