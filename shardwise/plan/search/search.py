"""The best layout of a job on its devices: all legal ones screened by closed forms, the best played action by action.

`search` is for people, who want a ranking, what was ruled out and what would come next; `resolve` for programs that only
need a layout. Screened figures choose what is worth playing; everything in the result is planned in full. Memory that the best
layouts leave free is spent on saved activations (`keeping`): only as many layers are recomputed as must be.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np

from shardwise.plan.cost.job import GIB, job_of
from shardwise.plan.plan import Plan, plan_job
from shardwise.plan.search.advice import counts_of, leanest, next_changes, nothing_fits, nothing_legal, nothing_there
from shardwise.plan.search.screen import Group, LayoutIndex, Screened, Space
from shardwise.plan.time.step import prepare, step_times
from shardwise.plan.trainer.memory import memory_of
from shardwise.run import Run

MEMORY_LIMITS = (1.05, 0.9, 0.75, 0.6, 0.45)
"""Screened memory may be off. First what needs up to 1.05 of the capacity is looked at; where some of that does not really fit, the
fastest of what is leaner."""
SLOWER = 1.6
"""Layouts that take this many times the best one's step are of no interest, however lean."""
BINS = 48
"""Steps of memory on the front while screening."""
POOL, PLAYED = 600, 240
"""Candidates kept while screening, and the most that are played."""
SAMPLE = 23
"""Every so many layouts of one schedule are screened first."""
FRONT = 8
"""Layouts of the front, at most."""


class Candidate(NamedTuple):
    """A layout that may be among the best, as it was screened."""

    seconds: float
    memory: float
    group: Group
    layout: LayoutIndex


Timed = tuple[float, Candidate]
"""With the seconds of a step by its schedule."""


class Found(NamedTuple):
    """A layout that fits."""

    worth: float
    """Device-seconds of a step by its schedule: what a ranking goes by."""
    plan: Plan
    candidate: Candidate


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
    without: dict[int, str]
    """For each number of devices that no layout is shown of, why."""
    timed: list[Timed] = field(repr=False)

    @cached_property
    def pareto(self) -> list[Plan]:
        """Layouts that none beats in step time, memory and devices at once; planned when asked for."""
        counts = {candidate.group.space.devices for _, candidate in self.timed}
        return _pareto(self.timed)[: FRONT * len(counts)]

    @property
    def best(self) -> Plan:
        """The first of the ranking."""
        return self.ranking[0]

    def as_dict(self) -> dict[str, Any]:
        """For programs; names are stable."""
        ranking = [p.as_dict() | {"next_change": c} for p, c in zip(self.ranking, self.next_changes, strict=True)]
        front = [p.as_dict() for p in self.pareto]
        without = [{"devices": count, "reason": why} for count, why in self.without.items()]
        counts = {"searched": self.searched, "simulated": self.simulated}
        return counts | {"ranking": ranking, "pareto": front, "without": without}


def search(run: Run, *, devices: Sequence[int] | None = None, keep: int = 20, max_microbatch: int = 0) -> SearchResult:
    """The best layouts of a run whose layout is `auto`, on its cluster or on each of several numbers of devices. Each number has
    its best layout in the ranking, or a sentence on why there is none. Raises `UserError` with every reason where nothing is
    legal or fits."""
    counts, per_node = counts_of(run, devices, keep, max_microbatch)
    timed: list[Timed] = []
    spaces = [Space(run, count, per_node, max_microbatch) for count in counts]
    streams = [_fitting(space, keep, timed) for space in spaces]
    firsts = [next(stream, None) for stream in streams]
    found = [first for first in firsts if first is not None]
    if not any(space.count for space in spaces):
        raise nothing_legal(run, counts, per_node)
    if not found:
        raise nothing_fits(run, [space for space in spaces if space.count])
    found += islice(heapq.merge(*streams, key=lambda one: one.worth), max(0, keep - len(found)))
    found.sort(key=lambda one: one.worth)
    ranking = [one.plan for one in found]
    changes = next_changes(
        [(one.candidate.group, one.candidate.layout, one.plan.account.step_seconds) for one in found]
    )
    kept = keeping(ranking[0]) if "recompute" not in run.layout.fixed else None
    if kept is not None:
        ranking, changes = [kept[0], *ranking], [kept[1], *changes]
        if len(ranking) > max(keep, len(counts)):
            spare = _spare([plan.run.layout.world for plan in ranking])
            del ranking[spare], changes[spare]
    without = {space.devices: nothing_there(space) for space, one in zip(spaces, firsts, strict=True) if one is None}
    return SearchResult(ranking, changes, sum(space.count for space in spaces), len(timed), without, timed)


def resolve(run: Run) -> Run:
    """The run with the best layout filled in; one whose layout is given comes back as it is."""
    return search(run, keep=1).best.run if run.layout.auto else run


def _spare(counts: list[int]) -> int:
    """The last of some layouts on so many devices that is not the only one on its number of them."""
    return max(n for n, count in enumerate(counts) if counts.count(count) > 1)


class _Pool:
    """The fastest candidates so far, and the fastest for each amount of memory."""

    def __init__(self, most_memory: float, keep: int) -> None:
        self.most_memory, self.most = most_memory, max(POOL, 4 * keep)
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
        steps = np.minimum(one.memory * (BINS / self.most_memory), BINS - 1).astype(np.int64)
        fast = np.where(one.memory <= self.most_memory, np.maximum(self.front[steps], self.slowest), -1.0)
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
        lean = (c for c in rest if c[0] <= self.front[min(int(c[1] * BINS / self.most_memory), BINS - 1)])
        self.found = [*fast, *lean]
        self.slowest = fast[-1][0]

    def candidates(self) -> list[Candidate]:
        """The fastest first."""
        self._prune() if len(self.found) > self.most else self.found.sort(key=lambda c: c[0])
        return [Candidate(c[0], c[1], c[2], LayoutIndex(*c[3:])) for c in self.found]


def _screen_all(space: Space, keep: int, most_memory: float) -> list[Candidate]:
    """The layouts worth playing of all that need no more memory: the fastest, and the fastest for each amount of memory."""
    pool = _Pool(most_memory, keep)
    for group in space.groups:  # a sample, so that most of the rest is known to be too slow without a closer look
        for one in group.screen(group.schedules[:1], group.rows()[::SAMPLE], pool.most_memory, pool.limit):
            pool.look(one)
    for group in space.groups:
        for one in group.screen(group.schedules, group.rows(), pool.most_memory, pool.limit):
            pool.add(group, one)
    return pool.candidates()


def _fitting(space: Space, keep: int, timed: list[Timed]) -> Iterator[Found]:
    """The layouts of a space that really fit, the best first; what is played on the way is added to `timed`."""
    seen: set[tuple[Group, LayoutIndex]] = set()
    some = False
    for share in MEMORY_LIMITS:
        pool = _screen_all(space, keep, share * space.capacity)
        played = _play([one for one in pool if one[2:] not in seen], keep)
        seen |= {candidate[2:] for _, candidate in played}
        timed += played
        ordered = list(_chunks_apart(sorted(played, key=lambda one: one[0])))
        fell = 0
        for start in range(0, len(ordered), keep):
            for found in _planned(ordered[start : start + keep], precise=not some):
                fell += found is None
                if found is not None:
                    some = True
                    yield found
        if not fell:  # what is leaner than all of these was left out for being slow
            break
    if not some:
        lean = [Candidate(math.inf, math.inf, *one) for one in leanest(space)]
        played = _play(lean, keep)
        timed += played
        yield from filter(None, _planned(sorted(played, key=lambda one: one[0]), precise=True))


def _play(pool: list[Candidate], keep: int) -> list[Timed]:
    """Step seconds by playing the schedules: of the front, and of the fastest."""
    lean = _front([(c.seconds, c.memory, c.group.space.devices, c) for c in pool])[:FRONT]
    fast = list(_different(pool)) if len(pool) > PLAYED else pool
    candidates = list(dict.fromkeys([*lean, *fast]))[: max(PLAYED, keep)]
    steps = step_times([candidate.group.prepared_at(candidate.layout) for candidate in candidates])
    return [(step.seconds, candidate) for step, candidate in zip(steps, candidates, strict=True)]


def _different(pool: list[Candidate]) -> Iterator[Candidate]:
    """Candidates without those that differ from an earlier one only in how the data ranks are sharded."""
    seen: set[tuple[Any, ...]] = set()
    for candidate in pool:
        group, index = candidate.group, candidate.layout
        size, chosen = group.sizes_at(index), group.choices_at(index)
        step = round(math.log(candidate.seconds) / 0.002)
        same = (step, *size[2:], index.schedule, index.chunks, chosen["recompute"], chosen["context_method"])
        if same not in seen:
            seen.add(same)
            yield candidate


def _chunks_apart(best: list[Timed]) -> Iterator[Timed]:
    """Without those that differ from a better one in the number of chunks alone, which would crowd a ranking."""
    seen: set[tuple[Any, ...]] = set()
    for seconds, candidate in best:
        schedule, _, method, row = candidate.layout
        same = (candidate.group, schedule, method, row)
        if same not in seen:
            seen.add(same)
            yield seconds, candidate


def _planned(timed: Sequence[Timed], *, precise: bool = False) -> Iterator[Found | None]:
    """Plans of those that fit, None for those that do not; with `precise` the first of them with the traffic of every pipeline
    rank, since it is the one that people will run."""
    runs = [candidate.group.run_at(candidate.layout) for _, candidate in timed]
    jobs = [job_of(run) for run in runs]
    steps = step_times([prepare(job) for job in jobs])
    for (seconds, candidate), run, job, step in zip(timed, runs, jobs, steps, strict=True):
        memory = memory_of(run, job)
        if memory.fits:
            plan = plan_job(run, job, step, memory, precise=precise)
            yield Found(seconds * candidate.group.space.devices, plan, candidate)
            precise = False
        else:
            yield None


T = TypeVar("T")


def _front(points: list[tuple[float, float, int, T]]) -> list[T]:
    """Of (seconds, bytes, devices, what): those that none beats in all three, with steps of memory that matter."""
    front: list[tuple[float, float, int, T]] = []
    for point in sorted(points, key=lambda one: one[0]):
        if all(point[1] < 0.97 * other[1] or point[2] < other[2] for other in front):
            front.append(point)
    return [point[3] for point in front]


def _pareto(timed: list[Timed]) -> list[Plan]:
    """Plans of the front of those that fit. What is screened as no leaner than a faster one is not looked at."""
    plans: list[Plan] = []
    front: list[tuple[float, int]] = []
    for one in sorted(timed, key=lambda one: one[0]):
        need, devices = one[1].memory, one[1].group.space.devices
        if all(need < 0.97 * other or devices < fewer for other, fewer in front):
            for found in filter(None, _planned([one])):
                plans.append(found.plan)
                front.append((need, devices))
    return _front([(p.account.step_seconds, p.account.memory.peak, p.run.layout.world, p) for p in plans])


STEPS = 7
"""Halvings of the budget's range: then it is known to a hundredth."""


def keeping(plan: Plan) -> tuple[Plan, str] | None:
    """The plan with as few layers recomputed as its memory allows, and what memory for all would bring; None where that is not
    faster, or where not all layers were recomputed."""
    if plan.run.layout.recompute != "full" or plan.run.layout.recompute_every != 1:
        return None
    none = _with(plan.run, "none")
    everything = memory_of(none, job_of(none))
    if everything.fits:  # the search, which estimates memory, had ruled it out
        return plan_job(none, job_of(none)), ""
    unlimited = _with(plan.run, "budget", 1e6)
    kept = memory_of(unlimited, job_of(unlimited))
    low, high = 0.0, max(rank["activations"] for rank in kept.ranks) / GIB
    for _ in range(STEPS):
        middle = (low + high) / 2
        run = _with(plan.run, "budget", middle)
        low, high = (middle, high) if memory_of(run, job_of(run)).fits else (low, middle)
    if low == 0.0:
        return None
    run = _with(plan.run, "budget", low)
    found = plan_job(run, job_of(run))
    if not found.fits or found.account.step_seconds >= plan.account.step_seconds:
        return None
    gain = found.account.step_seconds / plan_job(none, job_of(none), precise=False).account.step_seconds - 1
    missing = (everything.peak - everything.capacity) / GIB
    return (
        found,
        f"recompute budget → none: {100 * gain:+.1f} %, needs {everything.peak / GIB:.1f} GiB, {missing:.1f} too many",
    )


def _with(run: Run, recompute: str, budget: float = 0.0) -> Run:
    layout = replace(run.layout, recompute=recompute, recompute_budget=round(budget, 2))  # type: ignore[arg-type]
    return replace(run, layout=layout)
