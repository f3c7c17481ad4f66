"""The best layout of a job on its devices: all legal ones screened by closed forms, the best played action by action.

`search` is for people, who want a ranking, what was ruled out and what would come next; `resolve` for programs that only
need a layout. Screened figures choose what is worth playing; everything in the result is planned in full.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from shardwise.plan.job import job_of
from shardwise.plan.memory import memory
from shardwise.plan.plan import Plan, plan_job
from shardwise.plan.search.advice import counts_of, next_changes, nothing_fits, nothing_legal
from shardwise.plan.search.layouts import Space
from shardwise.plan.search.room import keeping
from shardwise.plan.search.screen import Group, Place, Screened
from shardwise.plan.step import prepare, step_times
from shardwise.run import Run

BAND = 1.05
"""Screened memory may be off by so much: what is nearer to the capacity is planned before it is ruled out."""
SLOWER = 1.6
"""Layouts that take this many times the best one's step are of no interest, however lean."""
BINS = 48
"""Steps of memory in which the front is kept while screening."""
POOL, PLAYED = 600, 240
"""Candidates kept while screening, and the most that are played."""
SAMPLE = 23
"""Every so many layouts of one schedule are screened first."""
FRONT = 8
"""Layouts of the front, at most."""


class Candidate(NamedTuple):
    """A layout that may be among the best."""

    seconds: float
    memory: float
    group: Group
    place: Place


@dataclass(frozen=True)
class SearchResult:
    """What was found, best first."""

    ranking: list[Plan]
    """By device-seconds of a step, which on one number of devices is the step's time."""
    next_changes: list[str]
    """For each, what the best change of one key would bring."""
    searched: int
    """Legal layouts."""
    simulated: int
    """Of these, schedules played in full; the others were screened."""
    seconds: float
    """That the search took."""
    front: list[Candidate] = field(repr=False)

    @cached_property
    def pareto(self) -> list[Plan]:
        """Layouts that none beats in step time, memory and devices at once; planned when asked for."""
        return [plan for plan, _ in _plan(self.front)]

    @property
    def best(self) -> Plan:
        """The first of the ranking."""
        return self.ranking[0]

    def as_dict(self) -> dict[str, Any]:
        """For programs; names are stable."""
        ranking = [p.as_dict() | {"next_change": c} for p, c in zip(self.ranking, self.next_changes, strict=True)]
        front = [p.as_dict() for p in self.pareto]
        return {"searched": self.searched, "simulated": self.simulated, "ranking": ranking, "pareto": front}


def search(
    run: Run,
    *,
    devices: Sequence[int] | None = None,
    keep: int = 20,
    max_microbatch: int = 0,
    progress: Callable[[float], None] | None = None,
) -> SearchResult:
    """The best layouts of a run whose layout is `auto`, on its cluster or on each of several numbers of devices.

    `progress` is called with the share that is done. Raises `UserError` with every reason where nothing is legal or fits.
    """
    start = time.perf_counter()
    counts, per_node = counts_of(run, devices, keep, max_microbatch)
    timed: list[tuple[float, Candidate]] = []
    searched = 0
    empty: list[Space] = []
    for n, count in enumerate(counts):
        space = Space(run, count, per_node, max_microbatch)
        searched += space.count
        pool = screen_all(space, keep, _part(progress, n, len(counts)))
        if not pool:
            empty.append(space)
        timed += _play(pool, keep)
    if not any(space.count for space in empty) and len(empty) == len(counts):
        raise nothing_legal(run, counts, per_node, max_microbatch)
    ranking, chosen = _plans(timed, keep)
    if not ranking:
        raise nothing_fits(run, [s for s in empty if s.count] or [Space(run, counts[-1], per_node, max_microbatch)])
    pairs = zip(chosen, ranking, strict=True)
    changes = next_changes([(c.group, c.place, plan.account.step_seconds) for c, plan in pairs])
    kept = keeping(ranking[0]) if "recompute" not in run.layout.fixed else None
    if kept is not None:
        ranking, changes = [kept[0], *ranking][:keep], [kept[1], *changes][:keep]
    took = time.perf_counter() - start
    return SearchResult(ranking, changes, searched, len(timed), took, _front(timed)[: FRONT * len(counts)])


def resolve(run: Run) -> Run:
    """The run with the best layout filled in; one whose layout is given comes back as it is."""
    return search(run, keep=1).best.run if run.layout.auto else run


def _part(progress: Callable[[float], None] | None, n: int, of: int) -> Callable[[float], None]:
    return lambda share: progress((n + share) / of) if progress else None


class _Pool:
    """The fastest candidates so far, and the fastest for each amount of memory."""

    def __init__(self, room: float, keep: int) -> None:
        self.room, self.most = room, max(POOL, 4 * keep)
        self.front = np.full(BINS, np.inf)
        self.slowest = self.limit = np.inf
        self.found: list[tuple[float, float, Group, str, int, int, int]] = []

    def look(self, one: Screened) -> None:
        """Only take note of how fast a layout can be; slower ones than a share of that are not looked at any more."""
        fits = one.seconds[:, one.memory <= self.room]
        if fits.size:
            self.limit = min(self.limit, SLOWER * float(fits.min()))

    def add(self, group: Group, one: Screened) -> None:
        """Take what is among the fastest, or faster than all that are as lean."""
        steps = np.minimum(one.memory * (BINS / self.room), BINS - 1).astype(np.int64)
        fast = np.where(one.memory <= self.room, np.maximum(self.front[steps], self.slowest), -1.0)
        fast = np.minimum(fast, self.limit)
        method, row = np.nonzero(one.seconds < fast)
        if not len(row):
            return
        seconds, memory = one.seconds[method, row], one.memory[row]
        if len(row) > self.most:
            keep = np.argpartition(seconds, self.most)[: self.most]
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
        lean = (c for c in rest if c[0] <= self.front[min(int(c[1] * BINS / self.room), BINS - 1)])
        self.found = [*fast, *lean]
        self.slowest = fast[-1][0]

    def candidates(self) -> list[Candidate]:
        """The fastest first."""
        self._prune() if len(self.found) > self.most else self.found.sort(key=lambda c: c[0])
        return [Candidate(c[0], c[1], c[2], Place(*c[3:])) for c in self.found]


def screen_all(space: Space, keep: int, progress: Callable[[float], None]) -> list[Candidate]:
    """The layouts worth playing of all there are: the fastest, and the fastest for each amount of memory."""
    pool, done = _Pool(BAND * space.capacity, keep), 0
    for group in space.groups:  # a sample, so that most of the rest is known to be too slow without a closer look
        for one in group.screen(group.schedules[:1], group.rows()[::SAMPLE], pool.room, pool.limit):
            pool.look(one)
    for group in space.groups:
        for one in group.screen(group.schedules, group.rows(), pool.room, pool.limit):
            pool.add(group, one)
        done += group.count
        progress(done / space.count)
    return pool.candidates()


def _play(pool: list[Candidate], keep: int) -> list[tuple[float, Candidate]]:
    """Step seconds by playing the schedules: of the front, and of the fastest."""
    lean = _front([(c.seconds, c) for c in pool])[:FRONT]
    fast = list(_different(pool)) if len(pool) > PLAYED else pool
    candidates = list(dict.fromkeys([*lean, *fast]))[: max(PLAYED, keep)]
    steps = step_times([candidate.group.prepared_at(candidate.place) for candidate in candidates])
    return [(step.seconds, candidate) for step, candidate in zip(steps, candidates, strict=True)]


def _different(pool: list[Candidate]) -> Iterator[Candidate]:
    """Candidates without those that come out the same as one before in everything but how data ranks share."""
    seen: set[tuple[Any, ...]] = set()
    for candidate in pool:
        group, place = candidate.group, candidate.place
        size = group.sizes.at(place.row % group.shape[2])
        words = group.words(place)
        step = round(math.log(candidate.seconds) / 0.002)
        same = (step, *size[2:], place.schedule, place.chunks, words["recompute"], words["context_method"])
        if same not in seen:
            seen.add(same)
            yield candidate


def _plans(timed: list[tuple[float, Candidate]], keep: int) -> tuple[list[Plan], list[Candidate]]:
    """Plans of the best that really fit, and the candidates they come from."""
    chosen: list[tuple[Plan, Candidate]] = []
    best = list(_chunks_apart([c for _, c in sorted(timed, key=lambda one: one[0] * one[1].group.space.devices)]))
    for start in range(0, len(best), keep):
        some = best[start : start + keep]
        chosen += islice(_plan(some, precise=not chosen), keep - len(chosen))
        if len(chosen) == keep:
            break
    return [plan for plan, _ in chosen], [candidate for _, candidate in chosen]


def _chunks_apart(best: list[Candidate]) -> Iterator[Candidate]:
    """Without those that differ from a better one in the number of chunks alone, which would crowd a ranking."""
    seen: set[tuple[Any, ...]] = set()
    for candidate in best:
        group, (schedule, _, method, row) = candidate.group, candidate.place
        if (group, schedule, method, row) not in seen:
            seen.add((group, schedule, method, row))
            yield candidate


def _plan(candidates: Sequence[Candidate], *, precise: bool = False) -> Iterator[tuple[Plan, Candidate]]:
    """Plans of those that fit; with `precise` the first of them to the byte, since it is the one that people will run."""
    runs = [candidate.group.run_at(candidate.place) for candidate in candidates]
    jobs = [job_of(run) for run in runs]
    steps = step_times([prepare(job) for job in jobs])
    for candidate, run, job, step in zip(candidates, runs, jobs, steps, strict=True):
        space = memory(job)
        if not precise and not space.fits:
            continue
        plan = plan_job(run, job, step, space, precise=precise)
        if plan.fits:
            precise = False
            yield plan, candidate


def _front(timed: list[tuple[float, Candidate]]) -> list[Candidate]:
    """Those that none beats in time, memory and devices, with steps of memory that matter."""
    front: list[tuple[float, float, int, Candidate]] = []
    for seconds, candidate in sorted(timed, key=lambda one: one[0]):
        devices, memory = candidate.group.space.devices, candidate.memory
        if all(memory < 0.97 * other[1] or devices < other[2] for other in front):
            front.append((seconds, memory, devices, candidate))
    return [one[3] for one in front]
