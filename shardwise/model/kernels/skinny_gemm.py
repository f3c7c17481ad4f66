"""GEMMs of a few rows, which take as long as reading the matrix once: what stands before and after them is done on the way. Before:
the norm of the input, which every program makes anew from the few kilobytes it has. After: adding to the residual stream, or the
product of a gate and what it gates, whose two matrices lie one after the other.

Products are added in float32 without tensor cores, so a program needs no minimum of rows, and reads long lines of the matrix.
"""

from __future__ import annotations

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from shardwise.model.kernels.gated import activated

MOST_ROWS = 1
"""Rows of input for which arithmetic is still hidden behind reading the matrix."""


@triton.jit
def _skinny(  # type: ignore[no-untyped-def]
    X, W, NORM, RESIDUAL, OUT, rows, n, k, x0, out0, eps,
    M: tl.constexpr, HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * N + tl.arange(0, N)
    m, step = tl.arange(0, M), tl.arange(0, K)
    here = m < rows
    dtype = X.dtype.element_ty
    squares = tl.zeros((M, K), tl.float32)
    line = columns.to(tl.int64)[:, None] * k
    sums = tl.zeros((M, N, K), tl.float32)
    gated = tl.zeros((M, N, K), tl.float32)
    for first in range(0, k, K):
        at = first + step
        # All is asked for before any of it is used.
        if EVEN:
            w = tl.load(W + line + at[None, :], eviction_policy="evict_first")
            if GATED:
                up = tl.load(W + line + n.to(tl.int64) * k + at[None, :], eviction_policy="evict_first")
            x = tl.load(X + m[:, None] * x0 + at[None, :], mask=here[:, None], other=0.0)
        else:
            inside = (columns < n)[:, None] & (at < k)[None, :]
            w = tl.load(W + line + at[None, :], mask=inside, other=0.0)
            if GATED:
                up = tl.load(W + line + n.to(tl.int64) * k + at[None, :], mask=inside, other=0.0)
            x = tl.load(X + m[:, None] * x0 + at[None, :], mask=here[:, None] & (at < k)[None, :], other=0.0)
        x = x.to(tl.float32)
        if HAS_NORM:
            squares += x * x
            x *= tl.load(NORM + at, mask=at < k, other=0.0).to(tl.float32)[None, :]
        sums += x[:, None, :] * w.to(tl.float32)[None, :, :]
        if GATED:
            gated += x[:, None, :] * up.to(tl.float32)[None, :, :]
    out, other = tl.sum(sums, 2), tl.sum(gated, 2)
    if HAS_NORM:  # one factor for all of a row, so it may come last
        rms = tl.rsqrt(tl.sum(squares, 1) / k + eps)
        out, other = out * rms[:, None], other * rms[:, None]
    if GATED:
        gate = out.to(dtype).to(tl.float32)
        what = other.to(dtype).to(tl.float32)
        gate = activated(gate, SILU, dtype)
        out = gate * what
    where = m[:, None] * out0 + columns[None, :]
    mask = here[:, None] & (columns < n)[None, :]
    if HAS_RESIDUAL:
        out += tl.load(RESIDUAL + where, mask=mask, other=0.0).to(tl.float32)
    tl.store(OUT + where, out.to(OUT.dtype.element_ty), mask=mask)


def skinny_gemm(
    x: Tensor,
    weight: Tensor,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    gated: str = "",
) -> Tensor:
    """Rows [rows, in] times a matrix [out, in]. `norm` is the weight of an RMSNorm of the input and its epsilon; the result is
    added to `residual`; `gated`, "silu" or "gelu", takes the matrix as a gate followed by what it gates."""
    rows, k = x.shape
    n = weight.shape[0] // (2 if gated else 1)
    out = x.new_empty(rows, n)
    m = triton.next_power_of_2(rows)
    block_n, block_k = (2 if gated else 4), 1024
    _skinny[(triton.cdiv(n, block_n),)](
        x, weight, norm[0] if norm is not None else x, residual if residual is not None else x, out, rows, n, k, x.stride(0),
        out.stride(0), norm[1] if norm is not None else 0.0, M=m, HAS_NORM=norm is not None, HAS_RESIDUAL=residual is not None,
        GATED=bool(gated), SILU=gated == "silu", N=block_n, K=block_k,
        EVEN=n % block_n == 0 and k % block_k == 0, num_warps=4,
    )  # fmt: skip
    return out


def skinny_gemm_reference(
    x: Tensor,
    weight: Tensor,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    gated: str = "",
) -> Tensor:
    """The same in PyTorch's operators."""
    if norm is not None:
        x = F.rms_norm(x, x.shape[-1:], norm[0].to(x.dtype), norm[1])
    out = F.linear(x, weight)
    if gated:
        gate, up = out.chunk(2, dim=-1)
        out = (F.silu(gate) if gated == "silu" else F.gelu(gate, approximate="tanh")) * up
    return out if residual is None else residual + out
