"""Finds stragglers: ranks whose compute takes longer than that of their peers, or that arrive late at collectives.

A rank is reported only if it is slow in nearly every step, by more than its peers scatter and by a share of the step that matters.
Pipeline stages differ in work, so a rank's peers are the ranks of its stage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from shardwise.run.problems import counted
from shardwise.trace.answers import Clock, Straggler
from shardwise.trace.comms.describe import axis_of
from shardwise.trace.comms.matching import Matches, Waiting
from shardwise.trace.rank import Rank
from shardwise.trace.reading.profile import Profile
from shardwise.trace.spans.intervals import covered

MIN_SHARE = 0.02
"""Ranks below this share of a step are not reported."""
MIN_DEVIATIONS = 3
"""A straggler's excess is above this many median absolute deviations of its peers."""
MIN_FREQUENCY = 0.8
"""Share of steps in which a straggler must be slow, or of collectives at which it must be last."""
MIN_PEERS = 2
MIN_COLLECTIVES = 5
MANY_PEERS = 100
"""Among more peers than these a rank is compared with all of them, itself included, which moves no median."""


def stragglers(
    ranks: Mapping[int, Rank],
    step_time: int,
    matches: Matches,
    waiting: Waiting,
    first: NDArray[np.bool_],
    clocks: Mapping[int, Clock],
) -> tuple[Straggler, ...]:
    """Stragglers sorted by excess; `first` masks rows of collectives whose waits only show when the ranks began."""
    compute = {rank: _compute_of_steps(r) for rank, r in ranks.items()}
    steps = max((len(of) for of in compute.values()), default=1)
    profiles = {rank: r.profile for rank, r in ranks.items()}
    found = [*_slow(profiles, compute, step_time), *_late(matches, waiting, first, clocks, step_time, steps)]
    slow = {one.rank for one in found if one.reason == "compute"}
    unique = [one for one in found if one.reason == "compute" or one.rank not in slow]
    return tuple(sorted(unique, key=lambda one: -one.excess))


def _compute_of_steps(rank: Rank) -> list[int]:
    _, start, end = np.array(rank.steps, np.int64).reshape(-1, 3).T
    return (covered(rank.computing, end) - covered(rank.computing, start)).tolist()


def peers(profiles: Mapping[int, Profile]) -> dict[int, tuple[int, ...]]:
    """Each rank's peers among the profiled ranks: those of its pipeline stage, itself included."""
    stage: dict[int, int] = {}
    for rank, profile in profiles.items():
        groups = [g.ranks for name, g in profile.groups.items() if axis_of(g.description, name) == "pipeline"]
        stage[rank] = max((ranks.index(rank) for ranks in groups if rank in ranks), default=0)
    of_stage: dict[int, list[int]] = defaultdict(list)
    for rank in profiles:
        of_stage[stage[rank]].append(rank)
    shared = {one: tuple(ranks) for one, ranks in of_stage.items()}
    return {rank: shared[stage[rank]] for rank in profiles}


def _usual(compute: Sequence[Sequence[int]]) -> tuple[NDArray[np.float64], float]:
    """The median over some ranks in each step, and their median absolute deviation from it."""
    table = np.array(compute)
    middle = np.median(table, axis=0)
    return middle, float(np.median(np.abs(table - middle)))


def _slow(profiles: Mapping[int, Profile], compute: Mapping[int, Sequence[int]], step_time: int) -> list[Straggler]:
    found = []
    alike: dict[tuple[int, ...], list[int]] = {}
    usual_of: dict[tuple[int, ...], tuple[NDArray[np.float64], float]] = {}
    for rank, same in peers(profiles).items():
        equal = (*same[:1], len(compute[rank]))
        if equal not in alike:
            alike[equal] = [other for other in same if len(compute[other]) == len(compute[rank])]
        others = alike[equal]
        if len(others) <= MIN_PEERS or not compute[rank]:
            continue
        if len(others) <= MANY_PEERS:
            middle, deviation = _usual([compute[other] for other in others if other != rank])
        else:
            if equal not in usual_of:
                usual_of[equal] = _usual([compute[other] for other in others])
            middle, deviation = usual_of[equal]
        excess = np.array(compute[rank]) - middle
        mean = int(excess.mean())
        often = float((excess > MIN_DEVIATIONS * deviation).mean())
        if step_time and mean > MIN_SHARE * step_time and mean > MIN_DEVIATIONS * deviation and often >= MIN_FREQUENCY:
            usual = float(middle.mean())
            evidence = (
                f"computes {np.mean(compute[rank]) / 1e6:.2f} ms a step, its {len(others) - 1} peers {usual / 1e6:.2f} ms "
                f"(half of them within {deviation / 1e6:.2f} ms), in {often:.0%} of {counted(len(compute[rank]), 'step')}"
            )
            found.append(Straggler(rank, "compute", mean, mean / step_time, evidence))
    return found


def _late(
    matches: Matches,
    waiting: Waiting,
    first: NDArray[np.bool_],
    clocks: Mapping[int, Clock],
    step_time: int,
    steps: int,
) -> list[Straggler]:
    """Ranks that arrive last at nearly all of their collectives."""
    if not len(matches):
        return []
    taken: dict[int, int] = defaultdict(int)
    last: dict[int, int] = defaultdict(int)
    caused: dict[int, int] = defaultdict(int)
    uncertainty = max((clock.uncertainty for clock in clocks.values() if clock.uncertainty > 0), default=0)
    heads = np.append(True, np.diff(matches.collective) != 0)
    members = np.bincount(matches.collective)[matches.collective]
    for at in range(len(matches)):
        if members[at] <= MIN_PEERS or first[at]:
            continue
        taken[int(matches.rank[at])] += 1
        if heads[at] and waiting.lateness[at] > 2 * uncertainty:
            rank = int(waiting.last[at])
            last[rank] += 1
            caused[rank] += int(waiting.lateness[at])
    found = []
    for rank, count in last.items():
        excess = caused[rank] // max(steps, 1)
        if taken[rank] < MIN_COLLECTIVES or count < MIN_FREQUENCY * taken[rank] or excess <= MIN_SHARE * step_time:
            continue
        evidence = (
            f"arrives last at {count} of its {taken[rank]} matched collectives of all steps, in total {excess / 1e6:.2f} ms a "
            f"step after the rank before it (clocks known to {uncertainty / 1e3:.0f} µs)"
        )
        found.append(Straggler(rank, "late", excess, excess / step_time if step_time else 0.0, evidence))
    return found
