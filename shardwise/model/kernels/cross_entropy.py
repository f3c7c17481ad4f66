"""Scores to cross-entropy and its gradient in place, a row of the vocabulary a program: read once for the sum of exponentials, and
once more for the gradient.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
WARPS = 4


@triton.jit
def _row(scores, targets, losses, stride, VOCABULARY: tl.constexpr, IGNORED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    start = scores + row * stride
    target = tl.load(targets + row)
    highest = float("-inf")
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, VOCABULARY, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(start + at, mask=at < VOCABULARY, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(x, 0))
        # A sum for each place of the block: only the highest score makes the threads wait for each other.
        total = total * tl.exp(highest - higher) + tl.exp(x - higher)
        highest = higher
    counted = target != IGNORED
    picked = tl.load(start + target, mask=counted, other=0.0).to(tl.float32)
    whole = highest + tl.log(tl.sum(total, 0))
    tl.store(losses + row, tl.where(counted, whole - picked, 0.0))
    for first in range(0, VOCABULARY, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(start + at, mask=at < VOCABULARY, other=float("-inf")).to(tl.float32)
        gradient = tl.exp(x - whole) - tl.where(at == target, 1.0, 0.0)
        tl.store(start + at, tl.where(counted, gradient, 0.0), mask=at < VOCABULARY)


def score_gradients_fused(scores: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """The cross-entropy of each row [rows, vocabulary], in float32; its gradient takes the place of the scores."""
    rows, vocabulary = scores.shape
    losses = torch.empty(rows, dtype=torch.float32, device=scores.device)
    if rows:
        block = min(BLOCK, triton.next_power_of_2(vocabulary))
        _row[(rows,)](scores, targets, losses, scores.stride(0), vocabulary, ignored, block, num_warps=WARPS)
    return losses
