"""How long a schedule takes: plays the lists with a duration for each kind of action and stage.

A rank runs its actions in order and waits when an input has not arrived; sends do not block the sender. Each action is visited once
and a waiting rank is woken by the one action it waits for, so the time is linear in the number of actions. Saved activations that a
rank evicts to its partner are gone after a latency, and those that it loads are there after a latency. The rank continues
meanwhile, but its next forward waits for the eviction, and the backward of a loaded microbatch waits for the load. Partners are
assumed to be in time.

This is the only player. `play` plays both a schedule under planned costs (`time`) and one that was executed and profiled
(`trace/pipeline.py`). `plan/time/waves.py` plays many costs at once; tests/plan/test_waves.py checks that it agrees with this one
bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add

from shardwise.schedules.actions import KINDS, Action, Kind, Schedule


@dataclass(frozen=True)
class Cost:
    """Seconds (or any unit) of each kind of action, one number for each stage."""

    forward: Sequence[float]
    backward_input: Sequence[float]
    backward_weight: Sequence[float]
    backward: Sequence[float] | None = None
    """The unsplit backward; where it is not given, the sum of the two halves."""

    @classmethod
    def even(cls, stages: int, forward: float = 1, backward_input: float = 1, backward_weight: float = 1) -> Cost:
        """The same for every stage; by default the unit of the zero-bubble papers, where the backward is 2."""
        return cls((forward,) * stages, (backward_input,) * stages, (backward_weight,) * stages)

    def of(self, kind: Kind) -> Sequence[float]:
        """The durations of one kind, by stage."""
        given = {"F": self.forward, "B": self.backward, "I": self.backward_input, "W": self.backward_weight}
        found = given.get(kind, [0.0] * len(self.forward))
        return [*map(add, self.backward_input, self.backward_weight)] if found is None else found


@dataclass(frozen=True)
class Timing:
    """When everything happens. `start[rank][i]` and `end[rank][i]` belong to `schedule.ranks[rank][i]`."""

    start: tuple[tuple[float, ...], ...]
    end: tuple[tuple[float, ...], ...]
    makespan: float
    """From the first start to the last end over all ranks."""


class Deadlock(ValueError):
    """The lists wait for each other, or for an action that is in no list."""

    def __init__(self, waiting: dict[int, Action]) -> None:
        self.waiting = waiting
        super().__init__("; ".join(f"rank {rank} waits before {action}" for rank, action in waiting.items()))


def time(schedule: Schedule, cost: Cost, latency: float | Sequence[float] = 0, handing: float = 0) -> Timing:
    """Play the lists. `latency` is the time of a transfer between two ranks, or one for each boundary: `latency[s]` between stages
    s and s + 1, in both directions; `handing` is that of saved activations between partners. The schedule must be one that `check`
    passes (tests/schedule_check.py); in any other this only notices that the lists cannot be played to the end, and raises
    `Deadlock`."""
    stages, microbatches, placement = schedule.stages, schedule.microbatches, schedule.placement
    # Plain floats, since arithmetic on array scalars is several times slower.
    durations = {kind: [float(duration) for duration in cost.of(kind)] for kind in KINDS}
    if any(len(by_stage) != stages for by_stage in durations.values()):
        raise ValueError(f"{schedule.name} has {stages} stages: a cost needs that many durations of each kind")
    wire = [latency] * (stages - 1) if isinstance(latency, int | float) else latency
    hop = [float(wire[s]) if placement[s] != placement[s + 1] else 0.0 for s in range(stages - 1)]
    works = [[durations[kind][stage] for kind, stage, _ in actions] for actions in schedule.ranks]
    forward = [seconds for seconds in (*hop, 0.0) for _ in range(microbatches)]
    backward = [seconds for seconds in (0.0, *hop) for _ in range(microbatches)]
    return play(schedule.ranks, stages, microbatches, works, forward, backward, handing, schedule.directions)


def play(
    ranks: Sequence[Sequence[Action]],
    stages: int,
    microbatches: int,
    works: Sequence[Sequence[float]],
    forward: Sequence[float],
    backward: Sequence[float],
    handing: float = 0.0,
    directions: int = 1,
) -> Timing:
    """Play lists of actions, each with its own duration in `works`. `forward` and `backward` are the latencies of the messages that
    the forward and the backward of each stage and microbatch send, at stage * microbatches + microbatch. Raises `Deadlock`."""
    # Arrival times of the messages from each forward or backward to the next stage. Slots run by (stage, microbatch);
    # the messages of the stage "before the first" and the stage "after the last" have always arrived.
    size = stages * microbatches
    activation: list[float | None] = [0.0] * microbatches + [None] * size  # stage s reads at s * microbatches
    gradient: list[float | None] = [None] * size + [0.0] * microbatches  # stage s reads at (s + 1) * microbatches
    for edge in range(size // directions, size, size // directions):  # where one direction ends and the next begins
        activation[edge : edge + microbatches] = gradient[edge : edge + microbatches] = [0.0] * microbatches
    asleep: dict[int, int] = {}  # slot waited for -> rank; gradients are numbered after the activations
    gradient_slots = size + microbatches

    starts: list[list[float]] = [[] for _ in ranks]
    ends: list[list[float]] = [[] for _ in ranks]
    clock = [0.0] * len(ranks)
    emptied = [0.0] * len(ranks)  # when the last eviction of each rank ends
    loaded: dict[int, float] = {}
    own: dict[int, set[int]] = {}  # stages of ranks that hand over activations
    ready = list(reversed(range(len(ranks))))
    while ready:
        rank = ready.pop()
        actions, work, start, end, now = ranks[rank], works[rank], starts[rank], ends[rank], clock[rank]
        for at in range(len(end), len(actions)):
            kind, stage, microbatch = actions[at]
            here = stage * microbatches + microbatch
            after = here + microbatches
            woken = None
            if kind == "F":
                arrival = activation[here]
                if arrival is None:
                    asleep[here] = rank
                    break
                if arrival > now:
                    now = arrival
                if emptied[rank] > now:
                    now = emptied[rank]
                start.append(now)
                now += work[at]
                activation[after] = now + forward[here]
                woken = asleep.pop(after, None)
            elif kind in ("W", "U"):
                start.append(now)
                now += work[at]
            elif kind in ("E", "L"):
                start.append(now)
                now += work[at]
                if rank not in own:
                    own[rank] = {held for one, held, _ in actions if one == "F"}
                if stage not in own[rank]:
                    pass  # the partner's side
                elif kind == "E":
                    emptied[rank] = now + handing
                else:
                    loaded[here] = now + handing
            else:
                arrival = gradient[after]
                if arrival is None:
                    asleep[gradient_slots + after] = rank
                    break
                if arrival > now:
                    now = arrival
                if loaded and loaded.get(here, 0.0) > now:
                    now = loaded[here]
                start.append(now)
                now += work[at]
                gradient[here] = now + backward[here]
                woken = asleep.pop(gradient_slots + here, None)
            end.append(now)
            if woken is not None:
                ready.append(woken)
        clock[rank] = now

    stuck = {rank: actions[len(ends[rank])] for rank, actions in enumerate(ranks) if len(ends[rank]) < len(actions)}
    if stuck:
        raise Deadlock(stuck)
    return Timing(tuple(map(tuple, starts)), tuple(map(tuple, ends)), max(clock, default=0.0))
