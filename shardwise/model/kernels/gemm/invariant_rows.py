"""Operations on one row at a time on a GPU, by one program in a fixed order, so that the bits depend on that row alone: norms, and
the log-sum-exp of a row. PyTorch's kernels may split a row depending on the number of rows, or on its address in memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Logits that a program takes at once."""


@triton.jit(do_not_specialize_on_alignment=["WEIGHT", "BIAS"])  # sharding must not change the layout of loads either
def _norm(  # type: ignore[no-untyped-def]
    X, WEIGHT, BIAS, OUT, width, eps, CENTERED: tl.constexpr, N: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, N)
    inside = at < width
    x = tl.load(X + row * width + at, mask=inside, other=0.0).to(tl.float32)
    if CENTERED:
        x = tl.where(inside, x - tl.sum(x, 0) / width, 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    x = x * tl.load(WEIGHT + at, mask=inside, other=0.0).to(tl.float32)
    if CENTERED:
        x = x + tl.load(BIAS + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + row * width + at, x.to(OUT.dtype.element_ty), mask=inside)


def invariant_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of rows [..., width], or LayerNorm where there is a bias."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    if rows.data_ptr() % 16:  # with narrower loads the compiler would add up in another order
        rows = rows.clone()
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    if len(rows):
        wide = triton.next_power_of_2(x.shape[-1])
        _norm[(len(rows),)](
            rows, weight, rows if bias is None else bias, out, x.shape[-1], eps, CENTERED=bias is not None, N=wide,
            num_warps=max(1, min(8, wide // 512)), enable_fp_fusion=False,
        )  # fmt: skip
    return out.view(x.shape)


@triton.jit
def _logsumexp(LOGITS, OUT, row0, vocab, N: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    highest = tl.full((N,), float("-inf"), tl.float32)
    for first in range(0, vocab, N):
        at = first + tl.arange(0, N)
        x = tl.load(LOGITS + row * row0 + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        highest = tl.maximum(highest, x)
    top = tl.max(highest, 0)
    total = tl.zeros((N,), tl.float32)
    for first in range(0, vocab, N):
        at = first + tl.arange(0, N)
        x = tl.load(LOGITS + row * row0 + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        total += tl.exp(x - top)
    tl.store(OUT + row, top + tl.log(tl.sum(total, 0)))


def invariant_logsumexp(logits: Tensor) -> Tensor:
    """The log-sum-exp of rows [rows, vocabulary], in float32."""
    out = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        _logsumexp[(len(logits),)](
            logits, out, logits.stride(0), logits.shape[1], N=BLOCK, num_warps=8, enable_fp_fusion=False
        )
    return out
