"""One schedule played under many costs at once, for a search that compares layouts of the same schedule.

What an action waits for does not depend on how long anything takes. So the actions fall into waves, each of which only needs those
before it: at most one action a rank. A wave is then a few operations on arrays of (ranks, layouts). This is `schedules.time`, made
fast: every number goes through the same additions and maxima, and tests/plan/test_waves.py holds the two equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

import numpy as np

from shardwise.schedules import Cost, Deadlock, Kind, Schedule

_ROWS: dict[Kind, int] = {"F": 0, "I": 1, "W": 2, "B": 3}
_KINDS = np.zeros(128, np.int64)
_KINDS[[ord(kind) for kind in _ROWS]] = list(_ROWS.values())


class Waves:
    """A schedule's actions in the order in which all of them can be played."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        stages, m, placement = schedule.stages, schedule.microbatches, schedule.placement
        # Slots of activations, those of gradients, one that is never waited for, one that nobody reads.
        size = (stages + 1) * m
        self.slots = 2 * size + 2
        near = [stages if placement[s] == placement[s + 1] else s for s in range(stages - 1)]
        actions = list(chain.from_iterable(schedule.ranks))
        kinds, numbers, microbatches = zip(*actions, strict=True)
        kind = _KINDS[np.frombuffer("".join(kinds).encode(), np.uint8)]
        stage = np.array(numbers, np.int64)
        slot = stage * m + np.array(microbatches, np.int64)
        forward, weight = kind == _ROWS["F"], kind == _ROWS["W"]
        read = np.where(forward, slot, slot + size + m)
        write = np.where(forward, slot + m, slot + size)
        hop = np.where(forward, np.array([*near, stages])[stage], np.array([stages, *near])[stage])
        read[weight], write[weight], hop[weight] = 2 * size, 2 * size + 1, stages
        rank = np.repeat(np.arange(len(schedule.ranks)), [len(own) for own in schedule.ranks])
        order, cuts = _waves(schedule, read.tolist(), write.tolist(), self.slots)
        rank, read, write = rank[order], read[order], write[order]
        self.rows, self.hops = (kind * stages + stage)[order], hop[order]
        pairs = zip([0, *cuts[:-1]], cuts, strict=True)
        self.waves = [(rank[a:b], read[a:b], write[a:b], slice(a, b)) for a, b in pairs]

    def makespans(self, costs: Sequence[Cost], latencies: Sequence[float]) -> np.ndarray:
        """From the first start to the last end under each of the costs, transfers between ranks taking `latencies`."""
        durations = np.array([[cost.of(kind) for kind in _ROWS] for cost in costs], np.float64)
        lengths = np.ascontiguousarray(durations.reshape(len(costs), -1).T)
        return self._played(lengths, np.asarray(latencies, float))

    def spans(self, stages: np.ndarray, wire: np.ndarray) -> np.ndarray:
        """The same of costs that are arrays of [forward, for the input, for the weights; stage; layout]."""
        forward, inputs, weights = stages
        return self._played(np.concatenate([forward, inputs, weights, inputs + weights]), wire)

    def _played(self, lengths: np.ndarray, latencies: np.ndarray) -> np.ndarray:
        """`lengths` are of [kind of action and stage, layout]."""
        stages, layouts = self.schedule.stages, len(latencies)
        wire = np.repeat(latencies[None], stages + 1, axis=0)
        wire[stages] = 0.0  # between stages of one rank
        arrival = np.zeros((self.slots, layouts))
        clock = np.zeros((len(self.schedule.ranks), layouts))
        lengths, wire = lengths[self.rows], wire[self.hops]
        for rank, read, write, here in self.waves:
            end = np.maximum(clock.take(rank, 0), arrival.take(read, 0))
            end += lengths[here]
            clock[rank] = end
            end += wire[here]
            arrival[write] = end
        return clock.max(axis=0, initial=0.0)


def _waves(schedule: Schedule, read: list[int], write: list[int], slots: int) -> tuple[list[int], list[int]]:
    """Numbers of the actions, those of a wave together, and where each wave ends."""
    m = schedule.microbatches
    arrived = bytearray(slots)
    arrived[:m] = b"\1" * m
    arrived[slots - 2 - m : slots - 1] = b"\1" * (m + 1)
    order: list[int] = []
    cuts: list[int] = []
    ends = list(accumulate(len(own) for own in schedule.ranks))
    at = [end - len(own) for end, own in zip(ends, schedule.ranks, strict=True)]
    playing = [rank for rank, own in enumerate(schedule.ranks) if own]
    while playing:
        ready = [rank for rank in playing if arrived[read[at[rank]]]]
        if not ready:
            first = [end - len(own) for end, own in zip(ends, schedule.ranks, strict=True)]
            raise Deadlock({rank: schedule.ranks[rank][at[rank] - first[rank]] for rank in playing})
        over = False
        for rank in ready:
            number = at[rank]
            order.append(number)
            arrived[write[number]] = 1
            at[rank] = number + 1
            over = over or number + 1 == ends[rank]
        if over:
            playing = [rank for rank in playing if at[rank] < ends[rank]]
        cuts.append(len(order))
    return order, cuts
