"""The product of a gate and what it gates, of rows that hold one after the other, in one pass."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def activated(gate, SILU: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """SiLU, or GELU in its tanh form, rounded as an operator of its own would."""
    if SILU:
        return (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    return (gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))).to(dtype).to(tl.float32)


@triton.jit
def _gated(X, OUT, width, SILU: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * N + tl.arange(0, N)
    inside = at < width
    gate = tl.load(X + row * 2 * width + at, mask=inside).to(tl.float32)
    up = tl.load(X + row * 2 * width + width + at, mask=inside).to(tl.float32)
    out = activated(gate, SILU, OUT.dtype.element_ty) * up
    tl.store(OUT + row * width + at, out.to(OUT.dtype.element_ty), mask=inside)


def gated_product(x: Tensor, activation: str) -> Tensor:
    """[rows, 2 x width] to [rows, width]; `activation` is "silu" or "gelu"."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, width)
    if not rows:
        return out
    _gated[rows, triton.cdiv(width, 2048)](x, out, width, SILU=activation == "silu", N=2048, num_warps=8)
    return out
