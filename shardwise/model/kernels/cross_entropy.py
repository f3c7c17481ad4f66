"""Cross-entropy of logits, with their gradient written in place. A row of the vocabulary is read for the sum of exponentials, and
once more for the gradient. Two programs for each multiprocessor take the rows in turn, which was the fastest way timed on an H200.
Where ranks have parts of the vocabulary, they add up these sums between the two reads, which are kernels of their own then.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
WARPS = 16
STAGES = 3
"""Blocks whose loads are under way at a time."""
PROGRAMS = 2
"""Programs for each multiprocessor."""


@triton.jit
def _log_sum_exp(start, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):  # type: ignore[no-untyped-def]
    highest = float("-inf")
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in tl.range(0, VOCABULARY, BLOCK, num_stages=STAGES):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(start + at, mask=at < VOCABULARY, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(x, 0))
        # A sum for each index in the block: only the highest score needs a reduction across threads.
        total = total * tl.exp(highest - higher) + tl.exp(x - higher)
        highest = higher
    return highest + tl.log(tl.sum(total, 0))


@triton.jit
def _to_gradient(  # type: ignore[no-untyped-def]
    start, whole, place, counted, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    for first in tl.range(0, VOCABULARY, BLOCK, num_stages=STAGES):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(start + at, mask=at < VOCABULARY, other=float("-inf")).to(tl.float32)
        gradient = tl.exp(x - whole) - tl.where(at == place, 1.0, 0.0)
        tl.store(start + at, tl.where(counted, gradient, 0.0), mask=at < VOCABULARY)


@triton.jit
def _rows(  # type: ignore[no-untyped-def]
    scores, targets, losses, rows, stride,
    VOCABULARY: tl.constexpr, IGNORE_INDEX: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    for turn in range(TURNS):
        row = (tl.program_id(0) + turn * tl.num_programs(0)).to(tl.int64)
        if row < rows:
            start = scores + row * stride
            target = tl.load(targets + row)
            whole = _log_sum_exp(start, VOCABULARY, BLOCK, STAGES)
            counted = target != IGNORE_INDEX
            picked = tl.load(start + target, mask=counted, other=0.0).to(tl.float32)
            tl.store(losses + row, tl.where(counted, whole - picked, 0.0))
            tl.debug_barrier()  # the target's score is read before it is overwritten
            _to_gradient(start, whole, target, counted, VOCABULARY, BLOCK, STAGES)


@triton.jit
def _sums(  # type: ignore[no-untyped-def]
    scores, targets, totals, picked, rows, stride, own,
    VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    for turn in range(TURNS):
        row = (tl.program_id(0) + turn * tl.num_programs(0)).to(tl.int64)
        if row < rows:
            start = scores + row * stride
            place = tl.load(targets + row) - own
            mine = (place >= 0) & (place < VOCABULARY)
            tl.store(totals + row, _log_sum_exp(start, VOCABULARY, BLOCK, STAGES))
            tl.store(picked + row, tl.load(start + place, mask=mine, other=0.0).to(tl.float32))


@triton.jit
def _gradients(  # type: ignore[no-untyped-def]
    scores, targets, totals, rows, stride, own,
    VOCABULARY: tl.constexpr, IGNORE_INDEX: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    for turn in range(TURNS):
        row = (tl.program_id(0) + turn * tl.num_programs(0)).to(tl.int64)
        if row < rows:
            target = tl.load(targets + row)
            start, whole = scores + row * stride, tl.load(totals + row)
            _to_gradient(start, whole, target - own, target != IGNORE_INDEX, VOCABULARY, BLOCK, STAGES)


def cross_entropy_and_grad_fused(scores: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """The cross-entropy of each row [rows, vocabulary], in float32; its gradient overwrites the scores."""
    losses = torch.empty(len(scores), dtype=torch.float32, device=scores.device)
    if len(scores):
        programs, block, turns = _shape_of(scores)
        _rows[(programs,)](
            scores, targets, losses, len(scores), scores.stride(0), scores.shape[1], ignored, block, STAGES, turns,
            num_warps=WARPS,
        )  # fmt: skip
    return losses


def local_sums(scores: Tensor, targets: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Of a part of the vocabulary that begins at `start`: each row's log-sum-exp, and its target's score, which is 0 where that is
    not in this part; in float32."""
    total, picked = torch.empty(2, len(scores), dtype=torch.float32, device=scores.device)
    if len(scores):
        programs, block, turns = _shape_of(scores)
        _sums[(programs,)](
            scores, targets, total, picked, len(scores), scores.stride(0), start, scores.shape[1], block, STAGES, turns,
            num_warps=WARPS,
        )  # fmt: skip
    return total, picked


def local_gradients_(scores: Tensor, targets: Tensor, total: Tensor, start: int, ignored: int) -> None:
    """Overwrite such scores with the gradient of each row's cross-entropy, given the log-sum-exp over the whole vocabulary."""
    if len(scores):
        programs, block, turns = _shape_of(scores)
        _gradients[(programs,)](
            scores, targets, total, len(scores), scores.stride(0), start, scores.shape[1], ignored, block, STAGES, turns,
            num_warps=WARPS,
        )  # fmt: skip


def _shape_of(scores: Tensor) -> tuple[int, int, int]:
    """Programs, the scores that one takes at once, and the rows that it takes in turn."""
    rows, vocabulary = scores.shape
    many = torch.cuda.get_device_properties(scores.device).multi_processor_count if scores.is_cuda else 2
    programs = min(rows, PROGRAMS * many)
    return programs, min(BLOCK, triton.next_power_of_2(vocabulary)), triton.cdiv(rows, programs)
