"""A metric over steps, of any length: numbers are only appended, and a picture of any range is made from few of them.

A chart is some thousand pixels wide, so of all points in one pixel column only the lowest and the highest can be seen. Those of
full blocks are found once, when a block is full; a picture of a million points then reads some ten thousand.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 128

Array = NDArray[Any]


class Growing:
    """An append-only array of numbers, whose capacity doubles."""

    def __init__(self, dtype: str) -> None:
        self._room, self.count = np.empty(1024, dtype), 0

    def extend(self, values: Any) -> None:
        """Append several."""
        needed = self.count + len(values)
        if needed > len(self._room):
            room = np.empty(max(needed, 2 * len(self._room)), self._room.dtype)
            room[: self.count] = self._room[: self.count]
            self._room = room
        self._room[self.count : needed] = values
        self.count = needed

    @property
    def values(self) -> Array:
        """All numbers so far; later appends do not change this view."""
        return self._room[: self.count]


class Series:
    """The points of one metric, in the order of their steps."""

    def __init__(self) -> None:
        self._x, self._y = Growing("f8"), Growing("f8")
        self._extremes = Growing("i8")
        self._blocks = 0

    def __len__(self) -> int:
        return self._x.count

    def extend(self, steps: list[float], values: list[float]) -> None:
        """Append points."""
        self._x.extend(steps)
        self._y.extend(values)
        full = self._x.count // BLOCK
        if full > self._blocks:
            first = self._blocks * BLOCK
            self._extremes.extend(first + _extremes(self._y.values[first : full * BLOCK], BLOCK))
            self._blocks = full

    @property
    def last(self) -> tuple[float, float] | None:
        """The newest point."""
        return (float(self._x.values[-1]), float(self._y.values[-1])) if len(self) else None

    def picture(self, low: float, high: float, columns: int) -> tuple[list[float], list[float | None]]:
        """Points between two steps, at most two for each of `columns` columns: the lowest and the highest in it. Values that are
        not finite become None."""
        x, y = self._x.values, self._y.values
        begin, end = np.searchsorted(x, (low, high), "left")
        # One point beyond each side, so that lines reach the edges.
        begin, end = max(0, int(begin) - 1), min(len(x), int(end) + 2)
        shown = np.arange(begin, end)
        if end - begin > BLOCK * columns:  # else blocks are wider than columns, and would hide points
            first, last = -(-begin // BLOCK), end // BLOCK
            inside = self._extremes.values[2 * first : 2 * last]
            shown = np.concatenate([np.arange(begin, first * BLOCK), inside, np.arange(last * BLOCK, end)])
        if len(shown) > 2 * columns:
            shown = _thinned(shown, y[shown], columns)
        return x[shown].tolist(), [value if isfinite(value) else None for value in y[shown].tolist()]


def _thinned(shown: Array, y: Array, columns: int) -> Array:
    """The lowest and the highest point of each column of consecutive points, and the first and the last of all."""
    size = -(-len(shown) // columns)
    whole = len(shown) // size * size
    places = np.concatenate([[0], _extremes(y[:whole], size), np.arange(whole, len(shown)), [len(shown) - 1]])
    return shown[np.unique(places)]


def _extremes(y: Array, size: int) -> Array:
    """Where the lowest and the highest point of each block of `size` points stand, in order."""
    block, missing = y.reshape(-1, size), np.isnan(y).reshape(-1, size)
    lowest, highest = np.where(missing, np.inf, block).argmin(axis=1), np.where(missing, -np.inf, block).argmax(axis=1)
    pair = np.arange(0, len(y), size)[:, None] + np.stack([lowest, highest], axis=1)
    return np.sort(pair, axis=1).ravel()
