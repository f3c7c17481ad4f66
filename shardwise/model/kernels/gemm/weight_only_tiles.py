"""GEMMs of some rows with 8-bit or 4-bit matrices, on tensor cores: tiles of the matrix are converted to 16 bits in registers,
where they are the left operand, and multiplied with the rows of input. Four-bit weights are placed below the exponent of 128,
where they are 128 + q without a conversion; this offset and the zero point are subtracted from the sums of a group, which are then
scaled. fp8 on both sides needs no conversion at all. Few rows give few tiles, so several programs split the columns of one; the
last to arrive adds up their partial sums, always in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.model.kernels.gated import activated


@dataclass(frozen=True)
class Tile:
    """Matrix rows of a tile, columns read at a time (8 bits; four bits read a group), warps, stages, and the number of programs to
    split columns for."""

    rows: int
    columns: int
    warps: int
    stages: int
    programs: int


TILES = {
    ("int4", 16): Tile(64, 128, 4, 3, 528),
    ("int4", 32): Tile(64, 128, 4, 3, 528),
    ("int4", 64): Tile(128, 128, 4, 4, 264),
    ("int4", 128): Tile(128, 128, 8, 3, 132),
    ("int8", 16): Tile(64, 128, 4, 4, 528),
    ("int8", 32): Tile(64, 128, 4, 4, 528),
    ("int8", 64): Tile(64, 128, 4, 3, 264),
    ("int8", 128): Tile(64, 128, 4, 3, 264),
    ("fp8", 16): Tile(64, 256, 4, 4, 264),
    ("fp8", 32): Tile(64, 256, 4, 4, 264),
    ("fp8", 64): Tile(64, 256, 4, 4, 264),
    ("fp8", 128): Tile(128, 128, 8, 4, 132),
}
"""By format and rows of input; in part measured with `benchmarks/gpu/weight_only.py` on an H200."""
LEAST_GROUP = 128
"""A word of four-bit weights holds one column of each eighth of a group, and tensor cores take sixteen columns at a time."""


@triton.jit
def _finished(  # type: ignore[no-untyped-def]
    out, other, RESIDUAL, OUT, m, columns, rows, n, out0,
    HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Gate, add to the residual stream, and write sums [M, N]."""
    dtype = OUT.dtype.element_ty
    if GATED:
        gate = activated(out.to(dtype).to(tl.float32), SILU, dtype)
        out = gate * other.to(dtype).to(tl.float32)
    where = m[:, None] * out0 + columns[None, :]
    mask = (m < rows)[:, None] & (columns < n)[None, :]
    if HAS_RESIDUAL:
        out += tl.load(RESIDUAL + where, mask=mask, other=0.0).to(tl.float32)
    tl.store(OUT + where, out.to(dtype), mask=mask)


@triton.jit
def _eighth(words, n: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """The weights q in the bits 4n to 4n+3: 128 + q in bfloat16, 1024 + q in float16, q in other dtypes."""
    q = (words >> (4 * n)) & 15
    if dtype == tl.bfloat16:
        return (q | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif dtype == tl.float16:
        return (q | 0x6400).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        return q.to(dtype)


@triton.jit
def _group_product(  # type: ignore[no-untyped-def]
    X, SUMS, W, SCALE, ZERO, row, inside, m, rows, x0, group, n_groups,
    M: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr,
):  # fmt: skip
    """The product of one group of columns, int4: [N, M]."""
    WORDS: tl.constexpr = GROUP // 8
    dtype: tl.constexpr = X.dtype.element_ty
    j = tl.arange(0, WORDS)
    at = row * n_groups + group
    words = tl.load(W + at[:, None] * WORDS + j[None, :], mask=inside[:, None], other=0)
    scale = tl.load(SCALE + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_ZERO:
        zero = tl.load(ZERO + at, mask=inside, other=0).to(tl.float32)
    else:
        zero = tl.full((N,), 8.0, tl.float32)
    if dtype == tl.bfloat16:
        zero += 128.0
    elif dtype == tl.float16:
        zero += 1024.0
    sums = tl.load(SUMS + m * n_groups + group, mask=m < rows, other=0.0)
    part = tl.zeros((N, M), tl.float32)
    for i in tl.static_range(8):
        x = tl.load(X + m[None, :] * x0 + group * GROUP + i * WORDS + j[:, None], mask=(m < rows)[None, :], other=0.0)
        part = tl.dot(_eighth(words, i, dtype), x, part, input_precision="ieee")
    return (part - zero[:, None] * sums[None, :]) * scale[:, None]


@triton.jit
def _line_product(X, W, row, inside, m, rows, x0, first, k, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """The operands [N, K] and [K, M] of some columns, 8 bits."""
    at = first + tl.arange(0, K)
    dtype: tl.constexpr = X.dtype.element_ty
    w = tl.load(W + row[:, None] * k + at[None, :], mask=inside[:, None] & (at < k)[None, :], other=0.0)
    x = tl.load(X + m[None, :] * x0 + at[:, None], mask=(m < rows)[None, :] & (at < k)[:, None], other=0.0)
    return w.to(dtype), x


@triton.jit
def _tiles(  # type: ignore[no-untyped-def]
    X, X_SCALE, W, SCALE, ZERO, RESIDUAL, OUT, PART, ARRIVED, rows, n, k, x0, out0, share,
    INT4: tl.constexpr, SCALED_X: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr, SILU: tl.constexpr, SPLITS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    block, split, rows_block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    columns = block * N + tl.arange(0, N)
    m = rows_block * M + tl.arange(0, M)
    row, inside = columns.to(tl.int64), columns < n
    up = row + n
    sums = tl.zeros((N, M), tl.float32)
    gated = tl.zeros((N, M), tl.float32)
    if INT4:
        n_groups = k // GROUP
        for group in range(split * share, tl.minimum((split + 1) * share, n_groups)):
            sums += _group_product(
                X, X_SCALE, W, SCALE, ZERO, row, inside, m, rows, x0, group, n_groups, M, N, GROUP, HAS_ZERO
            )
            if GATED:
                gated += _group_product(
                    X, X_SCALE, W, SCALE, ZERO, up, inside, m, rows, x0, group, n_groups, M, N, GROUP, HAS_ZERO
                )
    else:
        for first in range(split * share * K, tl.minimum((split + 1) * share * K, k), K):
            w, x = _line_product(X, W, row, inside, m, rows, x0, first, k, K)
            sums = tl.dot(w, x, sums, input_precision="ieee")
            if GATED:
                w, x = _line_product(X, W, up, inside, m, rows, x0, first, k, K)
                gated = tl.dot(w, x, gated, input_precision="ieee")
        sums *= tl.load(SCALE + row, mask=inside, other=0.0)[:, None]
        if GATED:
            gated *= tl.load(SCALE + up, mask=inside, other=0.0)[:, None]
        if SCALED_X:
            factor = tl.load(X_SCALE + m, mask=m < rows, other=0.0)
            sums *= factor[None, :]
            gated *= factor[None, :]
    if SPLITS == 1:
        _finished(tl.trans(sums), tl.trans(gated), RESIDUAL, OUT, m, columns, rows, n, out0, HAS_RESIDUAL, GATED, SILU)
    else:
        TILES: tl.constexpr = 2 if GATED else 1
        tile = rows_block * tl.num_programs(0) + block
        inner = tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :]
        mine = PART + (tile.to(tl.int64) * SPLITS + split) * TILES * N * M + inner
        tl.store(mine, sums)
        if GATED:
            tl.store(mine + N * M, gated)
        tl.debug_barrier()
        if tl.atomic_add(ARRIVED + tile, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(ARRIVED + tile, 0)
            sums = tl.zeros((N, M), tl.float32)
            gated = tl.zeros((N, M), tl.float32)
            theirs = PART + tile.to(tl.int64) * SPLITS * TILES * N * M + inner
            for other in range(SPLITS):
                sums += tl.load(theirs + other * TILES * N * M, cache_modifier=".cg")
                if GATED:
                    gated += tl.load(theirs + (other * TILES + 1) * N * M, cache_modifier=".cg")
            _finished(
                tl.trans(sums), tl.trans(gated), RESIDUAL, OUT, m, columns, rows, n, out0, HAS_RESIDUAL, GATED, SILU
            )


class TileScratch:
    """Memory for the partial sums of programs that share a tile; one GEMM after the other uses it, and it grows to the largest."""

    def __init__(self, device: torch.device) -> None:
        self.part = torch.empty(0, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(0, dtype=torch.int32, device=device)
        self.outgrown: list[Tensor] = []
        """Buffers that were outgrown: captured CUDA graphs still use them."""

    def of(self, numel: int, tiles: int) -> tuple[Tensor, Tensor]:
        """Memory for this many elements and tiles."""
        if numel > len(self.part):
            self.outgrown.append(self.part)
            self.part = self.part.new_empty(numel)
        if tiles > len(self.arrived):
            self.outgrown.append(self.arrived)
            self.arrived = self.arrived.new_zeros(tiles)
        return self.part, self.arrived


def tile_rows(rows: int) -> int:
    """Rows of input in a tile."""
    return min(128, max(16, triton.next_power_of_2(rows)))


def tiled_gemm(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    kind: str,
    scratch: TileScratch,
    residual: Tensor | None = None,
    gated: str = "",
    shape: Tile | None = None,
    x_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`weight_only_gemm` without a norm; int4 groups have at least `LEAST_GROUP` columns. With `x_scale` [rows, 1], rows and
    matrix are both fp8, and the result has the `dtype`."""
    rows, k = x.shape
    n = packed.shape[0] // (2 if gated else 1)
    out = torch.empty(rows, n, dtype=dtype or x.dtype, device=x.device)
    m = tile_rows(rows)
    shape = shape or TILES[kind, m]
    block_n = shape.rows // 2 if gated and m >= 64 else shape.rows
    group = k // scale.shape[1] if kind == "int4" else 0
    steps = k // group if group else triton.cdiv(k, shape.columns)
    blocks, row_blocks = triton.cdiv(n, block_n), triton.cdiv(rows, m)
    splits = min(steps, max(1, shape.programs // (blocks * row_blocks)))
    share = triton.cdiv(steps, splits)
    splits = triton.cdiv(steps, share)
    part, arrived = out, out
    if group:  # subtracting the zero points and offsets needs the sum of each group's inputs
        x_scale = x.unflatten(1, (-1, group)).sum(-1, dtype=torch.float32)
    if splits > 1:
        numel = blocks * row_blocks * splits * block_n * m * (2 if gated else 1)
        part, arrived = scratch.of(numel, blocks * row_blocks)
    _tiles[blocks, splits, row_blocks](
        x, x if x_scale is None else x_scale, packed, scale, packed if zero is None else zero,
        out if residual is None else residual, out, part, arrived, rows, n, k,
        x.stride(0), out.stride(0), share, INT4=kind == "int4", SCALED_X=x_scale is not None, GROUP=group,
        HAS_ZERO=zero is not None, HAS_RESIDUAL=residual is not None, GATED=bool(gated), SILU=gated == "silu",
        SPLITS=splits, M=m, N=block_n,
        K=shape.columns, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return out
