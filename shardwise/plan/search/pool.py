"""The candidates of a search: of all layouts, as they were screened, those worth playing.

A small space is taken whole. Of a large one the fastest are kept, and the fastest for each amount of memory; the pool knows up to
which time it has left nothing out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwise.plan.search.screen import Group, LayoutIndex, Screened, Space

PLAY_ALL = 2500
"""Spaces of so many layouts are played whole: that takes less than a second."""
LEAST_MEMORY = 0.84
"""What a layout needs is at least so much of what was screened. Of the 11,000 layouts of 70 drawn small jobs
(tests/plan/all_layouts.py) one needs as little as 0.845, one in a hundred less than 0.93."""
LEAST_MEMORY_OF_MANY = 0.92
"""The same in a large space. Of the layouts of large models that tests/plan/test_search.py draws none needs less than 0.936."""
LEAST_TIME = 0.96
"""The same of a step's time in a large space. Among the 3000 fastest of five searches on 64 to 16,384 devices 0.968 is the
least."""
LEAST_TIME_OF_FEW = 0.75
"""The same in small jobs, where the host limits a step. All of them are played."""
SLOWER = 1.6
"""Layouts that take this many times the best one's step are of no interest, however lean."""
RECOMPUTING = 1.5
"""The most that full recomputation takes of the time of none: one more forward pass, which takes no longer than a backward pass."""
BINS = 48
"""Steps of memory on the front while screening."""
SAMPLE = 23
"""Every so many layouts of one schedule are screened first."""
POOL = 1000
"""The fastest candidates that are kept of a large space; if they do not suffice, more."""


class Candidate(NamedTuple):
    """A layout that may be among the best, as it was screened."""

    seconds: float
    memory: float
    group: Group
    layout: LayoutIndex


class Candidates(NamedTuple):
    """What is worth playing, the fastest first."""

    found: list[Candidate]
    complete: float
    """No layout that was screened as faster than this is missing."""
    recomputing: list[tuple[Group, Screened]]
    """Rows that recompute everything, fit, and may be among the fastest with a part of that."""


class _Pool:
    """The fastest candidates so far, and the fastest for each amount of memory."""

    def __init__(self, most_memory: float, most: int) -> None:
        self.most_memory, self.most = most_memory, most
        self.recomputing: list[tuple[Group, Screened]] = []
        self.front = np.full(BINS, np.inf)
        self.slowest = self.limit = np.inf
        self.found: list[tuple[float, float, Group, str, int, int, int]] = []

    def look(self, one: Screened) -> None:
        """Takes note of how fast a layout can be: those that are slower by more than a factor are not looked at any more."""
        fits = one.seconds[:, one.memory <= self.most_memory]
        if fits.size:
            self.limit = min(self.limit, SLOWER * float(fits.min()))

    def add(self, group: Group, one: Screened) -> None:
        """Take what is among the fastest, or faster than all that are as lean."""
        self.recomputing += _recomputing(group, one, RECOMPUTING / SLOWER * self.limit)
        steps = np.minimum(one.memory * (BINS / self.most_memory), BINS - 1).astype(np.int64)
        fast = np.where(one.memory <= self.most_memory, np.maximum(self.front[steps], self.slowest), -1.0)
        fast = np.minimum(fast, self.limit)
        method, row = np.nonzero(one.seconds < fast)
        if not len(row):
            return
        seconds, memory = one.seconds[method, row], one.memory[row]
        if len(row) > self.most:
            keep = np.argpartition(seconds, self.most)[: self.most]
            self.slowest = min(self.slowest, float(seconds[keep].max()))
            leanest = [np.flatnonzero(steps[row] == n) for n in np.unique(steps[row])]
            keep = np.unique([*keep, *(at[seconds[at].argmin()] for at in leanest)])
            method, row, seconds, memory = method[keep], row[keep], seconds[keep], memory[keep]
        self.look(one)
        np.minimum.at(self.front, steps[row], seconds)
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
        return Candidates(every, min(self.slowest, self.limit), self.recomputing)


def _recomputing(group: Group, one: Screened, most: float) -> list[tuple[Group, Screened]]:
    """The rows that recompute everything, fit, and take less than so many seconds."""
    words = group.space.choices.recompute
    if "full" not in words or "none" not in words:
        return []
    full = one.rows // (group.shape[1] * group.shape[2]) == words.index("full")
    (kept,) = np.nonzero(full & (one.memory <= group.space.capacity) & (one.seconds < most).any(axis=0))
    few = one._replace(rows=one.rows[kept], seconds=one.seconds[:, kept], memory=one.memory[kept])
    return [(group, few)] if len(kept) else []


def screen_all(space: Space, most: int, most_memory: float) -> Candidates:
    """The layouts worth playing of all that need no more memory: so many of the fastest, and the fastest for each amount."""
    pool = _Pool(most_memory, most)
    for group in space.groups:  # a sample, so that most of the rest is known to be too slow without a closer look
        for one in group.screen(group.schedules[:1], group.rows()[::SAMPLE], pool.most_memory, pool.limit):
            pool.look(one)
    for group in space.groups:
        for one in group.screen(group.schedules, group.rows(), pool.most_memory, pool.limit):
            pool.add(group, one)
    return pool.candidates()


def all_candidates(space: Space, most_memory: float) -> Candidates:
    """All that need no more memory."""
    found = []
    recomputing = []
    for group in space.groups:
        for one in group.screen(group.schedules, group.rows(), most_memory):
            recomputing += _recomputing(group, one, np.inf)
            there = np.isfinite(one.seconds) & (one.memory <= most_memory)
            for method, n in zip(*(x.tolist() for x in np.nonzero(there)), strict=True):
                index = LayoutIndex(one.schedule, one.chunks, method, int(one.rows[n]))
                found.append(Candidate(float(one.seconds[method, n]), float(one.memory[n]), group, index))
    return Candidates(sorted(found, key=lambda c: c.seconds), np.inf, recomputing)
