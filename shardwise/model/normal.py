"""Normally distributed numbers as a function of a key and of their index in a tensor: any box of it is drawn alone, with the same
bits.

A counter-based generator (Salmon et al. 2011) has no state to advance: a hash of the index gives the random words. Here the index
of each row gives 96 bits (the mixer of SplitMix64, Steele et al. 2014). They key a 32-bit hash of the row's columns, two at a
time: one word for the radius and one for the angle of Box & Muller (1958). Logarithm and sine are polynomials, since library
versions differ between devices, and between the body and the tail of a vectorised loop. The other operations (on integers,
additions, multiplications and square roots), each an operator of its own, round the same everywhere. Philox takes three times as
long in PyTorch's operators, which cannot compute the upper half of a 32-bit product. Results go up to 6.6 standard deviations.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

CPU_BLOCK = 2**17
"""Pairs of numbers drawn at a time: few enough that the intermediate tensors, 28 bytes a pair, stay in the cache."""
GPU_BLOCK = 2**21
"""The same on a GPU: enough that launching kernels costs less than running them."""

GAMMA, _MIX1, _MIX2 = (
    -0x61C8864680B583EB,
    -0x40A7B892E31B1A47,
    -0x6B2FB644ECCEEE15,
)  # the constants of SplitMix64, as signed integers
_COLUMN, _FIRST = -0x61C8864F, 0x7FEB352D
_RADIUS, _ANGLE = 0x2C1B3C6D, 0x297A2D39
_ROOT_HALF = 0x3F3504F3  # the bits of sqrt(1/2)
_LOG = (1.0000008, -0.500014, 0.3331603, -0.24896793, 0.20454755, -0.18782729, 0.12210979)
"""Coefficients of log(1 + x) / x in powers of x, for x between sqrt(1/2) - 1 and sqrt(2) - 1, accurate to 1.1e-6."""
_SINE = (1.570791, -0.64589286, 0.07943434, -0.0043330952)
"""Coefficients of sin(x pi/2) / x in powers of x squared, for x between -1 and 1, accurate to 6e-7."""


@torch.no_grad()
def fill_normal(
    values: Tensor,
    std: float,
    key: int,
    whole: Sequence[int],
    offset: Sequence[int],
    device: torch.device | None = None,
) -> None:
    """Fill `values` (contiguous, of any dtype) with the box at `offset` of a random tensor of shape `whole`. Blocks are drawn in
    float32 on `device`, by default the device of `values`."""
    device = device or values.device
    flat = values.view(-1, values.shape[-1]) if values.numel() else values.new_empty(0, 1)

    def fill(rows: range, columns: range) -> None:
        keys = _row_keys(_whole_rows(rows, values.shape, whole, offset, device), key)
        first, last = offset[-1] + columns.start, offset[-1] + columns.stop
        drawn = _pairs(keys, range(first // 2, -(-last // 2)), std)
        flat[rows.start : rows.stop, columns.start : columns.stop] = drawn[:, first % 2 : first % 2 + len(columns)]

    for rows, columns in _blocks(len(flat), flat.shape[1], CPU_BLOCK if device.type == "cpu" else GPU_BLOCK):
        fill(rows, columns)
        if type(values) is not Tensor:  # a fake tensor: one block shows the memory use, and there is nothing to draw
            break


def _blocks(rows: int, columns: int, most: int) -> Iterator[tuple[range, range]]:
    """The row and column ranges that cut a matrix into blocks of at most `most` pairs."""
    wide = min(columns, 2 * most - 2)  # a pair may be cut at either end
    high = max(1, most // (wide // 2 + 1)) if rows else 1
    for row in range(0, rows, high):
        for column in range(0, columns, wide):
            yield range(row, min(row + high, rows)), range(column, min(column + wide, columns))


def _whole_rows(
    rows: range, size: Sequence[int], whole: Sequence[int], offset: Sequence[int], device: torch.device
) -> Tensor:
    """The row indices, in the whole tensor, of some rows of a box."""
    left = torch.arange(rows.start, rows.stop, device=device)
    found = torch.zeros_like(left)
    for dim in reversed(range(len(whole) - 1)):
        found += (left % size[dim] + offset[dim]) * prod(whole[dim + 1 : -1])
        left = left // size[dim]
    return found


def _row_keys(rows: Tensor, key: int) -> tuple[Tensor, Tensor, Tensor]:
    """Three 32-bit words for each row, as columns."""
    first = mix64(rows * GAMMA + key)
    second = mix64(first + GAMMA)
    words = (first, first >> 32, second)
    # The lower 32 bits of each word, as a signed integer.
    high, middle, low = (((word & 0xFFFFFFFF) ^ 0x80000000).sub_(0x80000000).int()[:, None] for word in words)
    return high, middle, low


def key_of(name: str) -> int:
    """A random 64-bit number, derived from a name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


def mix64(x: Tensor) -> Tensor:
    """The mixer of SplitMix64, of 64-bit integers."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def _pairs(keys: tuple[Tensor, Tensor, Tensor], pairs: range, std: float) -> Tensor:
    """The random numbers of some pairs of columns, in the rows with these keys."""
    columns = torch.arange(pairs.start, pairs.stop, dtype=torch.int64, device=keys[0].device)
    x = (columns * _COLUMN).to(torch.int32) ^ keys[0]
    more = (x >> 15).bitwise_and_(0x1FFFF)
    x.bitwise_xor_(more).mul_(_FIRST)
    angle = _unsigned31(torch.bitwise_xor(x, keys[2], out=more), _ANGLE)
    radius = _radius(_unsigned31(x.bitwise_xor_(keys[1]), _RADIUS), std)
    sine = _sine(angle)
    # `sine` is s, of half the angle. The full angle has cosine 1 - 2 s^2 and sine 2 s c with c >= 0. `abs_` because
    # rounding must not make c^2 negative.
    square = sine * sine
    sine.mul_(_sqrt(torch.sub(1, square).abs_())).mul_(2)
    cosine = square.mul_(-2).add_(1)
    drawn = torch.empty(*x.shape, 2, device=x.device)
    torch.mul(radius, cosine, out=drawn[..., 0])
    torch.mul(radius, sine, out=drawn[..., 1])
    return drawn.flatten(1)


def _unsigned31(x: Tensor, factor: int) -> Tensor:
    """The last rounds of the hash, in place in `x`. The last shift copies the sign bit, so the xor sets the highest bit to 0."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(factor)
    return x.bitwise_xor_(x >> 15)


def _radius(x: Tensor, std: float) -> Tensor:
    """sqrt(-2 log u) times `std`, where u = (x + 1/2) / 2^31. The logarithm is the sum of those of its exponent and of its
    mantissa, which is scaled to between sqrt(1/2) and sqrt(2)."""
    bits = x.float().add_(0.5).view(torch.int32).add_(0x3F800000 - _ROOT_HALF)
    exponent = (bits >> 23).float().sub_(127 + 31)
    mantissa = bits.bitwise_and_(0x7FFFFF).add_(_ROOT_HALF).view(torch.float32).sub_(1)
    log = _polynomial(_LOG, mantissa).mul_(mantissa).add_(exponent.mul_(0.6931472))
    return _sqrt(log.mul_(-2 * std * std))


def _sqrt(x: Tensor) -> Tensor:
    """Square roots in place, rounded as IEEE 754 requires. In float32, GPUs and Intel's library do not round so; their float64
    roots are accurate enough that rounding them to float32 gives the IEEE result."""
    return x.copy_(x.double().sqrt_())


def _sine(x: Tensor) -> Tensor:
    """sin(pi/2 (x / 2^30 - 1))."""
    turn = x.float().mul_(2.0**-30).sub_(1)
    return _polynomial(_SINE, turn * turn).mul_(turn)


def _polynomial(coefficients: Sequence[float], x: Tensor) -> Tensor:
    """Horner's rule. An operator that multiplies and adds may round once or twice, so each operator here does one of the two."""
    *rest, last = coefficients
    value = torch.mul(x, last).add_(rest[-1])
    for coefficient in reversed(rest[:-1]):
        value.mul_(x).add_(coefficient)
    return value
