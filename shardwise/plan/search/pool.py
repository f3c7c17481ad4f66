"""The candidates of a search: those of the screened layouts that are worth simulating.

All layouts of a small space are candidates. Of a large one the pool keeps the fastest, and the fastest for each amount of memory;
it knows up to which time it has left nothing out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from shardwise.plan.search.screen import Group, Space
from shardwise.plan.search.screened import LayoutIndex, Screened

Array = Any
PLAY_ALL = 2500
"""Spaces of up to this many layouts are simulated completely: that takes less than a second."""
LEAST_MEMORY = 0.75
"""A layout's exact memory is at least this share of its screened memory. Among the 11,000 layouts of 70 random small jobs
(tests/plan/all_layouts.py) the lowest share is 0.845 and one in a hundred is below 0.93; with a recompute budget on
ranks that are not alike 0.76 was seen (dualpipe-v)."""
LEAST_MEMORY_OF_MANY = 0.92
"""The same in a large space. None of the random layouts of large models in tests/plan/test_search.py is below 0.936."""
LEAST_TIME = 0.95
"""The same for a step's time in a large space, for the layouts that may be the best. Of those within 5% of the best of twelve
searches on 64 to 16,384 H100s and H200s the lowest is 0.955; of the 1500 fastest it is 0.948."""
LEAST_TIME_OF_SPLIT = 0.968
"""The same for schedules that split the backward pass. Of nine such searches six have none below 0.975; three have some at 0.939
to 0.947, which are missed if they are the best. A bound of 0.93 simulates eight times as many layouts of Llama 3 405B."""
LEAST_TIME_OF_REST = 0.98
"""The same for the rest of a ranking, whose order is less worth knowing: of layouts within 5% of the best, one in ten is below."""
LEAST_TIME_OF_FEW = 0.75
"""The same in small jobs, where the host limits a step. All of their layouts are simulated."""
SLOWER = 1.6
"""Layouts whose step takes more than this many times the best one's are dropped, however little memory they need."""
BINS = 48
"""Memory bins of the Pareto front while screening."""
ABOVE = 1 + 1e-9
"""A time limit taken from a layout is raised by this factor, so that the layout itself passes the strict comparison."""
SAMPLE = 23
"""Every this-many-th layout of one schedule is screened first."""
MARGIN = 1.02
"""Layouts up to this many times as slow as the best of the sample are screened next. It often suffices, and else all are."""
POOL = 1000
"""The number of fastest candidates kept of a large space; more if these do not suffice."""


class Candidate(NamedTuple):
    """A layout that may be among the best, with its screened figures."""

    seconds: float
    memory: float
    group: Group
    layout: LayoutIndex


class Candidates(NamedTuple):
    """The layouts worth simulating, the fastest first."""

    found: list[Candidate]
    complete: float
    """No layout with fewer screened seconds than this is missing."""


class Within(NamedTuple):
    """A limit of seconds and bytes."""

    seconds: float
    memory: float

    def seconds_with(self, memory: Array) -> Array:
        return np.where(memory <= self.memory, self.seconds, -1.0)


class _Pool:
    """The fastest candidates so far and, with `lean`, also the fastest for each amount of memory."""

    def __init__(self, most_memory: float, most: int, lean: bool) -> None:
        self.most_memory, self.most, self.lean = most_memory, most, lean
        self.front = np.full(BINS, np.inf if lean else -np.inf)
        self.slowest = self.limit = self.cut = np.inf
        self.seen = np.zeros(0)
        self.found: list[tuple[float, float, Group, str, int, int, int]] = []

    def look(self, one: Screened) -> Array:
        """Lowers the time limit to `SLOWER` times the fastest layout that fits. Returns the seconds of all that fit."""
        fits = one.seconds[:, one.memory <= self.most_memory]
        if fits.size:
            self.limit = min(self.limit, SLOWER * float(fits.min()))
        return fits.ravel()

    def rank(self, seconds: Array) -> None:
        """Records the seconds of more layouts that fit. The slowest of the `most` fastest of all layouts is no slower than the
        slowest of the `most` fastest of a subset."""
        self.seen = np.append(self.seen, seconds[seconds < self.slowest])
        if len(self.seen) > self.most:
            self.seen = np.partition(self.seen, self.most)[: self.most + 1]
            self.slowest = ABOVE * float(self.seen[-1])

    def _steps(self, memory: Array) -> Array:
        return np.minimum(memory * (BINS / self.most_memory), BINS - 1).astype(np.int64)

    @property
    def seconds(self) -> float:
        """Layouts that take longer are dropped, however little memory they need."""
        return min(self.limit, self.cut, max(self.slowest, float(self.front.max())))

    def seconds_with(self, memory: Array) -> Array:
        """Layouts with this memory that take longer are neither among the fastest nor the fastest for their memory."""
        fast = np.maximum(self.front[self._steps(memory)], self.slowest)
        return np.where(memory <= self.most_memory, np.minimum(fast, min(self.limit, self.cut)), -1.0)

    def fill(self, groups: list[Group]) -> None:
        """Screens all layouts of the groups that may be within the limits."""
        for group in groups:
            for one in group.screen(group.schedules, group.rows(), self):
                self.add(group, one)

    def add(self, group: Group, one: Screened) -> None:
        """Adds layouts that are among the fastest, or faster than all that need as little memory."""
        steps = self._steps(one.memory)
        method, row = np.nonzero(one.seconds < self.seconds_with(one.memory))
        if not len(row):
            return
        seconds, memory = one.seconds[method, row], one.memory[row]
        self.rank(seconds)
        if len(row) > self.most:
            keep = np.argpartition(seconds, self.most)[: self.most]
            leanest = [np.flatnonzero(steps[row] == n) for n in np.unique(steps[row]) if self.lean]
            keep = np.unique([*keep, *(at[seconds[at].argmin()] for at in leanest)])
            method, row, seconds, memory = method[keep], row[keep], seconds[keep], memory[keep]
        self.look(one)
        np.minimum.at(self.front, steps[row], seconds)  # changes nothing without `lean`
        np.minimum.accumulate(self.front, out=self.front)
        rows = one.rows[row].tolist()
        for s, b, m, r in zip(seconds.tolist(), memory.tolist(), method.tolist(), rows, strict=True):
            self.found.append((s, b, group, one.schedule, one.chunks, m, r))
        if len(self.found) > 4 * self.most:
            self._prune()

    def _prune(self) -> None:
        self.found.sort(key=lambda c: c[0])
        fast, rest = self.found[: self.most], self.found[self.most :]
        lean = (c for c in rest if c[0] <= self.front[min(int(c[1] * BINS / self.most_memory), BINS - 1)])
        self.found = [*fast, *lean]
        self.slowest = min(self.slowest, fast[-1][0])

    def candidates(self) -> Candidates:
        """The fastest first."""
        self._prune() if len(self.found) > self.most else self.found.sort(key=lambda c: c[0])
        every = [Candidate(c[0], c[1], c[2], LayoutIndex(*c[3:])) for c in self.found]
        return Candidates(every, min(self.slowest, self.limit))


def screen_all(space: Space, most: int, most_memory: float, *, lean: bool = True) -> Candidates:
    """The layouts worth simulating among those within `most_memory`: the `most` fastest and, with `lean`, the fastest for each
    amount of memory, which evaluates many more layouts in full."""
    # Most are ruled out by their time bound: first against a sample, then against layouts that may beat its best.
    some, quick, pool = (_Pool(most_memory, most, it) for it in (False, False, lean))
    groups = sorted(space.groups, key=lambda one: one.promises)
    for group in groups:
        if group.promises > some.limit / SLOWER:  # no group from here on is faster than the best so far
            break
        for one in group.screen(group.schedules[:1], group.rows()[::SAMPLE], some):
            some.rank(some.look(one))
    quick.limit, quick.cut = some.limit, MARGIN * ABOVE * some.limit / SLOWER
    quick.fill(groups)
    if quick.slowest <= quick.cut and not lean:
        return quick.candidates()
    pool.limit, pool.slowest = quick.limit, min(quick.slowest, some.slowest)
    pool.fill(groups)
    return pool.candidates()


def all_candidates(space: Space, most_memory: float) -> Candidates:
    """All layouts within `most_memory`."""
    found = []
    for group in space.groups:
        for one in group.screen(group.schedules, group.rows()):
            there = np.isfinite(one.seconds) & (one.memory <= most_memory)
            for method, n in zip(*(x.tolist() for x in np.nonzero(there)), strict=True):
                index = LayoutIndex(one.schedule, one.chunks, method, int(one.rows[n]))
                found.append(Candidate(float(one.seconds[method, n]), float(one.memory[n]), group, index))
    return Candidates(sorted(found, key=lambda c: c.seconds), np.inf)
