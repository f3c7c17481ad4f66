"""Adds the parts of a sum that ranks have sent, each of 16 bits, in float32: one pass over memory. PyTorch's reduction of eight
long rows moves 1.4 TB/s on an H200."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

AT_ONCE = 2048
"""Elements that a program adds: 16 bytes of each part for each of 256 threads."""


@triton.jit
def _add(PARTS, OUT, numel, RANKS: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    total = tl.zeros((N,), tl.float32)
    part = PARTS + place
    for _ in tl.static_range(RANKS):
        total += tl.load(part, mask=place < numel, other=0.0).to(tl.float32)
        part += numel  # a step at a time: all parts together may have more elements than 32 bits count
    tl.store(OUT + place, total, mask=place < numel)


def sum_parts(parts: Tensor) -> Tensor:
    """The sum over the first of two dimensions, in float32."""
    ranks, numel = parts.shape
    out = torch.empty(numel, dtype=torch.float32, device=parts.device)
    _add[triton.cdiv(numel, AT_ONCE),](parts, out, numel, ranks, AT_ONCE, num_warps=8)
    return out
