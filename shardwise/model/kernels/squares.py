"""The sum of the squares of many tensors, each read once as fast as memory gives it; a tensor is a launch.

Every program leaves one partial sum, and those are added in order: the same bits each time, which atomic additions would not give.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Numbers a program looks at together, and how often it does."""
TIMES = 8
WARPS = 8


@triton.jit
def _squares(x, out, size, BLOCK: tl.constexpr, TIMES: tl.constexpr):  # type: ignore[no-untyped-def]
    start = tl.program_id(0).to(tl.int64) * (BLOCK * TIMES)
    total = tl.zeros((BLOCK,), tl.float32)
    for n in range(TIMES):
        at = start + n * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
        total += value * value
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


def squares_fused(tensors: Sequence[Tensor]) -> Tensor:
    """The sum over all numbers of dense tensors, in float64."""
    programs = [triton.cdiv(x.numel(), BLOCK * TIMES) for x in tensors]
    partial = torch.empty(sum(programs), dtype=torch.float32, device=tensors[0].device)
    for x, out, count in zip(tensors, partial.split(programs), programs, strict=True):
        if count:
            _squares[(count,)](x, out, x.numel(), BLOCK, TIMES, num_warps=WARPS)
    return partial.sum(dtype=torch.float64)
