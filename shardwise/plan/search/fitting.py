"""The layouts of a space that fit, the best first; and the Pareto front of step time and memory.

Candidates are simulated in the order of the least time that their screened figure allows. The best layout is yielded once no
unsimulated candidate may be faster, so it is the best plan. The others are yielded once that is unlikely (`LEAST_TIME_OF_REST`), so
that half of the candidates need not be simulated. Memory is counted to the byte only for layouts that get this far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from shardwise.ledger import Memory
from shardwise.plan.cost.job import Job, job_of
from shardwise.plan.plan import Plan, plan_job
from shardwise.plan.search.advice import leanest
from shardwise.plan.search.beside import beside
from shardwise.plan.search.pool import (
    LEAST_MEMORY,
    LEAST_MEMORY_OF_MANY,
    LEAST_TIME,
    LEAST_TIME_OF_FEW,
    LEAST_TIME_OF_REST,
    LEAST_TIME_OF_SPLIT,
    PLAY_ALL,
    POOL,
    SLOWER,
    Candidate,
    Candidates,
    Within,
    all_candidates,
    screen_all,
)  # fmt: skip
from shardwise.plan.search.screen import Group, Space
from shardwise.plan.search.screened import LayoutIndex, Screened
from shardwise.plan.search.simulate import simulate
from shardwise.plan.search.tables import split_key
from shardwise.plan.serving.rollouts import rollouts_fit
from shardwise.plan.trainer.memory import memory_that_fits
from shardwise.run import Run
from shardwise.run.axes import SPLIT_BACKWARD

LEANER = 0.97
"""A layout that needs more than this share of a faster layout's memory is not a point of the Pareto front."""
AT_ONCE = 240
"""Candidates that are simulated together, before their times are looked at."""
TOO_FULL = 400
"""The search stops after this many layouts without room for the inference engine, if it found none with room."""
LIKELY = 120
"""Layouts that are simulated to find those with the most to gain from a recompute budget."""
MEMORY_LIMITS = (0.75, 0.5)
"""Where screened memory is so far off that none of the fastest fits, the fastest within these shares of the capacity follow."""

Array = Any
Timed = tuple[float, Candidate]
"""The step seconds of a candidate's plan, and the candidate."""


class FittingLayout(NamedTuple):
    """A layout that fits."""

    seconds: float
    run: Run
    job: Job
    memory: Memory
    candidate: Candidate

    def plan(self) -> Plan:
        """The full plan of the layout."""
        return plan_job(self.run, self.job, memory=self.memory)


def rounded_seconds(seconds: float) -> float:
    """Seconds rounded so that times that differ only in the last bits compare as equal."""
    return float(f"{seconds:.9g}")


@dataclass
class Fitting:
    """The layouts of a space that fit by exact memory, found lazily."""

    space: Space
    keep: int
    simulated: dict[Candidate, float] = field(default_factory=dict)
    """Step seconds of all simulated candidates."""
    has_best: bool = False
    """Whether the best layout is known, of this space or of another one that is searched with it."""
    too_full: int = 0
    """Layouts that would fit, but leave no room for the engine that generates a run's rollouts."""
    _known: dict[Candidate, FittingLayout | None] = field(default_factory=dict)
    _most: int = 0
    """The size of the last pool; 0 in a small space."""
    _screening: Callable[[], Any] | None = None
    """Waits for the first pool, if it is screened on another core."""

    def __iter__(self) -> Iterator[FittingLayout]:
        """The best first; at equal times the one with the least memory."""
        found: set[Candidate] = set()
        for _, same in groupby(self._in_order(), key=lambda one: rounded_seconds(one[0])):
            fits = [one for _, candidate in same if (one := self.fits(candidate)) is not None]
            yield from sorted(fits, key=lambda one: one.memory.peak)
            found |= {one.candidate for one in fits}
            self.has_best |= bool(fits)
            if not found and self.too_full >= TOO_FULL:  # then those with the least memory tell if any has room
                break
        if not found:
            lean = [Candidate(math.inf, math.inf, *one) for one in leanest(self.space)]
            self._play(lean)
            fits = [one for candidate in lean if (one := self.fits(candidate)) is not None]
            yield from sorted(fits, key=lambda one: (one.seconds, one.memory.peak))

    def _in_order(self) -> Iterator[Timed]:
        """Candidates in the order of their simulated step seconds; behind the best one nearly so."""
        waiting: list[Timed] = []
        told: set[Candidate] = set()
        for candidates, certain in self._pools():
            fresh = [one for one in candidates.found if one not in self.simulated]
            at = 0
            while at < len(fresh) or waiting:
                few = fresh[at : at + AT_ONCE] if certain else fresh
                at += len(few)
                waiting = sorted([*waiting, *self._play(few)], key=lambda one: one[0])
                next_one = min(fresh[at].seconds if at < len(fresh) else math.inf, candidates.complete)
                while waiting and (next_one == math.inf or waiting[0][0] <= next_one * self._share(certain)):
                    seconds, one = waiting.pop(0)
                    if one not in told:
                        told.add(one)
                        yield seconds, one
                if at >= len(fresh):
                    break
        yield from waiting

    @property
    def _certain(self) -> float:
        """The least share of its screened time that a candidate of a large space may take."""
        split = all(name in SPLIT_BACKWARD for each in self.space.schedules.values() for name, _ in each)
        return LEAST_TIME_OF_SPLIT if split else LEAST_TIME

    def _share(self, certain: float) -> float:
        """The same, higher once the best layout is known."""
        return max(certain, LEAST_TIME_OF_REST) if certain and self.has_best else certain

    def least(self) -> float:
        """A lower bound on the step seconds of the space, from screening alone: known before any simulation. Once the best layout
        is known, a likely one."""
        candidates, certain = self._first_pool
        return self._share(certain) * min(candidates.found[0].seconds, candidates.complete) if candidates.found else 0.0

    @property
    def _least_pool(self) -> int:
        """The size of the first pool of a large space."""
        return max(POOL, 4 * self.keep)

    def screen_beside(self) -> None:
        """Start the screening of a large space on another core."""
        if self.space.count > PLAY_ALL:
            self._screening = beside(self._numbered)

    def _numbered(self) -> tuple[list[tuple[float, float, int, LayoutIndex]], float]:
        """The first pool of a large space, with numbers in place of groups, which would bring their tables along."""
        numbers = {group: n for n, group in enumerate(self.space.groups)}
        pool = self._fastest(self._least_pool)
        return [(s, memory, numbers[group], layout) for s, memory, group, layout in pool.found], pool.complete

    @cached_property
    def _first_pool(self) -> tuple[Candidates, float]:
        if self.space.count <= PLAY_ALL:
            return all_candidates(self.space, self.space.capacity / LEAST_MEMORY), 0.0
        if self._screening is None:
            return self._fastest(self._least_pool), self._certain
        (found, complete), self._most = self._screening(), self._least_pool
        groups = self.space.groups
        return Candidates([Candidate(s, b, groups[n], layout) for s, b, n, layout in found], complete), self._certain

    def _fastest(self, most: int) -> Candidates:
        """The `most` fastest candidates of a large space, and all others that are no slower."""
        self._most = most
        pool = screen_all(self.space, most, self.space.capacity / LEAST_MEMORY_OF_MANY, lean=False)
        return pool._replace(found=[one for one in pool.found if one.seconds <= pool.complete])

    def _pools(self) -> Iterator[tuple[Candidates, float]]:
        """Further pools of candidates, each with the least share of its screened time that one may take; 0: simulate all."""
        space, capacity = self.space, self.space.capacity
        yield self._first_pool
        if space.count <= PLAY_ALL:
            return
        yield self._fastest(8 * self._least_pool), self._certain
        for share in MEMORY_LIMITS:
            pool = screen_all(space, self._least_pool, share * capacity)
            yield pool, self._certain

    def _play(self, candidates: Sequence[Candidate]) -> list[Timed]:
        fresh = [one for one in candidates if one not in self.simulated]
        for one, seconds in zip(fresh, simulate([one[2:] for one in fresh]), strict=True):
            self.simulated[one] = seconds
        return [(self.simulated[one], one) for one in candidates]

    def fits(self, candidate: Candidate, most: float = math.inf) -> FittingLayout | None:
        """The layout with its memory; None where it does not fit, or is not counted yet and needs more than `most`."""
        if candidate not in self._known:
            run = candidate.group.run_at(candidate.layout)
            job = job_of(run)
            memory = memory_that_fits(run, job, most)
            if memory is None and most < math.inf:  # it may still fit the device
                return None
            if memory is not None and not rollouts_fit(run, memory):
                self.too_full += 1
                memory = None
            found = None if memory is None else FittingLayout(self.simulated[candidate], run, job, memory, candidate)
            self._known[candidate] = found
        return self._known[candidate]

    def leaner(self, candidate: Candidate, most: float) -> FittingLayout | None:
        """The layout with its memory, where it fits and may need less than `most`: screened memory rules many out."""
        share = LEAST_MEMORY if self.space.count <= PLAY_ALL else LEAST_MEMORY_OF_MANY
        return self.fits(candidate, most) if share * candidate.memory < most or candidate in self._known else None

    def timed(self) -> Iterator[tuple[float, Fitting, Candidate]]:
        """Candidates for the Pareto front with their seconds: all that were simulated; in a large space also the screened front."""
        if self._most:
            self._play(screen_all(self.space, self._most, self.space.capacity / LEAST_MEMORY_OF_MANY).found)
        yield from ((rounded_seconds(seconds), self, one) for one, seconds in self.simulated.items())

    def roomy(self, seconds: float) -> list[tuple[float, float, Run]]:
        """Layouts with full recomputation that may take less than `seconds` if their free memory is spent on saved activations, the
        most promising first. Each is (expected seconds, seconds without recomputation, run); the expected seconds assume that time
        falls linearly from full recomputation to none. Screened figures select the layouts, simulated ones order them."""
        likely = [found[1:] for found in sorted(self._spare(seconds), key=lambda found: found[0])[:LIKELY]]
        saving_all = zip(likely, simulate([saving[2:] for _, saving in likely]), strict=True)
        gaining = [(one, saving, least) for (one, saving), least in saving_all if least < seconds]
        found = []
        for (one, saving, least), most in zip(gaining, simulate([one[2:] for one, _, _ in gaining]), strict=True):
            share = (self.space.capacity - one.memory) / max(saving.memory - one.memory, 1.0)
            reached = most - min(share, 1.0) * (most - least)
            if reached < seconds:
                found.append((rounded_seconds(reached), least, one.group.run_at(one.layout)))
        return sorted(found, key=lambda one: one[0])

    def _spare(self, seconds: float) -> Iterator[tuple[float, Candidate, Candidate]]:
        """The same by screened figures alone: expected seconds, and the layout with full recomputation and with none."""
        capacity, words = self.space.capacity, self.space.choices.recompute
        if "full" not in words or "none" not in words:
            return
        longest = seconds / (self._certain if self.space.count > PLAY_ALL else LEAST_TIME_OF_FEW)
        for group in self.space.groups:
            size = group.shape[1] * group.shape[2]
            saves, full = (np.arange(size) + words.index(word) * size for word in ("none", "full"))
            quick = [
                saving.at(np.flatnonzero((saving.seconds < longest).any(axis=0)))
                for saving in group.screen(group.schedules, saves, Within(longest, math.inf))
            ]
            for saving, one in _with_full(group, quick, full):
                share = (capacity - one.memory) / np.maximum(saving.memory - one.memory, 1.0)
                with np.errstate(invalid="ignore"):  # illegal layouts take infinite seconds
                    reached = one.seconds - np.minimum(share, 1.0) * (one.seconds - saving.seconds)
                gains = (reached < longest) & (one.memory <= capacity)
                for method, n in zip(*(x.tolist() for x in np.nonzero(gains)), strict=True):
                    both = _candidate(group, one, method, n), _candidate(group, saving, method, n)
                    yield float(reached[method, n]), *both


def _with_full(group: Group, savings: list[Screened], full: Array) -> Iterator[tuple[Screened, Screened]]:
    """Layouts without recomputation, each with its twin in the rows of full recomputation. Schedules with the same split of the
    layers are screened together, since that costs about as much as one of them."""
    alike: dict[tuple[int, int, bool, bool], list[Screened]] = {}
    for one in (one for one in savings if len(one.rows)):
        alike.setdefault(split_key(group.pipeline, one.schedule, one.chunks), []).append(one)
    twins: dict[tuple[str, int], Screened] = {}
    for same in alike.values():
        rows = np.unique(np.concatenate([full[one.rows % len(full)] for one in same]))
        for twin in group.screen(list(dict.fromkeys((one.schedule, one.chunks) for one in same)), rows):
            name = twin.schedule, twin.chunks
            twins[name] = twins[name].joined(twin) if name in twins else twin
    for one in savings:
        if len(one.rows):
            twin = twins[one.schedule, one.chunks]
            yield one, twin.at(np.searchsorted(twin.rows, full[one.rows % len(full)]))


def front(spaces: Sequence[Fitting], known: Sequence[Plan]) -> list[Plan]:
    """Layouts that fit and that none beats in time, memory and devices: from the fastest on, each one that needs less than `LEANER`
    times the memory of all before it on no more devices. All spaces are walked together: a layout that another space beats must not
    hide those behind it. Layouts that take over `SLOWER` times the first on the same number of devices are left out. `known` are
    plans already made, including those with a recompute budget, which no space has."""
    planned = {plan.run: plan for plan in known}
    budgets = [plan for run, plan in planned.items() if run.layout.recompute not in spaces[0].space.choices.recompute]
    every: list[tuple[float, Fitting | None, Any]] = [one for space in spaces for one in space.timed()]
    every += [(rounded_seconds(plan.account.step_seconds), None, plan) for plan in budgets]
    found: list[tuple[float, int, FittingLayout | Plan]] = []
    first: dict[int, float] = {}

    def most(devices: int) -> float:
        return LEANER * min((peak for peak, count, _ in found if count <= devices), default=math.inf)

    for seconds, same in groupby(sorted(every, key=lambda one: one[0]), key=lambda one: one[0]):
        fits: list[tuple[float, int, FittingLayout | Plan]] = []
        for _, space, one in same:
            if space is None:
                fits.append((one.account.memory.peak, one.run.layout.world, one))
                continue
            devices = space.space.devices
            near = seconds <= SLOWER * first.get(devices, math.inf)
            if near and (layout := space.leaner(one, most(devices))) is not None:
                fits.append((layout.memory.peak, devices, layout))
        for point in sorted(fits, key=lambda one: one[0]):
            if point[0] < most(point[1]):
                found.append(point)
                if isinstance(point[2], FittingLayout):
                    first.setdefault(point[1], seconds)
    return [one if isinstance(one, Plan) else planned.get(one.run) or one.plan() for _, _, one in found]


def _candidate(group: Group, one: Screened, method: int, n: int) -> Candidate:
    index = LayoutIndex(one.schedule, one.chunks, method, int(one.rows[n]))
    return Candidate(float(one.seconds[method, n]), float(one.memory[n]), group, index)
