"""GEMMs of a few rows with 8-bit or 4-bit matrices, which take as long as reading the packed matrix once. As in `skinny.py`, the
norm before and the gate or the residual sum after are fused, and products are added in float32 without tensor cores.

A program multiplies four rows of the matrix with one row of input. Its threads lie along the columns, so that each has its inputs
in registers for all rows of the matrix, and nothing is exchanged before the sums. Four-bit weights become float32 without a
conversion: shifted to bits 16 to 19, below the exponent of 128, they are the number 128 + q (as Kim et al. 2022 do it in 16 bits).
At bits 12 to 15 they are 2048 + q, so that one shift serves two weights. The zero point and these offsets are subtracted once for
eight weights. So a weight costs a shift or less, a mask and a multiply-add, and the computation hides behind the reading.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from shardwise.model.kernels.gated import activated


@dataclass(frozen=True)
class Shape:
    """Warps of a program, each of whose threads reads 16 bytes of a row at a time; and up to how many steps along a row are
    unrolled, so that their loads are issued together."""

    warps: int
    unrolled: int


SHAPES = {"int4": Shape(1, 4), "int8": Shape(2, 2), "fp8": Shape(2, 2)}
"""Measured with `benchmarks/gpu/weight_only.py` on an H200, before the kernel for one row was rewritten."""
MOST_ROWS = 1
"""Rows of input for which the computation is still hidden behind reading the matrix."""


@triton.jit
def _nibble(words, n: tl.constexpr):  # type: ignore[no-untyped-def]
    """q from bits 4n to 4n+3, plus 2048 or 128."""
    if n == 1 or n == 3 or n == 6:
        moved = words << (12 - 4 * n) if n < 4 else words >> (4 * n - 12)
        return ((moved & 0x0000F000) | 0x45000000).to(tl.float32, bitcast=True)
    else:
        moved = words << (16 - 4 * n) if n < 4 else words >> (4 * n - 16)
        return ((moved & 0x000F0000) | 0x43000000).to(tl.float32, bitcast=True)


@triton.jit
def _load(P, at, here, EVEN: tl.constexpr, ONCE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load values, with zeros beyond the end."""
    if EVEN:
        if ONCE:
            return tl.load(P + at, eviction_policy="evict_first")
        else:
            return tl.load(P + at)
    else:
        return tl.load(P + at, mask=here, other=0.0)


@triton.jit
def _input(X, NORM, at, here, squares, HAS_NORM: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Some of the inputs, times the norm's weights; and the accumulated squares of the inputs themselves."""
    x = _load(X, at, here, EVEN, False).to(tl.float32)
    if HAS_NORM:
        squares += x * x
        x *= _load(NORM, at, here, EVEN, False).to(tl.float32)
    return x, squares


@triton.jit
def _row_int4(  # type: ignore[no-untyped-def]
    total, words, scale, zero, x0, x1, x2, x3, x4, x5, x6, x7, sum_x, base
):
    """Add the products of one row's words to its sums."""
    part = x0 * _nibble(words, 0) - base
    part += x1 * _nibble(words, 1)
    part += x2 * _nibble(words, 2)
    part += x3 * _nibble(words, 3)
    part += x4 * _nibble(words, 4)
    part += x5 * _nibble(words, 5)
    part += x6 * _nibble(words, 6)
    part += x7 * _nibble(words, 7)
    return total + (part - zero.to(tl.float32) * sum_x) * scale.to(tl.float32)


@triton.jit
def _zeros(ZERO, at, here, EVEN: tl.constexpr, HAS_ZERO: tl.constexpr):  # type: ignore[no-untyped-def]
    if HAS_ZERO:
        return _load(ZERO, at, here, EVEN, False)
    else:
        return tl.full(at.shape, 8, tl.int32)


@triton.jit
def _step_int4(  # type: ignore[no-untyped-def]
    t0, t1, t2, t3, squares, X, W, SCALE, ZERO, NORM, r0, r1, r2, r3, n_groups, first,
    GROUP: tl.constexpr, G: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_NORM: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Some columns of four rows. All loads are issued before any is used, the weights first."""
    WORDS: tl.constexpr = GROUP // 8
    group = first + tl.arange(0, G)[:, None]
    j = tl.arange(0, WORDS)[None, :]
    here = group < n_groups
    g0, g1, g2, g3 = r0 * n_groups + group, r1 * n_groups + group, r2 * n_groups + group, r3 * n_groups + group
    w0 = _load(W, g0 * WORDS + j, here, EVEN, True)
    w1 = _load(W, g1 * WORDS + j, here, EVEN, True)
    w2 = _load(W, g2 * WORDS + j, here, EVEN, True)
    w3 = _load(W, g3 * WORDS + j, here, EVEN, True)
    s0, s1 = _load(SCALE, g0, here, EVEN, False), _load(SCALE, g1, here, EVEN, False)
    s2, s3 = _load(SCALE, g2, here, EVEN, False), _load(SCALE, g3, here, EVEN, False)
    z0, z1 = _zeros(ZERO, g0, here, EVEN, HAS_ZERO), _zeros(ZERO, g1, here, EVEN, HAS_ZERO)
    z2, z3 = _zeros(ZERO, g2, here, EVEN, HAS_ZERO), _zeros(ZERO, g3, here, EVEN, HAS_ZERO)
    at = group * GROUP + j
    x0, squares = _input(X, NORM, at, here, squares, HAS_NORM, EVEN)
    x1, squares = _input(X, NORM, at + WORDS, here, squares, HAS_NORM, EVEN)
    x2, squares = _input(X, NORM, at + 2 * WORDS, here, squares, HAS_NORM, EVEN)
    x3, squares = _input(X, NORM, at + 3 * WORDS, here, squares, HAS_NORM, EVEN)
    x4, squares = _input(X, NORM, at + 4 * WORDS, here, squares, HAS_NORM, EVEN)
    x5, squares = _input(X, NORM, at + 5 * WORDS, here, squares, HAS_NORM, EVEN)
    x6, squares = _input(X, NORM, at + 6 * WORDS, here, squares, HAS_NORM, EVEN)
    x7, squares = _input(X, NORM, at + 7 * WORDS, here, squares, HAS_NORM, EVEN)
    high, low = x1 + x3 + x6, x0 + x2 + x4 + x5 + x7
    sum_x, base = high + low, 2048.0 * high + 128.0 * low
    t0 = _row_int4(t0, w0, s0, z0, x0, x1, x2, x3, x4, x5, x6, x7, sum_x, base)
    t1 = _row_int4(t1, w1, s1, z1, x0, x1, x2, x3, x4, x5, x6, x7, sum_x, base)
    t2 = _row_int4(t2, w2, s2, z2, x0, x1, x2, x3, x4, x5, x6, x7, sum_x, base)
    t3 = _row_int4(t3, w3, s3, z3, x0, x1, x2, x3, x4, x5, x6, x7, sum_x, base)
    return t0, t1, t2, t3, squares


@triton.jit
def _step_8bit(  # type: ignore[no-untyped-def]
    t0, t1, t2, t3, squares, X, W, NORM, r0, r1, r2, r3, k, first,
    T: tl.constexpr, HAS_NORM: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Some columns of four rows."""
    at = first + tl.arange(0, T)
    here = at < k
    w0, w1 = _load(W, r0 * k + at, here, EVEN, True), _load(W, r1 * k + at, here, EVEN, True)
    w2, w3 = _load(W, r2 * k + at, here, EVEN, True), _load(W, r3 * k + at, here, EVEN, True)
    x, squares = _input(X, NORM, at, here, squares, HAS_NORM, EVEN)
    t0 += x * w0.to(tl.float32)
    t1 += x * w1.to(tl.float32)
    t2 += x * w2.to(tl.float32)
    t3 += x * w3.to(tl.float32)
    return t0, t1, t2, t3, squares


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    total, other, factor, SCALE, RESIDUAL, OUT, row, n, HAS_SCALE: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Write one element of the result, from the sums of its row and, if gated, from those of the up row."""
    dtype = OUT.dtype.element_ty
    made = tl.sum(total) * factor
    here = row < n
    if HAS_SCALE:
        made *= tl.load(SCALE + row, mask=here, other=0.0)
    if GATED:
        what = tl.sum(other) * factor
        if HAS_SCALE:
            what *= tl.load(SCALE + n + row, mask=here, other=0.0)
        made = activated(made.to(dtype).to(tl.float32), SILU, dtype) * what.to(dtype).to(tl.float32)
    if HAS_RESIDUAL:
        made += tl.load(RESIDUAL + row, mask=here, other=0.0).to(tl.float32)
    tl.store(OUT + row, made.to(dtype), mask=here)


@triton.jit
def _skinny(  # type: ignore[no-untyped-def]
    X, W, SCALE, ZERO, NORM, RESIDUAL, OUT, n, k, x0, out0, eps,
    INT4: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr, SILU: tl.constexpr, T: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """`T`: words, or bytes, of a row that are read at a time; `STEPS`: how many times, if the loop is to be unrolled."""
    m = tl.program_id(0).to(tl.int64)
    X += m * x0
    OUT += m * out0
    RESIDUAL += m * out0
    # Four rows of the matrix: one after the other, or two gate rows and their two up rows.
    first_row = tl.program_id(1) * (2 if GATED else 4)
    last = n - 1
    r0, r1 = tl.minimum(first_row, last).to(tl.int64), tl.minimum(first_row + 1, last).to(tl.int64)
    if GATED:
        r2, r3 = r0 + n, r1 + n
    else:
        r2, r3 = tl.minimum(first_row + 2, last).to(tl.int64), tl.minimum(first_row + 3, last).to(tl.int64)
    if INT4:
        G: tl.constexpr = T // (GROUP // 8)
        n_groups = k // GROUP
        t0 = tl.zeros((G, GROUP // 8), tl.float32)
        t1, t2, t3, squares = t0, t0, t0, t0
        if STEPS:
            for step in tl.static_range(STEPS):
                t0, t1, t2, t3, squares = _step_int4(
                    t0, t1, t2, t3, squares, X, W, SCALE, ZERO, NORM, r0, r1, r2, r3, n_groups, step * G,
                    GROUP, G, HAS_ZERO, HAS_NORM, EVEN,
                )  # fmt: skip
        else:
            for first in range(0, n_groups, G):
                t0, t1, t2, t3, squares = _step_int4(
                    t0, t1, t2, t3, squares, X, W, SCALE, ZERO, NORM, r0, r1, r2, r3, n_groups, first,
                    GROUP, G, HAS_ZERO, HAS_NORM, EVEN,
                )  # fmt: skip
    else:
        t0 = tl.zeros((T,), tl.float32)
        t1, t2, t3, squares = t0, t0, t0, t0
        if STEPS:
            for step in tl.static_range(STEPS):
                t0, t1, t2, t3, squares = _step_8bit(
                    t0, t1, t2, t3, squares, X, W, NORM, r0, r1, r2, r3, k, step * T, T, HAS_NORM, EVEN
                )
        else:
            for first in range(0, k, T):
                t0, t1, t2, t3, squares = _step_8bit(
                    t0, t1, t2, t3, squares, X, W, NORM, r0, r1, r2, r3, k, first, T, HAS_NORM, EVEN
                )
    factor = 1.0
    if HAS_NORM:  # one factor for the whole row, so it may be applied last
        factor = tl.rsqrt(tl.sum(squares) / k + eps)
    SCALED: tl.constexpr = not INT4
    if GATED:
        _store(t0, t2, factor, SCALE, RESIDUAL, OUT, first_row, n, SCALED, HAS_RESIDUAL, GATED, SILU)
        _store(t1, t3, factor, SCALE, RESIDUAL, OUT, first_row + 1, n, SCALED, HAS_RESIDUAL, GATED, SILU)
    else:
        _store(t0, t0, factor, SCALE, RESIDUAL, OUT, first_row, n, SCALED, HAS_RESIDUAL, GATED, SILU)
        _store(t1, t1, factor, SCALE, RESIDUAL, OUT, first_row + 1, n, SCALED, HAS_RESIDUAL, GATED, SILU)
        _store(t2, t2, factor, SCALE, RESIDUAL, OUT, first_row + 2, n, SCALED, HAS_RESIDUAL, GATED, SILU)
        _store(t3, t3, factor, SCALE, RESIDUAL, OUT, first_row + 3, n, SCALED, HAS_RESIDUAL, GATED, SILU)


def weight_only_gemm(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    kind: str,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    gated: str = "",
    shape: Shape | None = None,
) -> Tensor:
    """Rows [rows, in] times a packed matrix [out, in], with scales as `QuantizedMatrix` has them. `norm` is the weight of an
    RMSNorm of the input and its epsilon; the result is added to `residual`; with `gated`, "silu" or "gelu", the matrix is a gate
    matrix followed by an up matrix."""
    rows, k = x.shape
    n = packed.shape[0] // (2 if gated else 1)
    out = x.new_empty(rows, n)
    shape = shape or SHAPES[kind]
    weight, eps = norm if norm is not None else (x, 0.0)
    group = k // scale.shape[1] if kind == "int4" else 0
    length, whole = shape.warps * 32 * (4 if group else 16), k // 8 if group else k
    steps = triton.cdiv(whole, length)
    _skinny[rows, triton.cdiv(n, 2 if gated else 4)](
        x, packed, scale, packed if zero is None else zero, weight, out if residual is None else residual, out, n, k, x.stride(0),
        out.stride(0), eps, INT4=kind == "int4", GROUP=group, HAS_ZERO=zero is not None, HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual is not None, GATED=bool(gated), SILU=gated == "silu", T=length,
        STEPS=steps if steps <= shape.unrolled else 0, EVEN=whole % length == 0, num_warps=shape.warps,
    )  # fmt: skip
    return out
