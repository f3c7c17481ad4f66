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
    _times: Integers
    _open: Integers
    _reach: int
    _low: int

    def innermost(self, lane: NDArray[np.integer], time: Integers) -> Integers:
        """The innermost span open at these times on these lanes: one that began at or before, and ends after."""
        if not len(self._times):
            return np.full(len(time), -1, np.int64)
        keys = lane.astype(np.int64) * self._reach + np.clip(time - self._low, -1, self._reach - 2)
        at = np.searchsorted(self._times, keys, side="right") - 1
        found = np.where(at >= 0, self._open[at], -1)
        return np.where((time >= self._low) & (time < self._low + self._reach - 2), found, -1)

    def pieces(self) -> tuple[Integers, Integers, Integers]:
        """Each span's own time, when no span inside it was open: span, start and end of every piece."""
        if not len(self._times):
            none = np.zeros(0, np.int64)
            return none, none, none
        span, start, end = self._open[:-1], self._times[:-1], self._times[1:]
        kept = (span >= 0) & (end > start)
        lanes = start[kept] // self._reach * self._reach
        return span[kept], start[kept] - lanes + self._low, end[kept] - lanes + self._low


def nest(lane: NDArray[np.integer], start: Integers, end: Integers) -> Nest:
    """The nesting of spans that are sorted by start, of equal starts the longer first. A span that outlives the one it began
    in is cut at that one's end, as a profiler would draw it."""
    count = len(start)
    if not count:
        none = np.zeros(0, np.int64)
        return Nest(none, none, none, 1, 0)
    low = int(start.min())
    reach = int(end.max()) - low + 4
    base = lane.astype(np.int64) * reach - low
    # A span of no length encloses nothing and never is the innermost.
    order = np.flatnonzero(end > start)
    order = order[np.lexsort((order, -(end + base)[order], (start + base)[order]))]
    first, last = (start + base)[order], (end + base)[order]
    parent, last = _parents(first, last)
    times, opened = _changes(first, last, parent)
    # Back to the numbers of the caller.
    found = Nest(np.full(count, -1, np.int64), times, np.where(opened >= 0, order[opened], -1), reach, low)
    found.parent[order] = np.where(parent >= 0, order[parent], -1)
    short = np.flatnonzero(end <= start)
    found.parent[short] = found.innermost(lane[short], start[short])
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
