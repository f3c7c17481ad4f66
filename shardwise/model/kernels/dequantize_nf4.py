"""Dequantizes a matrix of 4-bit NormalFloat, with scales in 8 bits or in float32, to a dtype that a GEMM takes. `quantized/nf4.py`
has the reference."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.run.sections.adapter import NF4_BLOCK, NF4_SCALES


@triton.jit
def _dequantize(  # type: ignore[no-untyped-def]
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
    _dequantize[(triton.cdiv(n, 64),)](
        codes, absmax, scales if double else absmax, values, tree, out, n,
        absmax.shape[-2], absmax.shape[-1], first, stride, scales.shape[-1],
        DOUBLE=double, SCALES=NF4_SCALES, HALF=NF4_BLOCK // 2, N=64, num_warps=4,
        enable_fp_fusion=False,  # to match the bits of the reference
    )  # fmt: skip
    return out
