"""How long a schedule takes: the lists played with a duration for each action.

A rank does its actions in order and waits when an input has not arrived; sends do not hold up the sender. Each action is visited
once and a waiting rank is woken by the one action it waits for, so the time is linear in the actions.

This is the one player. A schedule under planned costs (`time`) and one that was executed and profiled (`trace/pipeline.py`) are
both played by `play`; `plan/time/waves.py` plays many costs at once, and tests/plan/test_waves.py holds it to this one to the last
bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import sub

from shardwise.schedules.actions import KINDS, Action, Kind, Schedule


@dataclass(frozen=True)
class Cost:
    """Seconds (or any unit) of each kind of action, one number for each stage."""

    forward: Sequence[float]
    backward_input: Sequence[float]
    backward_weight: Sequence[float]
    backward: Sequence[float] | None = None
    """The backward in one piece; where it is not given, the sum of the two halves."""

    @classmethod
    def even(cls, stages: int, forward: float = 1, backward_input: float = 1, backward_weight: float = 1) -> Cost:
        """The same for every stage; by default the unit of the zero-bubble papers, where the backward is 2."""
        return cls((forward,) * stages, (backward_input,) * stages, (backward_weight,) * stages)

    def of(self, kind: Kind) -> Sequence[float]:
        """The durations of one kind, by stage."""
        if kind == "F":
            return self.forward
        if kind == "I":
            return self.backward_input
        if kind == "W":
            return self.backward_weight
        if self.backward is not None:
            return self.backward
        return [a + b for a, b in zip(self.backward_input, self.backward_weight, strict=True)]


@dataclass(frozen=True)
class Timing:
    """When everything happens. `start[rank][i]` and `end[rank][i]` belong to `schedule.ranks[rank][i]`."""

    start: tuple[tuple[float, ...], ...]
    end: tuple[tuple[float, ...], ...]
    makespan: float
    """From the first start to the last end over all ranks."""
    busy: tuple[float, ...]
    """Work of each rank."""

    @property
    def bubble(self) -> tuple[float, ...]:
        """Time each rank does not work while any rank does: makespan - busy."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def idle(self) -> tuple[float, ...]:
        """Time each rank waits between its own first start and last end.

        The zero-bubble papers count this one: a rank that starts r steps late may run r steps into the next iteration.
        """
        return tuple(
            ends[-1] - starts[0] - busy if starts else 0.0
            for starts, ends, busy in zip(self.start, self.end, self.busy, strict=True)
        )


class Stuck(ValueError):
    """The lists wait for each other, or for an action that is in no list."""

    def __init__(self, waiting: dict[int, Action]) -> None:
        self.waiting = waiting
        super().__init__("; ".join(f"rank {rank} waits before {action}" for rank, action in waiting.items()))


def play(
    ranks: Sequence[Sequence[Action]],
    durations: Sequence[Sequence[float]],
    stages: int,
    microbatches: int,
    delays: Sequence[float],
) -> tuple[list[list[float]], list[list[float]]]:
    """When every action starts and ends, where `durations[rank][i]` is that of `ranks[rank][i]`. `delays` are the transfers after a
    forward of stage s, at (s + 1) x microbatches + microbatch, and after a backward, at (stages + 1 + s) x microbatches +
    microbatch. Whole numbers stay whole. Raises `Stuck` where the lists cannot be played to the end."""
    # Arrivals, by (stage, microbatch) that reads: activations first, gradients after them. What the first stage reads forward, and
    # the last one backward, has always arrived.
    gradients = (stages + 1) * microbatches
    arrived: list[float | None] = [None] * (2 * gradients)
    arrived[:microbatches] = arrived[2 * gradients - microbatches :] = [0] * microbatches
    asleep: dict[int, int] = {}  # what is waited for -> rank
    starts: list[list[float]] = [[] for _ in ranks]
    ends: list[list[float]] = [[] for _ in ranks]
    ready = list(reversed(range(len(ranks))))
    while ready:
        rank = ready.pop()
        actions, lengths, start, end = ranks[rank], durations[rank], starts[rank], ends[rank]
        now = end[-1] if end else 0
        for at in range(len(end), len(actions)):
            kind, stage, microbatch = actions[at]
            writes = -1
            if kind != "W":
                here = stage * microbatches + microbatch
                reads, writes = here, here + microbatches
                if kind != "F":
                    reads, writes = gradients + writes, gradients + here
                arrival = arrived[reads]
                if arrival is None:
                    asleep[reads] = rank
                    break
                if arrival > now:
                    now = arrival
            start.append(now)
            now += lengths[at]
            end.append(now)
            if writes >= 0:
                arrived[writes] = now + delays[writes]
                woken = asleep.pop(writes, None)
                if woken is not None:
                    ready.append(woken)
    stuck = {rank: actions[len(ends[rank])] for rank, actions in enumerate(ranks) if len(ends[rank]) < len(actions)}
    if stuck:
        raise Stuck(stuck)
    return starts, ends


def time(schedule: Schedule, cost: Cost, latency: float | Sequence[float] = 0) -> Timing:
    """Plays a schedule. `latency` is the time of a transfer between two ranks, or one for each boundary: `latency[s]` between
    stages s and s + 1, in both directions. The schedule is one that `check` passes; of a mistake in another this sees only that the
    lists cannot be played to the end, and raises `Stuck`."""
    stages, microbatches, placement = schedule.stages, schedule.microbatches, schedule.placement
    # Plain floats, since arithmetic on the numbers of an array is several times slower.
    by_stage = {kind: [float(duration) for duration in cost.of(kind)] for kind in KINDS}
    if any(len(durations) != stages for durations in by_stage.values()):
        raise ValueError(f"{schedule.name} has {stages} stages: a cost needs that many durations of each kind")
    wire = [latency] * (stages - 1) if isinstance(latency, int | float) else latency
    hop = [float(wire[s]) if placement[s] != placement[s + 1] else 0.0 for s in range(stages - 1)]
    delays = [one for one in (0.0, *hop, 0.0, 0.0, *hop, 0.0) for _ in range(microbatches)]
    durations = [[by_stage[kind][stage] for kind, stage, _ in actions] for actions in schedule.ranks]
    starts, ends = play(schedule.ranks, durations, stages, microbatches, delays)
    busy = tuple(sum(map(sub, end, start)) for start, end in zip(starts, ends, strict=True))
    makespan = max((end[-1] for end in ends if end), default=0.0)
    return Timing(tuple(map(tuple, starts)), tuple(map(tuple, ends)), makespan, busy)
