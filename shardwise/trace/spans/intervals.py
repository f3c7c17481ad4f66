"""Arithmetic on spans of time in whole nanoseconds. Sets of moments as intervals: union, intersection, difference, length. And
nesting: which span of a thread encloses which.

Everything is a sort, a running sum or a binary search over arrays of integers, so it is exact and fast. An interval includes its
start and not its end, so two that touch are one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.trace.reading.profile import NONE, Integers


class Intervals(NamedTuple):
    """A set of moments: sorted intervals, none empty, none touching another."""

    start: Integers
    end: Integers


def union(start: Integers, end: Integers) -> Intervals:
    """All moments in any of these intervals, which may overlap, be empty and come in any order."""
    some = end > start
    start, end = start[some], end[some]
    if not len(start):
        return nothing()
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate(([True], start[1:] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return Intervals(start[first], reach[last])


def nothing() -> Intervals:
    """The empty set."""
    return Intervals(np.zeros(0, np.int64), np.zeros(0, np.int64))


def window(start: int, end: int) -> Intervals:
    """One interval."""
    return union(np.array([start], np.int64), np.array([end], np.int64))


def total(intervals: Intervals) -> int:
    """Their summed length."""
    return int((intervals.end - intervals.start).sum())


def join(*sets: Intervals) -> Intervals:
    """All moments in any of the sets."""
    return union(np.concatenate([s.start for s in sets]), np.concatenate([s.end for s in sets]))


def intersect(one: Intervals, other: Intervals) -> Intervals:
    """The moments in both. Also clips the first set to windows."""
    times, in_one, in_other = _laid_out(one, other)
    return _where(times, in_one & in_other)


def difference(one: Intervals, other: Intervals) -> Intervals:
    """The moments in the first and not in the other."""
    times, in_one, in_other = _laid_out(one, other)
    return _where(times, in_one & ~in_other)


def covered(intervals: Intervals, start: Integers, end: Integers) -> Integers:
    """For each span from `start` to `end`: how much of it lies in the intervals."""
    return np.maximum(_before(intervals, end) - _before(intervals, start), 0)


def _before(intervals: Intervals, time: Integers) -> Integers:
    """How much of the intervals lies before each time."""
    if not len(intervals.start):
        return np.zeros(len(time), np.int64)
    lengths = intervals.end - intervals.start
    ahead = np.concatenate(([0], np.cumsum(lengths)))
    at = np.searchsorted(intervals.start, time, side="right")
    into = np.minimum(time - intervals.start[at - 1], lengths[at - 1])
    return np.where(at > 0, ahead[at - 1] + into, 0)


def _laid_out(one: Intervals, other: Intervals) -> tuple[Integers, NDArray[np.bool_], NDArray[np.bool_]]:
    """Times at which either set begins or ends, and whether the stretch after each is in the one and in the other."""
    times = np.concatenate((one.start, one.end, other.start, other.end))
    changes = np.repeat((1, -1, 0, 0), [len(one.start)] * 2 + [len(other.start)] * 2)
    other_changes = np.repeat((0, 0, 1, -1), [len(one.start)] * 2 + [len(other.start)] * 2)
    order = np.argsort(times, kind="stable")
    return times[order], np.cumsum(changes[order]) > 0, np.cumsum(other_changes[order]) > 0


def _where(times: Integers, wanted: NDArray[np.bool_]) -> Intervals:
    """The wanted stretches."""
    if not len(times):
        return nothing()
    return union(times[:-1][wanted[:-1]], times[1:][wanted[:-1]])


def own_pieces(lane: NDArray[np.int32], start: Integers, end: Integers) -> tuple[Integers, Integers, Integers]:
    """Each span's self time: when it is the latest to have begun of the spans open on its lane. Gives span, start and end of every
    piece.

    Spans are sorted by start, the longer first at equal starts, as in `Events`. Where they nest, self time is what the children
    leave. Where they only overlap, every moment still has exactly one owner.

    The result is what painting the spans in order would leave. Each span is painted as two overlapping strokes whose length is a
    power of two, and strokes are handed down by halves, which takes log(n) passes.
    """
    kept = np.flatnonzero(end > start)
    if not len(kept):
        return nothing().start, nothing().start, nothing().start
    times = np.concatenate((start[kept], end[kept]))
    lanes = np.concatenate((lane[kept], lane[kept]))
    order = np.lexsort((times, lanes))
    times, lanes = times[order], lanes[order]
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    first, last = position[: len(kept)], position[len(kept) :]
    # Equal times are several positions with nothing between them; a span may begin or end at any of them.
    level = np.frexp((last - first).astype(np.float64))[1] - 1
    owner = np.full(len(times), NONE, np.int64)
    rank = np.arange(len(kept))
    for height in range(int(level.max()), -1, -1):
        these = level == height
        np.maximum.at(owner, first[these], rank[these])
        np.maximum.at(owner, last[these] - (1 << height), rank[these])
        if height:
            half = 1 << (height - 1)
            handed = owner.copy()
            np.maximum(handed[half:], owner[:-half], out=handed[half:])
            owner = handed
    owner, begin, finish = owner[:-1], times[:-1], times[1:]
    own = (owner >= 0) & (finish > begin) & (lanes[1:] == lanes[:-1])
    return kept[owner[own]], begin[own], finish[own]


@dataclass(frozen=True)
class Nest:
    """Spans of threads that open and close like brackets. Indices are into the arrays it was made from; -1 is none."""

    parent: Integers
    """The span that directly encloses each span."""
    _moments: Integers
    """All times at which spans begin or end, sorted."""
    _keys: Integers
    """When the innermost open span changes: lane times the number of moments, plus the index of the moment."""
    _open: Integers
    """The innermost open span from then on."""

    def innermost(self, lane: NDArray[np.integer], time: Integers) -> Integers:
        """The innermost span open at each time on each lane: it began at or before, and ends after."""
        if not len(self._keys):
            return np.full(len(time), -1, np.int64)
        moment = np.searchsorted(self._moments, time, side="right") - 1
        at = np.searchsorted(self._keys, lane.astype(np.int64) * len(self._moments) + moment, side="right") - 1
        return np.where((moment >= 0) & (lane >= 0) & (at >= 0), self._open[at], -1)


def distinct(numbers: Integers) -> Integers:
    """Each number once, sorted. On nearly sorted times this is several times faster than `np.unique`."""
    ordered = np.sort(numbers, kind="stable")
    return ordered[np.append(np.ones(min(len(ordered), 1), np.bool_), ordered[1:] != ordered[:-1])]


def nest(lane: NDArray[np.integer], start: Integers, end: Integers) -> Nest:
    """The nesting of spans sorted by start, the longer first at equal starts. A span that outlives the one it began in is cut at
    that one's end, as a profiler draws it."""
    moments = distinct(np.concatenate((start, end)))
    base = lane.astype(np.int64) * len(moments)
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
    enclosing[short] = found.innermost(lane[short], start[short])
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
    return _swept(first, last)


def _swept(first: Integers, last: Integers) -> tuple[Integers, Integers]:
    """The same for spans that overlap without nesting, one by one."""
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
    """Times at which the innermost open span changes, and which it is from then on."""
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
