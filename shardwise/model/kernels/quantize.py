"""Quantisation to fp8 in as few passes over memory as possible: the amax of a tensor in one read; a tile read once, scaled and
written as stored, transposed, or both, since fp8 GEMMs take each operand by its rows only; a row's amax and its cast in one
program, also together with the operation that makes the row. Nothing here needs a host sync: kernels compute scales where they use
them, from the bits of the amax.
A tile stored both ways is wrong in every fourth transposed row where NVIDIA's assembler 12.8 built it from 32-bit values (a known
bug, triton-lang/triton#11111). So whether one kernel may do both is tested before it is first relied on.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.model.kernels.gated import activated
from shardwise.model.quantized.formats import E4M3, TOP

SCAN = 4096
"""Elements that a program reads at once to find the amax, and (`SCANS`) how many times."""
SCANS = 8
TILE = (64, 128)
"""Rows and columns that a program casts."""
TILE_WARPS = 4
ROW = 8192
"""Elements of a row that are held at once."""
SIDE = 128
"""Rows and columns of a tile that is transposed."""
SIDE_WARPS = 8
SIDES = 4
"""Tiles, one below the other, in which a program looks for the amax of columns. Where a program took all rows of a matrix, there
were fewer programs than multiprocessors: 0.27 TB/s on an H200."""


@triton.jit
def _bits(x):  # type: ignore[no-untyped-def]
    """The magnitudes of numbers as integers: they have the same order, and NaN is the largest."""
    return tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True)


@triton.jit
def _exponent(bits, TOP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The biased exponent of the power of two that `scale_of` returns."""
    over = tl.where((bits & 0x7FFFFF) > 0x600000, 1, 0)
    return tl.maximum((bits >> 23) - TOP + over, 27)


@triton.jit
def _scale(bits, exponent):  # type: ignore[no-untyped-def]
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    return tl.where(bits >= 0x7F800000, bits.to(tl.float32, bitcast=True), scale)


@triton.jit
def _factor(exponent):  # type: ignore[no-untyped-def]
    return ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _amax(x, out, numel, SCAN: tl.constexpr, SCANS: tl.constexpr):  # type: ignore[no-untyped-def]
    start = tl.program_id(0).to(tl.int64) * (SCAN * SCANS)
    highest = tl.zeros((SCAN,), tl.int32)
    for n in range(SCANS):
        at = start + n * SCAN + tl.arange(0, SCAN)
        highest = tl.maximum(highest, _bits(tl.load(x + at, mask=at < numel, other=0.0)))
    tl.atomic_max(out, tl.max(highest, 0))


@triton.jit
def _cast(  # type: ignore[no-untyped-def]
    x, amax, plain, transposed, scale, rows, columns,
    TOP: tl.constexpr, PLAIN: tl.constexpr, TURNED: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(columns, WIDTH)
    tile = tl.program_id(0)
    bits = tl.load(amax)
    exponent = _exponent(bits, TOP)
    if tile == 0:
        tl.store(scale, _scale(bits, exponent))
    row = ((tile // across) * HEIGHT + tl.arange(0, HEIGHT)).to(tl.int64)
    column = ((tile % across) * WIDTH + tl.arange(0, WIDTH)).to(tl.int64)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row[:, None] * columns + column[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * _factor(exponent)
    if PLAIN:
        tl.store(plain + at, value.to(plain.dtype.element_ty), mask=inside)
    if TURNED:
        there = column[:, None] * rows + row[None, :]
        tl.store(transposed + there, tl.trans(value.to(transposed.dtype.element_ty)), mask=tl.trans(inside))


@triton.jit
def _cast_row(x, out, scale, COLUMNS: tl.constexpr, TOP: tl.constexpr, ROW: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    highest = tl.zeros((ROW,), tl.int32)
    for first in range(0, COLUMNS, ROW):
        at = first + tl.arange(0, ROW)
        highest = tl.maximum(highest, _bits(tl.load(x + row * COLUMNS + at, mask=at < COLUMNS, other=0.0)))
    bits = tl.max(highest, 0)
    exponent = _exponent(bits, TOP)
    tl.store(scale + row, _scale(bits, exponent))
    for first in range(0, COLUMNS, ROW):
        at = first + tl.arange(0, ROW)
        value = tl.load(x + row * COLUMNS + at, mask=at < COLUMNS, other=0.0).to(tl.float32) * _factor(exponent)
        tl.store(out + row * COLUMNS + at, value.to(out.dtype.element_ty), mask=at < COLUMNS)


@triton.jit
def _column_amax(  # type: ignore[no-untyped-def]
    x, scale, amax, rows, columns, turns, HEIGHT: tl.constexpr, WIDTH: tl.constexpr
):
    column = (tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)).to(tl.int64)
    highest = tl.zeros((WIDTH,), tl.int32)
    for turn in range(turns):
        row = ((tl.program_id(1) * turns + turn) * HEIGHT + tl.arange(0, HEIGHT)).to(tl.int64)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        value = tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0.0).to(tl.float32)
        value *= tl.load(scale + row, mask=row < rows, other=0.0)[:, None]
        highest = tl.maximum(highest, tl.max(_bits(value), 0))
    tl.atomic_max(amax + column, highest, mask=column < columns)


@triton.jit
def _transpose(  # type: ignore[no-untyped-def]
    x, scale, amax, out, out_scale, rows, columns, TOP: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr
):
    column = (tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)).to(tl.int64)
    row = (tl.program_id(1) * HEIGHT + tl.arange(0, HEIGHT)).to(tl.int64)
    bits = tl.load(amax + column, mask=column < columns, other=0)
    exponent = _exponent(bits, TOP)
    if tl.program_id(1) == 0:
        tl.store(out_scale + column, _scale(bits, exponent), mask=column < columns)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    value = tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
    value = tl.trans(value.to(tl.float32).to(tl.bfloat16)).to(tl.float32)  # bfloat16 holds fp8 exactly
    value *= tl.load(scale + row, mask=row < rows, other=0.0)[None, :]
    cast = (value * _factor(exponent)[:, None]).to(out.dtype.element_ty)
    tl.store(out + column[:, None] * rows + row[None, :], cast, mask=tl.trans(inside))


@triton.jit
def _swap(x, out, rows, columns, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    across = tl.cdiv(columns, WIDTH)
    row = (tl.program_id(0) // across * HEIGHT + tl.arange(0, HEIGHT)).to(tl.int64)
    column = (tl.program_id(0) % across * WIDTH + tl.arange(0, WIDTH)).to(tl.int64)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(x + row[:, None] * columns + column[None, :], mask=inside)
    tl.store(out + column[:, None] * rows + row[None, :], tl.trans(tile), mask=tl.trans(inside))


def amax_fused(x: Tensor) -> Tensor:
    """The largest magnitude in a contiguous tensor, in float32."""
    out = torch.zeros((), dtype=torch.int32, device=x.device)
    programs = triton.cdiv(x.numel(), SCAN * SCANS)
    if programs:
        _amax[(programs,)](x, out, x.numel(), SCAN, SCANS)
    return out.view(torch.float32)


def cast_fused(
    x: Tensor, amax: Tensor, dtype: torch.dtype, plain: bool, transposed: bool, tile: tuple[int, int] = TILE
) -> tuple[Tensor, Tensor, Tensor]:
    """`scaled.cast_reference` in one pass, or in two where one would be wrong."""
    rows, columns = x.shape
    as_it_lies = torch.empty((rows, columns) if plain else (0,), dtype=dtype, device=x.device)
    by_column = torch.empty((columns, rows) if transposed else (0,), dtype=dtype, device=x.device)
    scale = torch.empty((), dtype=torch.float32, device=x.device)
    if plain and transposed and not one_pass_is_right(x.dtype, dtype, x.device, tile):
        _launch_cast(x, amax, (as_it_lies, by_column, scale), True, False, tile)
        _launch_cast(x, amax, (as_it_lies, by_column, scale), False, True, tile)
    else:
        _launch_cast(x, amax, (as_it_lies, by_column, scale), plain, transposed, tile)
    return as_it_lies, by_column, scale


def _launch_cast(
    x: Tensor, amax: Tensor, out: tuple[Tensor, Tensor, Tensor], plain: bool, transposed: bool, tile: tuple[int, int]
) -> None:
    (rows, columns), dtype = x.shape, out[0].dtype
    programs = triton.cdiv(rows, tile[0]) * triton.cdiv(columns, tile[1])
    _cast[(programs,)](
        x, amax.view(torch.int32), *out, rows, columns, TOP[dtype], plain, transposed, *tile, num_warps=TILE_WARPS
    )  # fmt: skip


@cache
def one_pass_is_right(given: torch.dtype, dtype: torch.dtype, device: torch.device, tile: tuple[int, int]) -> bool:
    """Whether the kernel, as compiled here, writes a matrix as stored and transposed together the same as one by one."""
    rows, columns = (2 * side for side in tile)
    x = torch.linspace(-1, 1, rows * columns, device=device).view(rows, columns).to(given)

    def outputs() -> tuple[Tensor, Tensor, Tensor]:
        plain, transposed = (
            torch.zeros(shape, dtype=torch.int8, device=device) for shape in ((rows, columns), (columns, rows))
        )
        return plain.view(dtype), transposed.view(dtype), torch.zeros((), device=device)

    together, one_by_one = outputs(), outputs()
    _launch_cast(x, amax_fused(x), together, True, True, tile)
    _launch_cast(x, amax_fused(x), one_by_one, True, False, tile)
    _launch_cast(x, amax_fused(x), one_by_one, False, True, tile)
    return all(
        torch.equal(a.view(torch.int8), b.view(torch.int8)) for a, b in zip(together[:2], one_by_one[:2], strict=True)
    )


def cast_rows_fused(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`scaled.cast_rows_reference` in one pass."""
    rows, columns = x.shape
    out = torch.empty_like(x, dtype=dtype)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    held = min(ROW, triton.next_power_of_2(columns))
    if rows:
        _cast_row[(rows,)](x, out, scale, columns, TOP[dtype], held, num_warps=8 if held > 2048 else 4)
    return out, scale


def transpose_fused(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """`scaled.transpose_reference` in two reads of the fp8 matrix, the second from the cache; in one if it has a single scale."""
    rows, columns = x.shape
    out = torch.empty(columns, rows, dtype=x.dtype, device=x.device)
    if not scale.dim():
        programs = triton.cdiv(rows, SIDE) * triton.cdiv(columns, SIDE)
        _swap[(programs,)](x.view(torch.int8), out.view(torch.int8), rows, columns, SIDE, SIDE, num_warps=SIDE_WARPS)
        return out, scale.clone()
    out_scale = torch.empty(columns, 1, dtype=torch.float32, device=x.device)
    amax = torch.zeros(columns, dtype=torch.int32, device=x.device)
    across, down = triton.cdiv(columns, SIDE), triton.cdiv(rows, SIDE)
    _column_amax[across, triton.cdiv(down, SIDES)](
        x, scale, amax, rows, columns, SIDES, SIDE, SIDE, num_warps=SIDE_WARPS
    )
    _transpose[across, down](
        x, scale, amax, out, out_scale, rows, columns, TOP[x.dtype], SIDE, SIDE, num_warps=SIDE_WARPS
    )
    return out, out_scale


@triton.jit
def _fp8_rows(  # type: ignore[no-untyped-def]
    X, NORM, OUT, SCALES, width, x0, eps,
    HAS_NORM: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr, TOP: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, N)
    inside = at < width
    dtype = X.dtype.element_ty
    x = tl.load(X + row * x0 + at, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(X + row * x0 + width + at, mask=inside, other=0.0).to(tl.float32)
        x = (activated(x, SILU, dtype) * up).to(dtype).to(tl.float32)
    if HAS_NORM:
        rms = tl.rsqrt(tl.sum(x * x) / width + eps)
        x = (x * rms * tl.load(NORM + at, mask=inside, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    bits = tl.max(_bits(x))
    exponent = _exponent(bits, TOP)
    tl.store(SCALES + row, _scale(bits, exponent))
    tl.store(OUT + row * width + at, (x * _factor(exponent)).to(OUT.dtype.element_ty), mask=inside)


def fp8_rows(x: Tensor, norm: tuple[Tensor, float] | None = None, gated: str = "") -> tuple[Tensor, Tensor]:
    """Rows in fp8 and their scales [rows, 1]: of an RMSNorm of `x` with this weight and epsilon, of the gated product of its two
    halves ("silu" or "gelu" of the first), or of `x` itself."""
    rows, width = x.shape[0], x.shape[1] // (2 if gated else 1)
    out = torch.empty(rows, width, dtype=E4M3, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    weight, eps = norm if norm is not None else (x, 0.0)
    block = triton.next_power_of_2(width)
    _fp8_rows[(rows,)](
        x, weight, out, scales, width, x.stride(0), eps, HAS_NORM=norm is not None, GATED=bool(gated), SILU=gated == "silu",
        TOP=TOP[E4M3], N=block, num_warps=min(16, max(4, block // 1024)),
    )  # fmt: skip
    return out, scales
