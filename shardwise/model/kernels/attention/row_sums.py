"""The sum over each row of the products of two tensors, one pass over both: plain PyTorch makes float32 copies of them first."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 32
"""Rows of a program."""


@triton.jit
def _row_sums(  # type: ignore[no-untyped-def]
    X, Y, OUT, x0, x1, x2, y0, y1, y2, heads, rows, width, M: tl.constexpr, N: tl.constexpr
):
    at, column = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, N)
    outer = tl.program_id(1).to(tl.int64)
    batch, head = outer // heads, outer % heads
    inside = (at < rows)[:, None] & (column < width)[None, :]
    row = at.to(tl.int64)[:, None]
    x = tl.load(X + batch * x0 + head * x1 + row * x2 + column[None, :], mask=inside, other=0.0).to(tl.float32)
    y = tl.load(Y + batch * y0 + head * y1 + row * y2 + column[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + outer * rows + at, tl.sum(x * y, 1), mask=at < rows)


def row_sums_of_products(x: Tensor, y: Tensor) -> Tensor:
    """Of two tensors [batch, heads, rows, width], in float32 [batch, heads, rows]."""
    x, y = (each if each.stride(-1) == 1 else each.contiguous() for each in (x, y))
    batch, heads, rows, width = x.shape
    out = torch.empty(batch, heads, rows, dtype=torch.float32, device=x.device)
    _row_sums[(triton.cdiv(rows, ROWS), batch * heads)](
        x, y, out, *x.stride()[:3], *y.stride()[:3], heads, rows, width, M=ROWS, N=triton.next_power_of_2(width)
    )
    return out
