"""Boxes (slices) of tensors: the box that cuts leave on a rank, and the intersection of two boxes. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

from shardwise.run.parameters import Cut, shard_bounds


class Located(Protocol):
    """An object that knows a rank's index in each of its groups."""

    def size(self, group: str, /) -> int:
        """Ranks in a group."""

    def index(self, group: str, /) -> int:
        """The rank's index in a group."""


@dataclass(frozen=True)
class Box:
    """A box of a full tensor: its offset and size in each dimension."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.size)

    def common(self, other: Box) -> Box | None:
        """The intersection of two boxes; None if it is empty."""
        starts = tuple(map(max, self.offset, other.offset))
        ends = (min(a + n, b + m) for a, n, b, m in zip(self.offset, self.size, other.offset, other.size, strict=True))
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: Box) -> Box:
        """The same box, with offsets relative to an outer box."""
        return Box(tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)), self.size)


def box_of(shape: Sequence[int], cuts: Sequence[Cut], place: Located) -> Box:
    """The box that some cuts leave of a tensor of this shape on one rank."""
    offset, size = [0] * len(shape), list(shape)
    for axis, dim in cuts:
        start, stop = shard_bounds(size[dim], place.size(axis), place.index(axis))
        offset[dim], size[dim] = offset[dim] + start, stop - start
    return Box(tuple(offset), tuple(size))
