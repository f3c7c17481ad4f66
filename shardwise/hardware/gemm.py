"""Device time of a GEMM, without the launch.

A library splits the output into tiles and distributes them over the chip's units; in the last wave some units idle. A small
GEMM is also split along k (split-K), so that all units have work, at the cost of a reduction. Reading the inputs and writing
the output once takes time too. The library picks the fastest tile, and so does this model: the least over a few tile shapes,
each with a fitted share of the peak (`efficiency.json`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from shardwise.hardware.chips import ITEM_BYTES, POWER_EXPONENT, Chip, find_chip
from shardwise.hardware.efficiency import constants, lender_of
from shardwise.hardware.power import power_of

# Beyond the largest measured GEMMs, the clock droops no further.
MOST_DOUBLINGS = 8.0
# No clock rises further above that of the measurements, since a chip has a maximum clock.
MOST_CLOCK = 1.12


@dataclass(frozen=True)
class GemmConstants:
    """Fitted constants of one chip and dtype, relative to the chip's figures or in seconds."""

    tiles: tuple[tuple[int, int, float], ...]  # rows, columns, share of the peak while computing
    depth: float  # cost of starting and ending a tile, in steps of k
    split_depth: float  # least k of a split-K slice
    split_seconds: float  # the reduction of split-K
    quantum: float  # share of the last wave's idle time that is lost
    memory: float  # share of the memory bandwidth
    memory_ramp: float  # seconds until that bandwidth is reached
    norm: float  # p-norm that combines compute and memory time: 1 is sequential, infinity overlapped
    floor: float  # seconds of the smallest kernel
    droop: float  # speed lost per doubling of the work beyond droop_flops: the chip reaches its power limit
    droop_flops: float
    grouped: float = 1.0  # speed of a grouped GEMM relative to a single one
    grouped_weight: float = 0.0  # the same of one for the gradients of experts' weights; 0: likewise
    grouped_start: float = 0.0  # seconds until its tiles are known
    exact: float = 1.0  # speed of a GEMM in fp8 without fast accumulation, as for gradients, relative to one with it


@cache
def gemm_constants(chip: Chip, dtype: str) -> GemmConstants:
    """The constants of `dtype`, or those of bfloat16 where there are none. Where the chip's power is known, its clock is planned
    (`power.py`), and does not droop with the work too."""
    by_dtype = constants("gemm", chip)
    entry = by_dtype.get(dtype, by_dtype["bfloat16"])["constants"]
    planned = {} if power_of(chip) is None else {"droop": 0.0}
    return GemmConstants(
        **{**entry, **planned, "tiles": tuple((int(m), int(n), share) for m, n, share in entry["tiles"])}
    )


# Speed of a GEMM whose width is not a multiple of 128, of 16 or of 4 bytes, relative to one that is. Measured on an
# H200 in bfloat16 and float16 (`benchmarks/gpu/alignment.py`). 128 bytes: widths 1800, 5400 and 7200 against 1792,
# 5376, 7168 and 7232. 16 bytes: heads of 100 to 110 against 104 and 112, and width 7204. 4 bytes: width 7201.
LINE, VECTOR, WORD = 0.93, 0.32, 0.17


def alignment(*widths: Any) -> Any:
    """Share of its speed that a 16-bit GEMM keeps with matrices of these widths, the sizes of their contiguous dimensions."""
    share: Any = 1.0
    for width in widths:
        own = np.where(np.mod(width, 64) == 0, 1.0, LINE)
        own = np.where(np.mod(width, 8) == 0, own, VECTOR)
        share = np.minimum(share, np.where(np.mod(width, 2) == 0, own, WORD))
    return share


@cache
def held_clock(chip: Chip) -> float:
    """The sustained clock of a chip relative to the chip of its generation whose curves it borrows: it follows from the power per
    operation, as under a power cap (`chips.py`)."""
    if chip.lender:  # a chip of the user's has the curves of its lender, as they are planned there
        return held_clock(find_chip(chip.lender))
    lender = lender_of("gemm", chip)
    if not lender:
        return 1.0
    other = find_chip(lender)
    if other.generation != chip.generation:
        return 1.0
    share = (chip.power / chip.peak["bfloat16"]) / (other.power / other.peak["bfloat16"])
    return min(max(share, 1.0) ** POWER_EXPONENT, MOST_CLOCK)


def gemm_seconds(
    chip: Chip, m: Any, n: Any, k: Any, dtype: str = "bfloat16", count: Any = 1, sustained: Any = 1.0
) -> Any:
    """Device time of `count` independent GEMMs of m×k by k×n in one kernel.

    `sustained` is the clock in a long run relative to that in the measurements. Inputs are of `dtype`; outputs too, but with at
    least two bytes per element.
    """
    sustained = np.multiply(sustained, held_clock(chip))
    seconds = model_seconds(gemm_constants(chip, dtype), chip, m, n, k, dtype, count, sustained)
    if chip.profile is not None:
        sizes = np.multiply(m, count), n, k  # they count as one with all rows
        seconds = seconds * chip.profile.factor("gemm", (dtype,), chip, sizes, partial(gemm_seconds, dtype=dtype))
    return seconds


def grouped_gemm_seconds(
    chip: Chip, tokens: Any, n: Any, k: Any, experts: Any, dtype: str = "bfloat16", sustained: Any = 1.0
) -> Any:
    """Device time of one kernel that multiplies an equal share of `tokens` rows by each expert's own k×n matrix."""
    fitted = gemm_constants(chip, dtype)
    rows = np.divide(tokens, experts)
    measured = chip.profile is not None and chip.profile.measures("grouped", dtype)
    plain = replace(chip, profile=None) if measured else chip
    seconds = gemm_seconds(plain, rows, n, k, dtype, experts, np.multiply(sustained, fitted.grouped))
    seconds = seconds + fitted.grouped_start
    if measured:
        model, sizes = partial(grouped_gemm_seconds, dtype=dtype), (tokens, n, k, experts)
        seconds = seconds * chip.profile.factor("grouped", (dtype,), chip, sizes, model)
    return seconds


def grouped_gradient_seconds(chip: Chip, tokens: Any, n: Any, k: Any, experts: Any, dtype: str = "bfloat16") -> Any:
    """Device time of the kernel that multiplies an equal share of the rows of a gradient, of `n` columns, by those of each expert's
    input, of `k`."""
    fitted = gemm_constants(chip, dtype)
    share = fitted.grouped_weight or fitted.grouped
    return gemm_seconds(chip, n, k, np.divide(tokens, experts), dtype, experts, share) + fitted.grouped_start


def model_seconds(
    fitted: GemmConstants, chip: Chip, m: Any, n: Any, k: Any, dtype: str, count: Any = 1, sustained: Any = 1.0
) -> Any:
    """The model itself, with any constants; also called by the fit."""
    m, n, k, count = (np.asarray(value, dtype=float) for value in (m, n, k, count))
    computing = _computing_seconds(fitted, chip.units, chip.speed(dtype) * np.asarray(sustained), m, n, k, count)
    item = ITEM_BYTES[dtype]
    moved = count * (item * k * (m + n) + max(item, 2.0) * m * n)
    moving = moved / (chip.hbm * fitted.memory) + fitted.memory_ramp
    norm = fitted.norm
    seconds = fitted.floor + (computing**norm + moving**norm) ** (1 / norm)
    return seconds if seconds.ndim else float(seconds)


def _computing_seconds(fitted: GemmConstants, units: int, speed: Any, m: Any, n: Any, k: Any, count: Any) -> Any:
    """Seconds the units need for all tiles, with the fastest tile shape."""
    best: Any = np.inf
    for rows, columns, share in fitted.tiles:
        step = 2.0 * rows * columns * units / (share * speed)  # seconds for one step of a tile along k
        tiles = np.maximum(np.ceil(m / rows) * np.ceil(n / columns) * count, 1.0)  # an empty GEMM starts one
        full = tiles / units
        waves = np.maximum(full + fitted.quantum * (np.ceil(full) - full), 1.0)
        whole = waves * (k + fitted.depth) * step
        parts = np.maximum(np.floor(units / tiles), 1e-9)  # below one: no unit is free, which rules split-K out
        depth = np.maximum(k / parts, np.minimum(k, fitted.split_depth))
        split = (depth + fitted.depth) * step + fitted.split_seconds
        best = np.minimum(best, np.minimum(whole, split))
    doublings = np.log2(np.maximum(2.0 * m * n * k * count / fitted.droop_flops, 1.0))
    return best * (1.0 + fitted.droop * np.minimum(doublings, MOST_DOUBLINGS))
