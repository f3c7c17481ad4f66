"""Microseconds as a file writes them, 1712195495519689.047, to whole nanoseconds, exactly. A float keeps 53 bits, which for a date
leaves a quarter of a microsecond: kernels would overlap that did not, and short ones vanish. So the digits are read as digits.

What is finer than a nanosecond is rounded to the nearest one, halves to the even one.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_HALF_EVEN, Context, Decimal, InvalidOperation

import numpy as np
from numpy.typing import NDArray

LIMIT = 1 << 62
"""No time may reach this, in nanoseconds: sums and differences of two stay within 64 bits."""

_SCALE = np.array([1000, 100, 10, 1], np.int64)
_LONGEST = 18  # digits that surely fit 64 bits
_LONGEST_ODD = 400
_EXACT = Context(prec=_LONGEST_ODD + 10)


def nanoseconds(texts: Sequence[bytes]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Each text of microseconds in nanoseconds, and which of them are times at all; 0 for those that are not.

    Texts may be anything with a buffer, so that no copy of each is made.
    """
    if not texts:
        return np.zeros(0, np.int64), np.zeros(0, np.bool_)
    joined = b",".join([*texts, b""])
    if joined.translate(None, b"0123456789.-,"):
        return _one_by_one(texts)
    characters = np.frombuffer(joined, np.uint8)
    ends = np.flatnonzero(characters == ord(","))
    if len(ends) != len(texts):
        return _one_by_one(texts)
    dots = np.flatnonzero(characters == ord("."))
    minus = np.flatnonzero(characters == ord("-")) if b"-" in joined else dots[:0]
    each_has_one = len(dots) == len(ends) and (dots < ends).all() and (dots[1:] > ends[:-1]).all()
    owner = np.arange(len(ends)) if each_has_one else np.searchsorted(ends, dots)
    decimals = np.zeros(len(texts), np.int64)
    decimals[owner] = ends[owner] - dots - 1
    digits = np.diff(ends, prepend=-1) - 1
    digits[owner] -= 1
    digits[np.searchsorted(ends, minus)] -= 1
    regular = decimals.max() <= 3 and digits.min() >= 1 and digits.max() <= _LONGEST
    if not regular or (owner[1:] == owner[:-1]).any() or (characters[minus - 1] != ord(",")).any():
        return _one_by_one(texts)
    values = np.fromstring(joined.translate(None, b".")[:-1], np.int64, sep=",")
    scale = _SCALE[decimals]
    known = np.abs(values.astype(np.float64) * scale) < LIMIT
    return np.where(known, values * scale, 0), known


def _one_by_one(texts: Sequence[bytes]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The same for any texts: exponents, many digits, quotes, words."""
    values = [exact(bytes(text)) for text in texts]
    known = np.array([value is not None for value in values], np.bool_)
    return np.array([value or 0 for value in values], np.int64), known


def exact(text: bytes) -> int | None:
    """One text of microseconds in nanoseconds, None when it is no number or out of range."""
    if len(text) > _LONGEST_ODD:
        return None
    try:
        micro = Decimal(text.decode("ascii").strip().strip('"'))
        if not micro.is_finite() or micro.adjusted() > _LONGEST:
            return None
        if micro.adjusted() < -_LONGEST:
            return 0
        value = int(micro.scaleb(3, _EXACT).to_integral_value(ROUND_HALF_EVEN, _EXACT))
    except (InvalidOperation, ValueError, OverflowError):
        return None
    return value if abs(value) < LIMIT else None
