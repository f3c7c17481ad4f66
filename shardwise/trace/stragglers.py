"""Finds stragglers: ranks whose compute takes longer than that of their peers, or that arrive late at collectives.

A rank is reported only if it is slow in nearly every step, by more than its peers scatter and by a share of the step that matters.
Pipeline stages differ in work, so a rank's peers are the ranks of its stage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from shardwise.run.problems import counted
from shardwise.trace.answers import Clock, Straggler
from shardwise.trace.comms.describe import axis_of
from shardwise.trace.comms.matching import Matches, Waiting
from shardwise.trace.rank import Rank
from shardwise.trace.reading.integers import Integers
from shardwise.trace.spans.intervals import covered, parts

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
    slow = _slow(_peers(ranks, compute), compute, step_time)
    known = {one.rank for one in slow}
    late = [one for one in _late(matches, waiting, first, clocks, step_time, steps) if one.rank not in known]
    return tuple(sorted([*slow, *late], key=lambda one: -one.excess))


def _compute_of_steps(rank: Rank) -> list[int]:
    _, start, end = np.array(rank.steps, np.int64).reshape(-1, 3).T
    return (covered(rank.computing, end) - covered(rank.computing, start)).tolist()


def _peers(ranks: Mapping[int, Rank], compute: Mapping[int, Sequence[int]]) -> Iterable[list[int]]:
    """The ranks of each pipeline stage, those with equally many steps together."""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, r in ranks.items():
        named = r.profile.groups.items()
        groups = [g.ranks for name, g in named if axis_of(g.description, name) == "pipeline"]
        stage = max((members.index(rank) for members in groups if rank in members), default=0)
        found[stage, len(compute[rank])].append(rank)
    return found.values()


def _usual(table: Integers) -> tuple[NDArray[np.float64], float]:
    """The median over some ranks in each step, and their median absolute deviation from it."""
    middle = np.median(table, axis=0)
    return middle, float(np.median(np.abs(table - middle)))


def _slow(peers: Iterable[list[int]], compute: Mapping[int, Sequence[int]], step_time: int) -> list[Straggler]:
    found = []
    for alike in peers:
        table = np.array([compute[rank] for rank in alike])
        if len(alike) <= MIN_PEERS or not table.size:
            continue
        of_all = _usual(table) if len(alike) > MANY_PEERS else None
        for at, rank in enumerate(alike):
            middle, deviation = of_all or _usual(np.delete(table, at, axis=0))
            excess = table[at] - middle
            mean = int(excess.mean())
            often = float((excess > MIN_DEVIATIONS * deviation).mean())
            enough = mean > MIN_SHARE * step_time and mean > MIN_DEVIATIONS * deviation
            if step_time and enough and often >= MIN_FREQUENCY:
                evidence = (
                    f"computes {table[at].mean() / 1e6:.2f} ms a step, its {len(alike) - 1} peers {middle.mean() / 1e6:.2f} ms "
                    f"(half of them within {deviation / 1e6:.2f} ms), in {often:.0%} of {counted(len(excess), 'step')}"
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
    uncertainty = max((clock.uncertainty for clock in clocks.values() if clock.uncertainty > 0), default=0)
    counts = (np.bincount(matches.collective)[matches.collective] > MIN_PEERS) & ~first
    taken = np.bincount(matches.rank[counts])
    heads = matches.first_of_each()
    heads = heads[counts[heads] & (waiting.lateness[heads] > 2 * uncertainty)]
    found = []
    for rank, at in parts(waiting.last[heads]):
        excess = int(waiting.lateness[heads[at]].sum()) // max(steps, 1)
        if taken[rank] < MIN_COLLECTIVES or len(at) < MIN_FREQUENCY * taken[rank] or excess <= MIN_SHARE * step_time:
            continue
        evidence = (
            f"arrives last at {len(at)} of its {taken[rank]} matched collectives of all steps, in total {excess / 1e6:.2f} ms a "
            f"step after the rank before it (clocks known to {uncertainty / 1e3:.0f} µs)"
        )
        found.append(Straggler(rank, "late", excess, excess / step_time if step_time else 0.0, evidence))
    return found
