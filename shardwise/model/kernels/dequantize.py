"""Dequantizes a packed int4 matrix to 16 bits, for GEMMs of so many rows that dequantizing it once is the smaller cost."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _dequantize(  # type: ignore[no-untyped-def]
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
    _dequantize[(triton.cdiv(n * groups, block),)](
        packed, scale, packed if zero is None else zero, out, n, groups, GROUP=words * 8, HAS_ZERO=zero is not None, N=block,
        num_warps=4,
    )  # fmt: skip
    return out
