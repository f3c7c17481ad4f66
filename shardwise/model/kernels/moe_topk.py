"""The k best of some scores, a few tokens a program: it takes the highest remaining score k times. PyTorch's top-k sorts by
digits, which pays for thousands of scores and not for a router's few.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CELLS = 2048
"""Scores that a program holds at once."""


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
        block = max(1, CELLS // width)
        _best[(triton.cdiv(tokens, block),)](scores, chosen, tokens, experts, k, width, block)
    return chosen
