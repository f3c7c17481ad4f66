"""Which rank the others wait for, and why: its own work takes longer than that of its peers, or it comes late to collectives.

Something is said only where it shows in nearly every step, stands out from the spread of the peers, and matters for the step.
Ranks of different pipeline stages have different work, so a rank's peers are those of its stage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from shardwise.trace.answers import Clock, Straggler
from shardwise.trace.reading.events import Profile
from shardwise.trace.sending.axes import axis_of
from shardwise.trace.sending.matching import Matches, Waiting

ENOUGH = 0.02
"""Share of a step below which nothing is said."""
STANDS_OUT = 3
"""How many times the median deviation of its peers a rank must differ by."""
OFTEN = 0.8
"""Share of steps in which it must show, and of collectives to which it must be last."""
FEWEST_PEERS = 2
FEWEST_COLLECTIVES = 5


def stragglers(
    profiles: Mapping[int, Profile],
    compute: Mapping[int, Sequence[int]],
    step_time: int,
    matches: Matches,
    waiting: Waiting,
    first: NDArray[np.bool_],
    clocks: Mapping[int, Clock],
    steps: int,
) -> tuple[Straggler, ...]:
    """`compute` is each rank's computing time in each step; `first` are rows of collectives that take up how ranks began."""
    found = [*_slow(profiles, compute, step_time), *_late(matches, waiting, first, clocks, step_time, steps)]
    slow = {one.rank for one in found if one.reason == "compute"}
    kept = [one for one in found if one.reason == "compute" or one.rank not in slow]
    return tuple(sorted(kept, key=lambda one: -one.excess))


def peers(profiles: Mapping[int, Profile]) -> dict[int, tuple[int, ...]]:
    """Each rank's peers among those seen: the ranks of its pipeline stage, itself included."""
    stage: dict[int, int] = {}
    for rank, profile in profiles.items():
        groups = [g.ranks for name, g in profile.groups.items() if axis_of(g.description, name) == "pipeline"]
        stage[rank] = max((ranks.index(rank) for ranks in groups if rank in ranks), default=0)
    return {rank: tuple(other for other in profiles if stage[other] == stage[rank]) for rank in profiles}


def _slow(profiles: Mapping[int, Profile], compute: Mapping[int, Sequence[int]], step_time: int) -> list[Straggler]:
    found = []
    for rank, same in peers(profiles).items():
        others = [other for other in same if other != rank and len(compute[other]) == len(compute[rank])]
        if len(others) < FEWEST_PEERS or not compute[rank]:
            continue
        table = np.array([compute[other] for other in others])
        middle = np.median(table, axis=0)
        excess = np.array(compute[rank]) - middle
        stray = float(np.median(np.abs(table - middle)))
        mean = int(excess.mean())
        often = float((excess > STANDS_OUT * stray).mean())
        if step_time and mean > ENOUGH * step_time and mean > STANDS_OUT * stray and often >= OFTEN:
            usual = float(middle.mean())
            evidence = (
                f"computes {np.mean(compute[rank]) / 1e6:.2f} ms a step, its {len(others)} peers {usual / 1e6:.2f} ms "
                f"(half of them within {stray / 1e6:.2f} ms), in {often:.0%} of {len(compute[rank])} steps"
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
    """Ranks that nearly every collective they take part in waits for."""
    if not len(matches):
        return []
    taken: dict[int, int] = defaultdict(int)
    last: dict[int, int] = defaultdict(int)
    caused: dict[int, int] = defaultdict(int)
    sure = {rank: max(clock.uncertainty, 0) for rank, clock in clocks.items()}
    heads = np.append(True, np.diff(matches.collective) != 0)
    members = np.bincount(matches.collective)[matches.collective]
    for at in range(len(matches)):
        if members[at] <= FEWEST_PEERS or first[at]:
            continue
        taken[int(matches.rank[at])] += 1
        if heads[at] and waiting.lateness[at] > 2 * max(sure.values(), default=0):
            rank = int(waiting.last[at])
            last[rank] += 1
            caused[rank] += int(waiting.lateness[at])
    found = []
    for rank, count in last.items():
        excess = caused[rank] // max(steps, 1)
        if taken[rank] < FEWEST_COLLECTIVES or count < OFTEN * taken[rank] or excess <= ENOUGH * step_time:
            continue
        evidence = (
            f"comes last to {count} of its {taken[rank]} matched collectives, on the whole {excess / 1e6:.2f} ms a step after "
            f"the rank before it (clocks known to {max(sure.values(), default=0) / 1e3:.0f} us)"
        )
        found.append(Straggler(rank, "late", excess, excess / step_time if step_time else 0.0, evidence))
    return found
