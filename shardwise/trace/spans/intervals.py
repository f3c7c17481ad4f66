"""Arithmetic on time in integer nanoseconds: union, intersection, difference and length of sets of intervals; nesting and self time
of the spans of a thread.

Everything is a sort, a cumulative sum or a binary search over integer arrays, so it is exact and fast. Intervals are half-open:
they include their start and not their end, so two that touch are one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.trace.reading.integers import NONE, Integers


class Intervals(NamedTuple):
    """A set of disjoint intervals: sorted, none empty, none touching another."""

    start: Integers
    end: Integers


def union(start: Integers, end: Integers) -> Intervals:
    """The union of intervals, which may overlap, be empty and come in any order."""
    nonempty = end > start
    start, end = start[nonempty], end[nonempty]
    if not len(start):
        return empty()
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate(([True], start[1:] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return Intervals(start[first], reach[last])


def empty() -> Intervals:
    """The empty set."""
    return Intervals(np.zeros(0, np.int64), np.zeros(0, np.int64))


def window(start: int, end: int) -> Intervals:
    """One interval."""
    return union(np.array([start], np.int64), np.array([end], np.int64))


def total(intervals: Intervals) -> int:
    """Total length."""
    return int((intervals.end - intervals.start).sum())


def covered(intervals: Intervals, time: Integers) -> Integers:
    """How much of a set lies before each time. The difference of two such numbers is the set's length between the two times."""
    if not len(intervals.start):
        return np.zeros(len(time), np.int64)
    before = np.concatenate(([0], np.cumsum(intervals.end - intervals.start)))
    at = np.searchsorted(intervals.start, time, side="right")
    last = np.maximum(at - 1, 0)
    return before[at] - np.where(at > 0, np.maximum(intervals.end[last] - time, 0), 0)


def clip(intervals: Intervals, start: int, end: int) -> Intervals:
    """The part of a set between two times; takes as long as that part is large, however large the set is."""
    low = int(np.searchsorted(intervals.end, start, side="right"))
    high = max(int(np.searchsorted(intervals.start, end, side="left")), low)
    return Intervals(np.maximum(intervals.start[low:high], start), np.minimum(intervals.end[low:high], end))


def unions(group: Integers, start: Integers, end: Integers) -> tuple[Integers, Intervals]:
    """The union of the intervals of each group: the group of every interval found, and the interval."""
    moments = distinct(np.concatenate((start, end)))
    base = group * len(moments)
    found = union(np.searchsorted(moments, start) + base, np.searchsorted(moments, end) + base)
    count = max(len(moments), 1)
    return found.start // count, Intervals(moments[found.start % count], moments[found.end % count])


def parts(group: NDArray[np.integer]) -> list[tuple[int, Integers]]:
    """Each group that occurs, ascending, with the positions where it does."""
    order = np.argsort(group, kind="stable")
    first = np.flatnonzero(np.append(np.ones(min(len(order), 1), np.bool_), np.diff(group[order]) != 0))
    return list(zip(group[order[first]].tolist(), np.split(order, first[1:]), strict=True)) if len(order) else []


def sums(group: NDArray[np.integer], value: NDArray[Any], count: int) -> NDArray[Any]:
    """Sums of values by group, of integers as integers; `np.bincount` would sum floats."""
    found = np.zeros(count, value.dtype)
    np.add.at(found, group, value)
    return found


def join(*sets: Intervals) -> Intervals:
    """The union of sets."""
    return union(np.concatenate([s.start for s in sets]), np.concatenate([s.end for s in sets]))


def intersect(one: Intervals, other: Intervals) -> Intervals:
    """The time in both sets. Also clips a set to windows."""
    times, in_one, in_other = _sweep(one, other)
    return _where(times, in_one & in_other)


def difference(one: Intervals, other: Intervals) -> Intervals:
    """The time in the first set and not in the other."""
    times, in_one, in_other = _sweep(one, other)
    return _where(times, in_one & ~in_other)


def _sweep(one: Intervals, other: Intervals) -> tuple[Integers, NDArray[np.bool_], NDArray[np.bool_]]:
    """Sorted edges of both sets, and whether the time after each edge is in the one and in the other set."""
    times = np.concatenate((one.start, one.end, other.start, other.end))
    changes = np.repeat((1, -1, 0, 0), [len(one.start)] * 2 + [len(other.start)] * 2)
    other_changes = np.repeat((0, 0, 1, -1), [len(one.start)] * 2 + [len(other.start)] * 2)
    order = np.argsort(times, kind="stable")
    return times[order], np.cumsum(changes[order]) > 0, np.cumsum(other_changes[order]) > 0


def _where(times: Integers, mask: NDArray[np.bool_]) -> Intervals:
    """The intervals between neighbouring times where the mask holds."""
    if not len(times):
        return empty()
    return union(times[:-1][mask[:-1]], times[1:][mask[:-1]])


def self_time_segments(track: NDArray[np.int32], start: Integers, end: Integers) -> tuple[Integers, Integers, Integers]:
    """Self time: at each moment a track belongs to the open span that began last. Returns span, start and end of every segment.

    Spans are sorted by start, the longer first at equal starts, as in `Events`. Where they nest, self time excludes the children.
    Where they only overlap, every moment still belongs to exactly one span.

    The result equals painting the spans in order. It is a sparse table of maxima: each span covers its range with two overlapping
    blocks of a power-of-two length, and blocks are pushed down by halves in log(n) passes.
    """
    nonempty = np.flatnonzero(end > start)
    if not len(nonempty):
        return empty().start, empty().start, empty().start
    times = np.concatenate((start[nonempty], end[nonempty]))
    tracks = np.concatenate((track[nonempty], track[nonempty]))
    order = np.lexsort((times, tracks))
    times, tracks = times[order], tracks[order]
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    first, last = position[: len(nonempty)], position[len(nonempty) :]
    # Equal times are several positions with nothing between them; a span may begin or end at any of them.
    level = np.frexp((last - first).astype(np.float64))[1] - 1
    owner = np.full(len(times), NONE, np.int64)
    index = np.arange(len(nonempty))
    for height in range(int(level.max()), -1, -1):
        mask = level == height
        np.maximum.at(owner, first[mask], index[mask])
        np.maximum.at(owner, last[mask] - (1 << height), index[mask])
        if height:
            half = 1 << (height - 1)
            pushed = owner.copy()
            np.maximum(pushed[half:], owner[:-half], out=pushed[half:])
            owner = pushed
    owner, begin, finish = owner[:-1], times[:-1], times[1:]
    own = (owner >= 0) & (finish > begin) & (tracks[1:] == tracks[:-1])
    return nonempty[owner[own]], begin[own], finish[own]


@dataclass(frozen=True)
class Nest:
    """The nesting of spans on threads. Indices are into the arrays it was made from; -1 is none."""

    parent: Integers
    """The span that directly encloses each span."""
    _moments: Integers
    """All times at which spans begin or end, sorted."""
    _keys: Integers
    """Changes of the innermost open span, as keys: track times the number of moments, plus the index of the moment."""
    _open: Integers
    """The innermost open span after each change."""

    def innermost(self, track: NDArray[np.integer], time: Integers) -> Integers:
        """The innermost open span on each track at each time: it began at or before that time and ends after it."""
        if not len(self._keys):
            return np.full(len(time), -1, np.int64)
        moment = np.searchsorted(self._moments, time, side="right") - 1
        at = np.searchsorted(self._keys, track.astype(np.int64) * len(self._moments) + moment, side="right") - 1
        return np.where((moment >= 0) & (track >= 0) & (at >= 0), self._open[at], -1)


def distinct(numbers: Integers) -> Integers:
    """Each number once, sorted. On nearly sorted times this is several times faster than `np.unique`."""
    ordered = np.sort(numbers, kind="stable")
    return ordered[np.append(np.ones(min(len(ordered), 1), np.bool_), ordered[1:] != ordered[:-1])]


def nest(track: NDArray[np.integer], start: Integers, end: Integers) -> Nest:
    """The nesting of spans sorted by start, the longer first at equal starts. A span that outlasts its parent is cut at the end of
    the parent, as profilers draw it."""
    if not len(start):
        return Nest(start, start, start, start)
    moments = distinct(np.concatenate((start, end)))
    base = track.astype(np.int64) * len(moments)
    first, last = np.searchsorted(moments, start) + base, np.searchsorted(moments, end) + base
    # An empty span encloses nothing and is never the innermost.
    order = np.flatnonzero(end > start)
    order = order[np.lexsort((order, -last[order], first[order]))]
    parent, cut = _parents(first[order], last[order])
    keys, opened = _changes(first[order], cut, parent)
    # Back to the caller's indices.
    enclosing = np.full(len(start), -1, np.int64)
    enclosing[order] = np.where(parent >= 0, order[parent], -1)
    found = Nest(enclosing, moments, keys, np.where(opened >= 0, order[opened], -1))
    short = np.flatnonzero(end <= start)
    enclosing[short] = found.innermost(track[short], start[short])
    return found


def _parents(first: Integers, last: Integers) -> tuple[Integers, Integers]:
    """The parent of each span, and ends cut to the parent's."""
    count = len(first)
    # The depth of a span is the number of spans that are open when it begins.
    depth = np.arange(1, count + 1) - np.searchsorted(np.sort(last), first, side="right")
    order = np.argsort(depth, kind="stable")
    keys = depth[order] * count + order
    at = np.searchsorted(keys, (depth - 1) * count + np.arange(count)) - 1
    parent = np.where(at >= 0, order[at], -1)
    parent = np.where((parent >= 0) & (depth[parent] == depth - 1), parent, -1)
    level_ends, level_starts = last[order][:-1], first[order][1:]
    same = depth[order][:-1] == depth[order][1:]
    proper = not np.any(same & (level_ends > level_starts)) and not np.any((parent >= 0) & (last > last[parent]))
    if proper and np.all((depth == 1) == (parent < 0)):
        return parent, last
    return _parents_by_stack(first, last)


def _parents_by_stack(first: Integers, last: Integers) -> tuple[Integers, Integers]:
    """The same for spans that overlap without nesting, one by one with a stack."""
    starts, ends = first.tolist(), last.tolist()
    parent: list[int] = []
    stack: list[int] = []
    for here, start in enumerate(starts):
        while stack and ends[stack[-1]] <= start:
            stack.pop()
        outer = stack[-1] if stack else -1
        parent.append(outer)
        if outer >= 0 and ends[here] > ends[outer]:
            ends[here] = ends[outer]
        stack.append(here)
    return np.array(parent, np.int64), np.array(ends, np.int64)


def _changes(first: Integers, last: Integers, parent: Integers) -> tuple[Integers, Integers]:
    """Times at which the innermost open span changes, and the span after each."""
    count = len(first)
    here = np.arange(count)
    times = np.concatenate((first, last))
    opened = np.concatenate((here, parent))
    # At equal times ends come first, inner before outer; then starts, outer before inner.
    begins = np.repeat((1, 0), count)
    order = np.lexsort((np.concatenate((here, -here)), begins, times))
    times, opened = times[order], opened[order]
    final = np.append(times[1:] != times[:-1], np.ones(min(count, 1), np.bool_))
    return times[final], opened[final]
