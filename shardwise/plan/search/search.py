"""The best layout of a job on its devices: all legal ones are screened by closed forms, the best simulated action by action.

`search` is for people, who want a ranking, the reasons for what was ruled out and the next change to make; `resolve` is for
programs that only need a layout. Screened figures choose which layouts are worth simulating; every layout in the result is planned
in full. Memory that the best layouts leave free is spent on saved activations (`with_least_recompute`): only as many layers are
recomputed as must be.
"""

from __future__ import annotations

import gc
import heapq
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, islice
from typing import Any

from shardwise.plan.cost.job import GIB, job_of
from shardwise.plan.plan import Plan, plan_job
from shardwise.plan.search.advice import counts_of, next_changes, nothing_fits, nothing_legal, nothing_there, sentence
from shardwise.plan.search.beside import beside, cores
from shardwise.plan.search.fitting import LEANER, Fitting, FittingLayout, front, rounded_seconds
from shardwise.plan.search.pool import PLAY_ALL
from shardwise.plan.search.screen import Space
from shardwise.plan.serving.rollouts import plan_rollouts
from shardwise.plan.time.goodput import data_stall
from shardwise.plan.time.step import prepare, step_time
from shardwise.plan.trainer.memory import memory_of, memory_that_fits
from shardwise.run import LayoutConfig, Run, UserError
from shardwise.run.axes import SPLIT_BACKWARD


@dataclass(frozen=True)
class SearchResult:
    """The layouts found, best first."""

    ranking: list[Plan]
    """By device-seconds of a step, which on one number of devices is the order of step times. In a GRPO run a step includes its
    share of the rollouts."""
    next_changes: list[str]
    """For each layout of the ranking, the gain of the best change of one key."""
    searched: int
    """The number of legal layouts."""
    simulated: int
    """The number of these that were simulated in full; the others were only screened."""
    without: dict[int, str]
    """For each number of devices without a layout in the result, the reason."""
    spaces: list[Fitting] = field(repr=False)

    @cached_property
    def pareto(self) -> list[Plan]:
        """Layouts that no other beats in step time, memory and devices at once; planned on first access. Layouts that are also in
        the ranking share its plan."""
        return front(self.spaces, self.ranking)

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
    """The best layouts of a run whose layout is `auto`, on its cluster or on each of several device counts. Each count has its best
    layout in the ranking, or a sentence on why there is none. Raises `UserError` with all reasons if none is legal or fits."""
    collects = gc.isenabled()
    gc.disable()  # it would scan lists of millions of actions, which have no cycles, again and again
    try:
        return _search(run, devices, keep, max_microbatch)
    finally:
        if collects:
            gc.enable()


def spaces_of(run: Run, devices: int, per_node: int, most_microbatch: int = 0) -> list[Space]:
    """All layouts of a run on `devices` devices: a space with compiled layers and, where `train.compile` is "auto", one of the
    schedules that defer weight gradients, whose layers can't be compiled."""
    settled = run.train.compile != "auto"
    compiled = Space(run, devices, per_node, most_microbatch)
    if settled or not compiled.run.train.compile:
        return [compiled]
    plain = replace(run, train=replace(run.train, compile=False))
    deferring = Space(plain, devices, per_node, most_microbatch, only=SPLIT_BACKWARD)
    return [compiled, deferring] if deferring.count else [compiled]


def _search(run: Run, devices: Sequence[int] | None, keep: int, max_microbatch: int) -> SearchResult:
    counts, per_node = counts_of(run, devices, keep, max_microbatch)
    by_count = [[Fitting(space, keep) for space in spaces_of(run, count, per_node, max_microbatch)] for count in counts]
    spaces = [fitting for several in by_count for fitting in several]
    for one in spaces[1 : cores()]:
        one.screen_beside()
    streams = [_merged(several) for several in by_count]
    firsts = [next(stream, None) for stream in streams]
    found = [first for first in firsts if first is not None]
    if not any(one.space.count for one in spaces):
        raise nothing_legal(run, counts, per_node)
    if not found and any(one.too_full for one in spaces):
        raise UserError(NO_ENGINE)
    if not found:
        raise nothing_fits(run, [one.space for one in spaces if one.space.count])
    answers = run.objective.kind == "grpo"
    # In a run that generates its own rollouts, free memory belongs to the inference engine.
    keeps = "recompute" not in run.layout.fixed and not answers
    kept_beside = beside(partial(_kept, min(found, key=_worth), spaces)) if keeps else None
    streams = [
        _apart(chain([first], stream)) for first, stream in zip(firsts, streams, strict=True) if first is not None
    ]
    found = [next(stream) for stream in streams]
    wanted = max(keep, TRIED) if answers else keep
    found += islice(heapq.merge(*streams, key=_worth), min(max(0, wanted - len(found)), sys.maxsize))
    found.sort(key=_with_answers if answers else _worth)
    found = _first_of(found, keep, len(counts)) if answers else found
    ranking = [one.plan() for one in found]
    changes = next_changes(
        [(*one.candidate[2:], plan.account.step_seconds) for one, plan in zip(found, ranking, strict=True)]
    )
    kept = kept_beside() if kept_beside is not None else None
    if kept is not None:
        ranking, changes = [kept[0], *ranking], [kept[1], *changes]
        if len(ranking) > max(keep, sum(first is not None for first in firsts)):
            spare = _spare([plan.run.layout.world for plan in ranking])
            del ranking[spare], changes[spare]
    without = {
        count: nothing_there(several[0].space)
        for count, several, one in zip(counts, by_count, firsts, strict=True)
        if one is None
    }
    searched, simulated = sum(one.space.count for one in spaces), sum(len(one.simulated) for one in spaces)
    return SearchResult(ranking, changes, searched, simulated, without, spaces)


def resolve(run: Run) -> Run:
    """The run with the best layout filled in; a run whose layout is given is returned unchanged."""
    return search(run, keep=1).best.run if run.layout.auto else run


def _spare(counts: list[int]) -> int:
    """The index of the last layout that is not the only one on its device count."""
    return max(n for n, count in enumerate(counts) if counts.count(count) > 1)


def _kept(best: FittingLayout, spaces: Sequence[Fitting]) -> tuple[Plan, str] | None:
    """The fastest layout once spare memory is spent on saved activations, with its advice; None where `best` stays the best."""
    devices = best.candidate.group.space.devices
    several = [partial(fitting.roomy, best.seconds) for fitting in spaces if fitting.space.devices == devices]
    later = [beside(find) for find in several[1:]]
    every = [*several[0](), *chain.from_iterable(find() for find in later)]
    fastest, least, tried = None, best.seconds, 0
    most = ROOMY if any(fitting.space.count > PLAY_ALL for fitting in spaces) else ROOMY_OF_FEW
    beyond: dict[LayoutConfig, float] = {}  # simulated over expected seconds, of the first of similar layouts
    for reached, saving, run in sorted(every, key=lambda one: one[0]):
        if tried == most:
            break
        alike = replace(run.layout, replicate=1, shard=1)
        if saving >= least or reached * beyond.get(alike, 0.0) > ALIKE * least:
            continue
        if memory_that_fits(run, job_of(run)) is None or (kept := with_least_recompute(run)) is None:
            continue
        tried += 1
        job = job_of(kept)
        step = step_time(prepare(job))
        seconds = step.seconds + data_stall(kept, job.cluster, step.seconds)
        beyond.setdefault(alike, seconds / reached)
        if seconds < least:
            fastest, least = (kept, job, step), seconds
    if fastest is None:
        return None
    found, none = plan_job(*fastest), _with(fastest[0], "none")
    job = job_of(none)
    seconds = step_time(prepare(job)).seconds
    gain = found.account.step_seconds / (seconds + data_stall(none, job.cluster, seconds))
    return found, sentence("recompute budget → none", gain, memory_of(none, job))


def _worth(one: FittingLayout) -> tuple[float, float]:
    """The key of a ranking: device-seconds of a step, then peak memory."""
    return rounded_seconds(one.seconds * one.candidate.group.space.devices), one.memory.peak


def _with_answers(one: FittingLayout) -> tuple[float, float]:
    """The same key for a step including its share of the rollouts that it trains on."""
    seconds = plan_rollouts(one.run, one.seconds, one.memory).step_seconds
    return rounded_seconds(seconds * one.candidate.group.space.devices), one.memory.peak


def _first_of(found: list[FittingLayout], keep: int, counts: int) -> list[FittingLayout]:
    """The best layouts of a ranking, and the best on each number of devices."""
    firsts = {one.candidate.group.space.devices: one for one in reversed(found)}.values()
    return [one for n, one in enumerate(found) if n < max(keep, counts) or any(one is first for first in firsts)]


def _merged(several: Sequence[Fitting]) -> Iterator[FittingLayout]:
    """The fitting layouts of several spaces, the best first. A space is not simulated before one of its layouts may be next."""
    streams = [iter(fitting) for fitting in several]
    waiting: list[tuple[float, float, int, FittingLayout | None]] = [
        (rounded_seconds(fitting.least() * fitting.space.devices), 0.0, n, None) for n, fitting in enumerate(several)
    ]
    heapq.heapify(waiting)
    has_best = False
    while waiting:
        _, _, n, one = heapq.heappop(waiting)
        if one is not None:
            has_best = True
            yield one
        elif has_best and not several[n].has_best:  # another space has the best one: this one may come later
            several[n].has_best = True
            heapq.heappush(waiting, (rounded_seconds(several[n].least() * several[n].space.devices), 0.0, n, None))
            continue
        following = next(streams[n], None)
        if following is not None:
            heapq.heappush(waiting, (*_worth(following), n, following))


def _apart(fitting: Iterable[FittingLayout]) -> Iterator[FittingLayout]:
    """The fitting layouts, without those that differ from a better one only in the number of chunks and are not on the Pareto
    front: they would crowd a ranking."""
    seen: set[tuple[Any, ...]] = set()
    least = math.inf
    for one in fitting:
        group, (schedule, _, method, row) = one.candidate.group, one.candidate.layout
        same = (group, schedule, method, row)
        if same not in seen or one.memory.peak < LEANER * least:
            yield one
        seen.add(same)
        if one.memory.peak < LEANER * least:
            least = one.memory.peak


TRIED = 8
"""Least number of layouts whose rollouts are planned: rollouts take longer where the engine has less memory, which the order by
training time does not see."""
NO_ENGINE = (
    "layouts fit that train this run, but none leaves room for the weights and one answer of the engine that makes its answers; "
    "use more devices, adapters, or a shorter train.seq_len"
)
ROOMY = 6
"""The number of layouts tried with a recompute budget: those with the most to gain."""
ROOMY_OF_FEW = 24
"""The same in a small space, where that takes little time."""
ALIKE = 1.005
"""How far layouts that differ only in replicate and shard may be apart in the ratio of simulated to expected seconds."""
STEPS = 7
"""Bisection steps on the budget: they find it to a hundredth of its range."""


def with_least_recompute(run: Run) -> Run | None:
    """The run with as few layers recomputed as its memory allows; None where the run does not recompute all layers, or has to."""
    if run.layout.recompute != "full" or run.layout.recompute_every != 1:
        return None
    none, unlimited = _with(run, "none"), _with(run, "budget", 1e6)
    if memory_that_fits(none, job_of(none)):  # the search has that layout already
        return None
    kept = memory_of(unlimited, job_of(unlimited))
    low, high = 0.0, max(rank["activations"] for rank in kept.ranks) / GIB
    for _ in range(STEPS):
        middle = (low + high) / 2
        some = _with(run, "budget", middle)
        low, high = (middle, high) if memory_that_fits(some, job_of(some)) else (low, middle)
    return _with(run, "budget", low) if round(low, 2) > 0 else None


def _with(run: Run, recompute: str, budget: float = 0.0) -> Run:
    layout = replace(run.layout, recompute=recompute, recompute_budget=round(budget, 2))  # type: ignore[arg-type]
    return replace(run, layout=layout)
