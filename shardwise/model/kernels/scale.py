"""Multiplies a tensor of 16 bits by a scalar on the device, in place and in float32. PyTorch rounds such a scalar to 16 bits first:
one over the tokens of a batch comes out up to 0.4% off."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

AT_ONCE = 2048
"""Elements that a program multiplies."""


@triton.jit
def _multiply(X, FACTOR, numel, N: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    x = tl.load(X + place, mask=place < numel, other=0.0).to(tl.float32)
    tl.store(X + place, (x * tl.load(FACTOR).to(tl.float32)).to(X.dtype.element_ty), mask=place < numel)


def scale_(x: Tensor, factor: Tensor) -> None:
    """Multiply a contiguous tensor by a scalar tensor."""
    _multiply[triton.cdiv(x.numel(), AT_ONCE),](x, factor, x.numel(), AT_ONCE, num_warps=8)
