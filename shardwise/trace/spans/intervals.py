"""Sets of moments as intervals in whole nanoseconds: union, intersection, difference, length. Exact, because they are integers,
and quick, because each is a sort and a running sum over arrays.

An interval holds its start and not its end, so two that touch are one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.trace.reading.events import NONE, Integers


class Intervals(NamedTuple):
    """A set of moments: intervals in the order of time, none empty, none touching another."""

    start: Integers
    end: Integers


def union(start: Integers, end: Integers) -> Intervals:
    """All moments in any of these intervals, which may overlap and come in any order; empty ones hold none."""
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
    """No moment at all."""
    return Intervals(np.zeros(0, np.int64), np.zeros(0, np.int64))


def window(start: int, end: int) -> Intervals:
    """One interval."""
    return union(np.array([start], np.int64), np.array([end], np.int64))


def total(intervals: Intervals) -> int:
    """How long they are together."""
    return int((intervals.end - intervals.start).sum())


def join(*sets: Intervals) -> Intervals:
    """All moments in any of the sets."""
    return union(np.concatenate([s.start for s in sets]), np.concatenate([s.end for s in sets]))


def intersect(one: Intervals, other: Intervals) -> Intervals:
    """The moments in both; with windows as the other, what is left of the first when clipped to them."""
    times, in_one, in_other = _laid_out(one, other)
    return _chosen(times, in_one & in_other)


def difference(one: Intervals, other: Intervals) -> Intervals:
    """The moments in the first and not in the other."""
    times, in_one, in_other = _laid_out(one, other)
    return _chosen(times, in_one & ~in_other)


def covered(intervals: Intervals, start: Integers, end: Integers) -> Integers:
    """How much of each stretch from `start` to `end` lies in the intervals."""
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
    """Times at which either set begins or ends, and for the stretch after each, whether it is in the one and the other."""
    times = np.concatenate((one.start, one.end, other.start, other.end))
    changes = np.repeat((1, -1, 0, 0), [len(one.start)] * 2 + [len(other.start)] * 2)
    other_changes = np.repeat((0, 0, 1, -1), [len(one.start)] * 2 + [len(other.start)] * 2)
    order = np.argsort(times, kind="stable")
    return times[order], np.cumsum(changes[order]) > 0, np.cumsum(other_changes[order]) > 0


def _chosen(times: Integers, wanted: NDArray[np.bool_]) -> Intervals:
    """The stretches that are wanted."""
    if not len(times):
        return nothing()
    return union(times[:-1][wanted[:-1]], times[1:][wanted[:-1]])


def own_pieces(lane: NDArray[np.int32], start: Integers, end: Integers) -> tuple[Integers, Integers, Integers]:
    """Each span's own time: when it is the latest begun of the spans open on its lane. Span, start and end of every piece.

    Spans are sorted by start, of equal starts the longer first, as `Events` are. They usually nest, and own time is then what
    their children leave; but where they merely overlap, every moment still has exactly one owner and none is lost.

    Painting the spans in order would leave at each moment the last painter. Here a span of length n is painted as two
    overlapping strokes whose length is a power of two, and strokes are handed down halving, so all is done in log(n) passes.
    """
    kept = np.flatnonzero(end > start)
    if not len(kept):
        return nothing().start, nothing().start, nothing().start
    times = np.concatenate((start[kept], end[kept]))
    lanes = np.concatenate((lane[kept], lane[kept]))
    order = np.lexsort((times, lanes))
    times, lanes = times[order], lanes[order]
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    first, last = place[: len(kept)], place[len(kept) :]
    # Equal times are several places with nothing between them; a span may begin or end at any of them.
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
