"""One schedule played under many costs at once, for a search that compares layouts of the same schedule.

Which action another one waits for does not depend on how long anything takes. So the actions are grouped into waves, each of which
needs only earlier waves and has at most one action a rank. A wave is then a few operations on arrays of (ranks, layouts). This is
`schedules.time`, made fast: every number goes through the same additions and maxima, and tests/plan/test_waves.py checks that the
two are equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import chain, pairwise

import numpy as np

from shardwise.schedules import Cost, Deadlock, Kind, Schedule

_ROWS: dict[Kind, int] = {"F": 0, "I": 1, "W": 2, "B": 3, "E": 4, "L": 5, "U": 6}
NOBODY, UNPLAYED = -2, -2
_KINDS = np.zeros(128, np.int64)
_KINDS[[ord(kind) for kind in _ROWS]] = list(_ROWS.values())


class Waves:
    """A schedule's actions in an order in which all of them can be played."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        stages, m, placement = schedule.stages, schedule.microbatches, schedule.placement
        near = [stages if placement[s] == placement[s + 1] else s for s in range(stages - 1)]
        kinds, numbers, microbatches = zip(*chain.from_iterable(schedule.ranks), strict=True)
        kind = _KINDS[np.frombuffer("".join(kinds).encode(), np.uint8)]
        stage = np.array(numbers, np.int64)
        slot = stage * m + np.array(microbatches, np.int64)
        # Actions that send nothing to another stage: weight gradients, and handovers, which take no time here.
        forward, weight = kind == _ROWS["F"], (kind == _ROWS["W"]) | (kind >= _ROWS["E"])
        hop = np.where(forward, np.array([*near, stages])[stage], np.array([stages, *near])[stage])
        hop[weight] = stages
        # The action that makes each slot: slots of activations, then of gradients. Action `nothing` is always done.
        nothing, size = len(kind), (stages + 1) * m
        maker = np.full(2 * size, NOBODY)
        maker[:m] = maker[2 * size - m :] = nothing
        one_way = schedule.depth * m
        for end in range(one_way, stages * m, one_way):  # where one direction ends and the next begins
            maker[end : end + m] = maker[size + end : size + end + m] = nothing
        sends = np.flatnonzero(~weight)
        maker[np.where(forward, slot + m, slot + size)[sends]] = sends
        awaited = maker[np.where(forward, slot, slot + size + m)]
        awaited[weight] = nothing
        lengths = [len(own) for own in schedule.ranks]
        ends = np.cumsum(lengths)
        wave = np.array(_waves(schedule, awaited.tolist(), ends.tolist()))
        order = np.argsort(wave, kind="stable")
        place = np.empty(nothing + 1, np.int64)
        place[order], place[nothing] = np.arange(nothing), nothing
        before = np.arange(-1, nothing - 1)
        some = np.array(lengths) > 0
        before[(ends - lengths)[some]] = nothing
        self.rows, self.hops = (kind * stages + stage)[order], hop[order]
        self.lasts = place[(ends - 1)[some]]
        # The previous action of the rank, and the awaited one, whose result has arrived when its transfer is over.
        pairs = np.stack([place[before[order]], place[awaited[order]]])
        apart = pairs + np.array([[0], [nothing + 1]])
        cuts = np.cumsum(np.bincount(wave)).tolist()
        slices = [slice(a, b) for a, b in pairwise([0, *cuts])]
        self.waves = [(pairs[:, here], apart[:, here], here) for here in slices]

    @cached_property
    def _homes(self) -> np.ndarray:
        """[rank, stage]: 1 where the rank holds the stage; a half where half of the microbatches go in each direction."""
        schedule = self.schedule
        homes = np.zeros((len(schedule.ranks), schedule.stages))
        homes[schedule.placement, np.arange(schedule.stages)] = 1 / schedule.directions
        return homes

    def further(self, lengths: np.ndarray, more: np.ndarray, microbatches: int) -> np.ndarray:
        """Seconds that each further microbatch adds to a long schedule, by those that the last `microbatches` added: at least what
        the busiest rank has to do for one. In a short schedule of unequal stages, others may wait for another rank than the
        busiest. `lengths` are seconds of a stage's passes, [stage, layout]."""
        busiest: np.ndarray = (self._homes @ lengths).max(axis=0)
        return np.maximum(more / microbatches, busiest)

    def makespans(self, costs: Sequence[Cost], latencies: Sequence[float]) -> np.ndarray:
        """Seconds from the first start to the last end under each of the costs; transfers between ranks take `latencies`."""
        durations = np.array([[cost.of(kind) for kind in _ROWS] for cost in costs], np.float64)
        lengths = np.ascontiguousarray(durations.reshape(len(costs), -1).T)
        return self._played(lengths, np.asarray(latencies, float))

    def spans(self, stages: np.ndarray, wire: np.ndarray) -> np.ndarray:
        """The makespans of costs given as arrays of [forward, backward for the input, for the weights; stage; layout]."""
        forward, inputs, weights = stages
        nothing = [np.zeros_like(forward)] * (len(_ROWS) - 4)  # handovers and updates
        return self._played(np.concatenate([forward, inputs, weights, inputs + weights, *nothing]), wire)

    def _played(self, lengths: np.ndarray, latencies: np.ndarray) -> np.ndarray:
        """The makespans; `lengths` has the shape [kinds of action x stages, layouts]."""
        stages, count, layouts = self.schedule.stages, len(self.rows), len(latencies)
        if not latencies.any():  # a result arrives as soon as it is done
            done = np.zeros((count + 1, layouts))
            np.take(lengths, self.rows, 0, done[:count], "clip")
            for pair, _, here in self.waves:
                end = done[here]
                end += np.maximum(*done.take(pair, 0))
            return done[self.lasts].max(axis=0, initial=0.0)
        wire = np.repeat(latencies[None], stages + 1, axis=0)
        wire[stages] = 0.0  # between stages of one rank
        both = np.zeros((2, count + 1, layouts))
        done, arrival = both
        np.take(lengths, self.rows, 0, done[:count], "clip")
        np.take(wire, self.hops, 0, arrival[:count], "clip")
        flat = both.reshape(-1, layouts)
        for _, pair, here in self.waves:
            end, arrives = done[here], arrival[here]
            end += np.maximum(*flat.take(pair, 0))
            arrives += end
        return done[self.lasts].max(axis=0, initial=0.0)


def _waves(schedule: Schedule, awaited: list[int], ends: list[int]) -> list[int]:
    """The wave of each action: after the wave of the previous action on its rank, and of the action that it waits for."""
    count = len(awaited)
    wave = [UNPLAYED] * count + [-1]
    asleep: dict[int, int] = {}
    at = [end - len(own) for end, own in zip(ends, schedule.ranks, strict=True)]
    first = list(at)
    ready = list(reversed(range(len(ends))))
    while ready:
        rank = ready.pop()
        here, end = at[rank], ends[rank]
        now = wave[here - 1] if here > first[rank] else -1
        while here < end:
            number = awaited[here]
            other = wave[number] if number != NOBODY else UNPLAYED
            if other == UNPLAYED:
                asleep[number] = rank
                break
            now = (now if now > other else other) + 1
            wave[here] = now
            if here in asleep:
                ready.append(asleep.pop(here))
            here += 1
        at[rank] = here
    waiting = {rank: own[at[rank] - first[rank]] for rank, own in enumerate(schedule.ranks) if at[rank] < ends[rank]}
    if waiting:
        raise Deadlock(waiting)
    return wave[:-1]
