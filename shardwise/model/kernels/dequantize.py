"""Dequantizes packed matrices to a dtype that a GEMM takes: of int4, for GEMMs of so many rows that dequantizing once is the
smaller cost; and of 4-bit NormalFloat, with scales in 8 bits or in float32 (`quantized/nf4.py` has the reference)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.run.sections.adapter import NF4_BLOCK, NF4_SCALES


@triton.jit
def _dequantize_int4(  # type: ignore[no-untyped-def]
    W, SCALE, ZERO, OUT, n, groups, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    WORDS: tl.constexpr = GROUP // 8
    at = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)  # groups of all rows
    j = tl.arange(0, WORDS)
    inside = at < n * groups
    words = tl.load(W + at[:, None] * WORDS + j[None, :], mask=inside[:, None], other=0)
    scale = tl.load(SCALE + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_ZERO:
        zero = tl.load(ZERO + at, mask=inside, other=0).to(tl.int32)[:, None]
    else:
        zero = 8
    for i in tl.static_range(8):
        values = (((words >> (4 * i)) & 15) - zero).to(tl.float32) * scale[:, None]
        where = at[:, None] * GROUP + i * WORDS + j[None, :]
        tl.store(OUT + where, values.to(OUT.dtype.element_ty), mask=inside[:, None])


def dequantize_int4(packed: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The dequantized matrix, or stack of matrices."""
    groups = scale.shape[-1]
    words = packed.shape[-1] // groups
    n = scale.numel() // groups
    out = torch.empty(*packed.shape[:-1], packed.shape[-1] * 8, dtype=dtype, device=packed.device)
    block = max(1, 2048 // words)
    _dequantize_int4[(triton.cdiv(n * groups, block),)](
        packed, scale, packed if zero is None else zero, out, n, groups, GROUP=words * 8, HAS_ZERO=zero is not None, N=block,
        num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _dequantize_nf4(  # type: ignore[no-untyped-def]
    CODES, ABSMAX, SCALE, VALUES, TREE, OUT, n, rows, blocks, first, stride, count,
    DOUBLE: tl.constexpr, SCALES: tl.constexpr, HALF: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)  # blocks of this slice
    inside = at < n
    if DOUBLE:
        row = at // blocks
        number = first + (row % rows) * stride + at % blocks
        code = tl.load(ABSMAX + at, mask=inside, other=0).to(tl.int32)
        of_matrix = SCALE + (row // rows) * count  # `count` scales for each matrix, the last of them a mean
        scale = tl.load(of_matrix + number // SCALES, mask=inside, other=0.0)
        mean = tl.load(of_matrix + count - 1, mask=inside, other=0.0)
        absmax = tl.load(TREE + code, mask=inside, other=0.0) * scale + mean
    else:
        absmax = tl.load(ABSMAX + at, mask=inside, other=0.0)
    byte = tl.arange(0, HALF)
    codes = tl.load(CODES + at[:, None] * HALF + byte[None, :], mask=inside[:, None], other=0).to(tl.int32)
    high = tl.load(VALUES + (codes >> 4)) * absmax[:, None]
    low = tl.load(VALUES + (codes & 15)) * absmax[:, None]
    both = tl.interleave(high, low).to(OUT.dtype.element_ty)
    place = tl.arange(0, 2 * HALF)
    tl.store(OUT + at[:, None] * (2 * HALF) + place[None, :], both, mask=inside[:, None])


def dequantize_nf4(
    codes: Tensor, absmax: Tensor, scales: Tensor, first: int, stride: int, dtype: torch.dtype, values: Tensor, tree: Tensor
) -> Tensor:  # fmt: skip
    """The matrix, or the stack of them, that a slice of codes stands for; `values` is the table of the codes, `tree` the table of
    the second level."""
    out = torch.empty(*codes.shape[:-1], 2 * codes.shape[-1], dtype=dtype, device=codes.device)
    n, double = absmax.numel(), scales.numel() > 0
    _dequantize_nf4[(triton.cdiv(n, 64),)](
        codes, absmax, scales if double else absmax, values, tree, out, n,
        absmax.shape[-2], absmax.shape[-1], first, stride, scales.shape[-1],
        DOUBLE=double, SCALES=NF4_SCALES, HALF=NF4_BLOCK // 2, N=64, num_warps=4,
        enable_fp_fusion=False,  # to match the bits of the reference
    )  # fmt: skip
    return out
