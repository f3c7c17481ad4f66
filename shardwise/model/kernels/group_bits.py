"""Packs values in 8, 4, 2 or 1 bits by group, and unpacks them: each way one pass over memory instead of a chain of operations.

The bits are those of `parallel/activations/quantized.py`, which defines the computation: divisions round to nearest, and no
product is fused with a sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

AT_ONCE = 32
"""Groups that a program takes."""


@triton.jit
def _magnitude_up(x):  # type: ignore[no-untyped-def]
    return ((x.to(tl.uint32, bitcast=True) + 0xFFFF) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _magnitude_down(x):  # type: ignore[no-untyped-def]
    return (x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _pack(  # type: ignore[no-untyped-def]
    X, CODES, RANGES, numel, groups, BITS: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    EACH: tl.constexpr = 8 // BITS
    BYTES: tl.constexpr = GROUP // EACH
    group = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    byte, part = tl.arange(0, BYTES), tl.arange(0, EACH)
    place = group[:, None, None] * GROUP + byte[None, :, None] * EACH + part[None, None, :]
    x = tl.load(X + place, mask=place < numel, other=0.0).to(tl.float32)
    least, most = tl.min(tl.min(x, axis=2), axis=1), tl.max(tl.max(x, axis=2), axis=1)
    strange = tl.max(tl.max((x != x).to(tl.int32), axis=2), axis=1) > 0
    least = tl.where(strange, float("nan"), least)  # `tl.min` alone would ignore NaN
    least = tl.where(least < 0, _magnitude_up(least), _magnitude_down(least))
    step = _magnitude_up(tl.div_rn(most - least, tl.full((N,), 2**BITS - 1, tl.float32)))
    mixed = x.to(tl.uint32, bitcast=True) * 0x9E3779B1 + place.to(tl.uint32) * 0x85EBCA6B
    mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6D
    mixed = (mixed ^ (mixed >> 12)) * 0x297A2D39
    mixed = mixed ^ (mixed >> 15)
    noise = (mixed >> 8).to(tl.float32) * (2.0**-24)
    by = tl.broadcast_to(tl.where(step > 0, step, 1.0)[:, None, None], (N, BYTES, EACH))
    scaled = tl.div_rn(x - least[:, None, None], by) + noise
    code = tl.minimum(tl.maximum(tl.floor(scaled), 0.0), 2.0**BITS - 1.0).to(tl.int32)
    joined = tl.sum(code << (part * BITS)[None, None, :], axis=2)
    there = group < groups
    tl.store(CODES + group[:, None] * BYTES + byte[None, :], joined.to(tl.uint8), mask=there[:, None])
    tl.store(RANGES + group * 2, least.to(tl.bfloat16), mask=there)
    tl.store(RANGES + group * 2 + 1, step.to(tl.bfloat16), mask=there)


@triton.jit
def _unpack(  # type: ignore[no-untyped-def]
    CODES, RANGES, OUT, numel, groups, BITS: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    EACH: tl.constexpr = 8 // BITS
    group = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    at = tl.arange(0, GROUP)
    place = group[:, None] * GROUP + at[None, :]
    there = group < groups
    joined = tl.load(CODES + place // EACH, mask=there[:, None], other=0).to(tl.int32)
    code = (joined >> (at % EACH * BITS)[None, :]) & (2**BITS - 1)
    least = tl.load(RANGES + group * 2, mask=there, other=0.0).to(tl.float32)
    step = tl.load(RANGES + group * 2 + 1, mask=there, other=0.0).to(tl.float32)
    values = code.to(tl.float32) * step[:, None] + least[:, None]
    tl.store(OUT + place, values.to(OUT.dtype.element_ty), mask=place < numel)


def pack_groups(x: Tensor, codes: Tensor, ranges: Tensor, bits: int, group: int) -> None:
    """Write the codes of a flat tensor, and the minimum and step of each group."""
    grid = (triton.cdiv(len(ranges), AT_ONCE),)
    _pack[grid](
        x, codes, ranges, x.numel(), len(ranges), BITS=bits, GROUP=group, N=AT_ONCE, num_warps=4, enable_fp_fusion=False
    )


def unpack_groups(codes: Tensor, ranges: Tensor, bits: int, group: int, numel: int, dtype: torch.dtype) -> Tensor:
    """The dequantized flat tensor."""
    out = torch.empty(numel, dtype=dtype, device=codes.device)
    grid = (triton.cdiv(len(ranges), AT_ONCE),)
    _unpack[grid](
        codes, ranges, out, numel, len(ranges), BITS=bits, GROUP=group, N=AT_ONCE, num_warps=4, enable_fp_fusion=False
    )
    return out
