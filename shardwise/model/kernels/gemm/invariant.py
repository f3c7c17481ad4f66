"""GEMMs on a GPU in which the bits of a row depend on that row alone: not on how many others there are, nor on its index.

Tensor cores add up the products of 16 elements at a time. Here every element of a result is one such chain along the whole of K,
from its beginning, without a split, so tiles of any size compute the same. Only the kind of instruction must not change with the
number of rows. So the matrix, which is always there, is the operand of which Hopper's `wgmma` needs 64 rows, and tokens are the
other operand, be they 16 or 256.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

TOGETHER = 8
"""Tiles of tokens whose programs run side by side, so that they find the matrix in the cache."""


@triton.jit(do_not_specialize=["rows", "token_tiles"])
def _multiply(  # type: ignore[no-untyped-def]
    X, W, BIAS, RESIDUAL, OUT, TILES, rows, token_tiles, n, k, x0, x_each, w0, w1, w_each, out0, out_each,
    BIASED: tl.constexpr, ADDS: tl.constexpr, GROUPED: tl.constexpr, EVEN: tl.constexpr, TOGETHER: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    together = TOGETHER * tl.cdiv(n, N)
    first_tile = pid // together * TOGETHER
    size = tl.minimum(token_tiles - first_tile, TOGETHER)
    tile, column_tile = first_tile + pid % together % size, pid % together // size
    if GROUPED:
        which = tl.load(TILES + 3 * tile).to(tl.int64)
        first, stop = tl.load(TILES + 3 * tile + 1), tl.load(TILES + 3 * tile + 2)
        if first >= stop:
            return
    else:
        which, first, stop = tl.program_id(1).to(tl.int64), tile * M, rows
    m, column, step = first + tl.arange(0, M), column_tile * N + tl.arange(0, N), tl.arange(0, K)
    # Rows and columns beyond the last repeat it; their results are not stored.
    x_at = X + which * x_each + tl.minimum(m, stop - 1).to(tl.int64)[None, :] * x0 + step[:, None]
    w_at = W + which * w_each + tl.minimum(column, n - 1).to(tl.int64)[:, None] * w0 + step[None, :] * w1
    total = tl.zeros((N, M), tl.float32)
    for at in range(0, k, K):
        if EVEN:
            w, x = tl.load(w_at), tl.load(x_at)
        else:
            inside = at + step < k
            w, x = tl.load(w_at, mask=inside[None, :], other=0.0), tl.load(x_at, mask=inside[:, None], other=0.0)
        total = tl.dot(w, x, total, input_precision="ieee")
        w_at += K * w1
        x_at += K
    there = (column < n)[:, None] & (m < stop)[None, :]
    if BIASED:
        total += tl.load(BIAS + column, mask=column < n, other=0.0).to(tl.float32)[:, None]
    value = total.to(OUT.dtype.element_ty)
    place = which * out_each + m.to(tl.int64)[None, :] * out0 + column[:, None]
    if ADDS:  # rounded first, as a separate operator would
        value = (value.to(tl.float32) + tl.load(RESIDUAL + place, mask=there, other=0.0).to(tl.float32)).to(value.dtype)
    tl.store(OUT + place, value, mask=there)


class Tile(NamedTuple):
    """The tile that a program computes, and how; the bits are the same for all tiles."""

    n: int
    """Rows of the matrix: a multiple of 64."""
    m: int
    """Tokens."""
    k: int
    warps: int
    stages: int


TILES = (
    Tile(64, 16, 128, 4, 8), Tile(128, 16, 128, 4, 5), Tile(64, 32, 128, 4, 6), Tile(128, 32, 128, 8, 4), Tile(64, 64, 128, 4, 6),
    Tile(128, 64, 64, 4, 5), Tile(64, 128, 64, 4, 6), Tile(128, 128, 64, 8, 4), Tile(128, 256, 64, 8, 4),
)  # fmt: skip
"""From small to large; the fastest of some forty that were timed on an H200 for matrices of 16 to 235 million elements."""
PROCESSORS = 132
"""Multiprocessors of an H100 or H200."""


def tile_of(rows: int, n: int) -> Tile:
    """The tile that is fast for `rows` tokens and a matrix of `n` rows: the smallest that makes at most one program for each
    multiprocessor, or else the largest. Tiles of few tokens read the matrix too often."""
    wide = min(256, max(16, triton.next_power_of_2(rows)))
    usable = [tile for tile in TILES if min(wide, 64) <= tile.m <= wide]
    single = (tile for tile in usable if triton.cdiv(rows, tile.m) * triton.cdiv(n, tile.n) <= PROCESSORS)
    return next(single, usable[-1])


def _launch(
    x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None, tiles: Tensor | None, tile: Tile,
    rows: int, each: int, strides: tuple[int, int, int, int],
) -> None:  # fmt: skip
    """`each`: the number of matrices that all rows are multiplied with; `strides`: from one matrix, its tokens and its results to
    the next, and from one row of results to the next."""
    n, k = weight.shape[-2:]
    token_tiles = len(tiles) if tiles is not None else triton.cdiv(rows, tile.m)
    w_each, x_each, out_each, out0 = strides
    _multiply[token_tiles * triton.cdiv(n, tile.n), each](
        x, weight, x if bias is None else bias, x if residual is None else residual, out, x if tiles is None else tiles, rows,
        token_tiles, n, k, x.stride(0), x_each, weight.stride(-2), weight.stride(-1), w_each, out0, out_each,
        BIASED=bias is not None, ADDS=residual is not None, GROUPED=tiles is not None, EVEN=k % tile.k == 0, TOGETHER=TOGETHER,
        N=tile.n, M=tile.m, K=tile.k, num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip


def invariant_gemm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """Rows [rows, in] times a matrix [out, in], with a bias; added to `residual` [rows, out] in place, if it is given. The result
    has the dtype of the rows unless `dtype` is given."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = x.new_empty(len(x), weight.shape[0], dtype=dtype) if residual is None else residual
    if len(x):
        tile = tile or tile_of(len(x), weight.shape[0])
        _launch(x, weight, out, bias, residual, None, tile, len(x), 1, (0, 0, 0, out.stride(0)))
    return out


def invariant_gemm_by_head(x: Tensor, weight: Tensor) -> Tensor:
    """Rows [rows, heads, in], each head times its own matrix [heads, out, in]."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = x.new_empty(*x.shape[:2], weight.shape[1])
    if len(x):
        strides = (weight.stride(0), x.stride(1), out.stride(1), out.stride(0))
        tile = tile_of(len(x), weight.shape[1] * weight.shape[0])
        _launch(x, weight, out, None, None, None, tile, len(x), weight.shape[0], strides)
    return out


def invariant_grouped_gemm(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Rows [rows, in], `counts[e]` of them for each expert in turn, times that expert's matrix [experts, out, in]. Rows beyond the
    last expert's are not computed. The counts need no host sync."""
    x = x.contiguous()
    out = x.new_empty(len(x), weight.shape[1])
    if len(x):
        experts = len(counts)
        tile = tile_of(-(-len(x) // experts), weight.shape[1] * experts)
        tiles = grouped_tiles(counts, tile.m, len(x) // tile.m + experts)
        _launch(x, weight, out, None, None, tiles, tile, len(x), 1, (weight.stride(0), 0, 0, out.stride(0)))
    return out


def grouped_tiles(counts: Tensor, rows: int, most: int) -> Tensor:
    """Tiles of `rows` rows, [most, 3] int32: the group of each, its first row, and the end of the group; unused tiles are
    empty."""
    tiles = (counts + rows - 1) // rows
    ends, tile_ends = counts.cumsum(0), tiles.cumsum(0)
    tile = torch.arange(most, device=counts.device)
    group = torch.searchsorted(tile_ends, tile, right=True)
    left_over = group == len(counts)
    group = group.clamp(max=len(counts) - 1)
    first = ends[group] - counts[group] + (tile - (tile_ends[group] - tiles[group])) * rows
    stop = torch.where(left_over, 0, ends[group])
    return torch.stack((group, first, stop), dim=1).int()
