"""Which span encloses which on the threads of a host. Operators, modules and labels open and close like brackets, so at any
moment a thread has one innermost open span; finding it for a million launches is a binary search, once the brackets are
laid out as a line of changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Nest:
    """Spans of some threads as brackets. Numbers are positions in the arrays it was made of; -1 is none."""

    parent: Integers
    """The span that directly encloses each."""
    _moments: Integers
    """All times at which spans begin or end. Lanes are laid one after the other, each as long as there are moments, so that keys
    stay small whatever the times are."""
    _keys: Integers
    _open: Integers

    def innermost(self, lane: NDArray[np.integer], time: Integers) -> Integers:
        """The innermost span open at these times on these lanes: one that began at or before, and ends after."""
        if not len(self._keys):
            return np.full(len(time), -1, np.int64)
        moment = np.searchsorted(self._moments, time, side="right") - 1
        at = np.searchsorted(self._keys, lane.astype(np.int64) * len(self._moments) + moment, side="right") - 1
        return np.where((moment >= 0) & (lane >= 0) & (at >= 0), self._open[at], -1)

    def pieces(self) -> tuple[Integers, Integers, Integers]:
        """Each span's own time, when no span inside it was open: span, start and end of every piece."""
        if not len(self._keys):
            none = np.zeros(0, np.int64)
            return none, none, none
        span, time = self._open, self._moments[self._keys % len(self._moments)]
        kept = span[:-1] >= 0
        return span[:-1][kept], time[:-1][kept], time[1:][kept]


def distinct(numbers: Integers) -> Integers:
    """Each number once, in order. By sorting, which on times that are nearly in order is several times faster than
    `np.unique`, which hashes."""
    ordered = np.sort(numbers, kind="stable")
    return ordered[np.append(np.ones(min(len(ordered), 1), np.bool_), ordered[1:] != ordered[:-1])]


def nest(lane: NDArray[np.integer], start: Integers, end: Integers) -> Nest:
    """The nesting of spans that are sorted by start, of equal starts the longer first. A span that outlives the one it began
    in is cut at that one's end, as a profiler would draw it."""
    moments = distinct(np.concatenate((start, end)))
    base = lane.astype(np.int64) * len(moments)
    first, last = np.searchsorted(moments, start) + base, np.searchsorted(moments, end) + base
    # A span of no length encloses nothing and never is the innermost.
    order = np.flatnonzero(end > start)
    order = order[np.lexsort((order, -last[order], first[order]))]
    parent, cut = _parents(first[order], last[order])
    keys, opened = _changes(first[order], cut, parent)
    # Back to the numbers of the caller.
    enclosing = np.full(len(start), -1, np.int64)
    enclosing[order] = np.where(parent >= 0, order[parent], -1)
    found = Nest(enclosing, moments, keys, np.where(opened >= 0, order[opened], -1))
    short = np.flatnonzero(end <= start)
    enclosing[short] = found.innermost(lane[short], start[short])
    return found


def _parents(first: Integers, last: Integers) -> tuple[Integers, Integers]:
    """The encloser of each span, and ends cut to their encloser's."""
    count = len(first)
    # A span is as deep as there are spans that began before it and have not ended when it begins.
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
    """The same for spans that overlap without nesting: one by one."""
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
    """Times at which the innermost open span changes, and what it is from then on."""
    count = len(first)
    here = np.arange(count)
    times = np.concatenate((first, last))
    opened = np.concatenate((here, parent))
    # At one moment ends come first, inner before outer, then starts, outer before inner.
    begins = np.repeat((1, 0), count)
    order = np.lexsort((np.concatenate((here, -here)), begins, times))
    times, opened = times[order], opened[order]
    final = np.append(times[1:] != times[:-1], np.ones(min(count, 1), np.bool_))
    return times[final], opened[final]
