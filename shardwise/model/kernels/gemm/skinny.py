"""GEMMs of one row, which take as long as reading the matrix once, fused with the operations around them. Before: the norm of the
input, which every program recomputes from the few kilobytes of input. After: adding to the residual stream, or the gated product,
whose gate and up matrices are concatenated.

Products are added in float32 without tensor cores, which need sixteen rows. From two rows on cuBLAS is as fast.
"""

from __future__ import annotations

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from shardwise.model.kernels.gated import activated

MOST_ROWS = 1
"""Rows of input for which the computation is still hidden behind reading the matrix."""
BLOCKS = {"short": (2, 2048, 4), "long": (2, 1024, 2)}
"""Rows and columns of the matrix that a program takes at a time, and its warps, for short and long rows: the fastest of some twenty
on an H200, for matrices of 16 MB to 1 GB."""


@triton.jit
def _skinny(  # type: ignore[no-untyped-def]
    X, W, NORM, RESIDUAL, OUT, n, k, eps,
    HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    columns, step = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, K)
    dtype = X.dtype.element_ty
    squares = tl.zeros((K,), tl.float32)
    line = columns.to(tl.int64)[:, None] * k
    sums = tl.zeros((N, K), tl.float32)
    gated = tl.zeros((N, K), tl.float32)
    for number in tl.static_range(STEPS):  # unrolled, so that many loads are issued before any is used
        at = number * K + step
        if EVEN:
            w = tl.load(W + line + at[None, :], eviction_policy="evict_first")
            if GATED:
                up = tl.load(W + line + n.to(tl.int64) * k + at[None, :], eviction_policy="evict_first")
            x = tl.load(X + at).to(tl.float32)
        else:
            inside = (columns < n)[:, None] & (at < k)[None, :]
            w = tl.load(W + line + at[None, :], mask=inside, other=0.0)
            if GATED:
                up = tl.load(W + line + n.to(tl.int64) * k + at[None, :], mask=inside, other=0.0)
            x = tl.load(X + at, mask=at < k, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += x * x
            x *= tl.load(NORM + at, mask=at < k, other=0.0).to(tl.float32)
        sums += x[None, :] * w.to(tl.float32)
        if GATED:
            gated += x[None, :] * up.to(tl.float32)
    out, other = tl.sum(sums, 1), tl.sum(gated, 1)
    if HAS_NORM:  # one factor for the whole row, so it may be applied last
        rms = tl.rsqrt(tl.sum(squares, 0) / k + eps)
        out, other = out * rms, other * rms
    if GATED:
        gate = activated(out.to(dtype).to(tl.float32), SILU, dtype)
        out = gate * other.to(dtype).to(tl.float32)
    if HAS_RESIDUAL:
        out += tl.load(RESIDUAL + columns, mask=columns < n, other=0.0).to(tl.float32)
    tl.store(OUT + columns, out.to(OUT.dtype.element_ty), mask=columns < n)


def skinny_gemm(
    x: Tensor, weight: Tensor, norm: tuple[Tensor, float] | None = None, residual: Tensor | None = None, gated: str = ""
) -> Tensor:
    """A row [1, in] times a matrix [out, in]. `norm` is the weight of an RMSNorm of the input and its epsilon; the result is added
    to `residual`; with `gated`, "silu" or "gelu", the matrix is a gate matrix followed by an up matrix."""
    k = x.shape[1]
    n = weight.shape[0] // (2 if gated else 1)
    out = x.new_empty(1, n)
    block_n, block_k, warps = BLOCKS["short" if k <= 4096 else "long"]
    _skinny[(triton.cdiv(n, block_n),)](
        x, weight, norm[0] if norm is not None else x, residual if residual is not None else x, out, n, k,
        norm[1] if norm is not None else 0.0, HAS_NORM=norm is not None, HAS_RESIDUAL=residual is not None,
        GATED=bool(gated), SILU=gated == "silu", N=block_n, K=block_k, STEPS=triton.cdiv(k, block_k),
        EVEN=n % block_n == 0 and k % block_k == 0, num_warps=warps,
    )  # fmt: skip
    return out


def skinny_gemm_reference(
    x: Tensor, weight: Tensor, norm: tuple[Tensor, float] | None = None, residual: Tensor | None = None, gated: str = ""
) -> Tensor:
    """The same in PyTorch's operators."""
    if norm is not None:
        x = F.rms_norm(x, x.shape[-1:], norm[0].to(x.dtype), norm[1])
    out = F.linear(x, weight)
    if gated:
        gate, up = out.chunk(2, dim=-1)
        out = (F.silu(gate) if gated == "silu" else F.gelu(gate, approximate="tanh")) * up
    return out if residual is None else residual + out
