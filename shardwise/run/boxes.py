"""Boxes of tensors: what cuts leave of a whole one on a rank, and what two boxes have in common. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

from shardwise.run.parameters import Cut, shard_bounds


class Located(Protocol):
    """Who knows the index of a rank in each of its groups."""

    def size(self, group: str, /) -> int:
        """Ranks in a group."""

    def index(self, group: str, /) -> int:
        """The index of the rank there."""


@dataclass(frozen=True)
class Box:
    """A box of a whole tensor: where it begins and how large it is, by dimension."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Its number of elements."""
        return prod(self.size)

    def common(self, other: Box) -> Box | None:
        """What lies in both; None where nothing does."""
        starts = tuple(map(max, self.offset, other.offset))
        ends = (min(a + n, b + m) for a, n, b, m in zip(self.offset, self.size, other.offset, other.size, strict=True))
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: Box) -> Box:
        """The same box, counted from where an outer one begins."""
        return Box(tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)), self.size)


def box_of(shape: Sequence[int], cuts: Sequence[Cut], place: Located) -> Box:
    """What some cuts leave of a tensor of this shape on the rank of this place."""
    offset, size = [0] * len(shape), list(shape)
    for axis, dim in cuts:
        start, stop = shard_bounds(size[dim], place.size(axis), place.index(axis))
        offset[dim], size[dim] = offset[dim] + start, stop - start
    return Box(tuple(offset), tuple(size))
