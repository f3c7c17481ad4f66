"""The product of an activated gate and the values it gates, in one pass."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def activated(gate, SILU: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """SiLU, or GELU in its tanh form, rounded as a separate operator would."""
    if SILU:
        return (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    return (gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))).to(dtype).to(tl.float32)


@triton.jit
def _gated(GATE, UP, OUT, gate0, up0, width, SILU: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * N + tl.arange(0, N)
    inside = at < width
    gate = tl.load(GATE + row * gate0 + at, mask=inside).to(tl.float32)
    up = tl.load(UP + row * up0 + at, mask=inside).to(tl.float32)
    out = activated(gate, SILU, OUT.dtype.element_ty) * up
    tl.store(OUT + row * width + at, out.to(OUT.dtype.element_ty), mask=inside)


def gated_product(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """`up` [..., width] times an activation of `gate` [..., width], in one pass; `activation` is "silu" or "gelu"."""
    gates, ups = (x.flatten(0, -2) for x in (gate, up))
    gates, ups = (x if x.stride(-1) == 1 else x.contiguous() for x in (gates, ups))
    rows, width = gates.shape
    out = gates.new_empty(rows, width)
    if rows:
        _gated[rows, triton.cdiv(width, 2048)](
            gates, ups, out, gates.stride(0), ups.stride(0), width, SILU=activation == "silu", N=2048, num_warps=8,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out.view(gate.shape)
