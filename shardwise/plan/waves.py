"""One schedule played under many costs at once, for a search that compares layouts of the same schedule.

What an action waits for does not depend on how long anything takes, so the actions fall into waves, each of which only needs
those before it: at most one action a rank. A wave is then a few operations on arrays of (ranks, layouts). The result is that
of `schedules.time` to the last bit, since every number goes through the same additions and maxima.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardwise.schedules import Cost, Kind, Schedule, Stuck

_ROWS: dict[Kind, int] = {"F": 0, "I": 1, "W": 2, "B": 3}


class Waves:
    """A schedule's actions in the order in which all of them can be played."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        stages, m, placement = schedule.stages, schedule.microbatches, schedule.placement
        # Slots of activations, those of gradients, one that is never waited for, one that nobody reads.
        size = (stages + 1) * m
        self.slots = 2 * size + 2
        near = [stages if placement[s] == placement[s + 1] else s for s in range(stages - 1)]
        offsets: dict[Kind, tuple[int, int, list[int]]] = {
            "F": (0, m, [*near, stages]),
            "I": (size + m, size, [stages, *near]),
            "B": (size + m, size, [stages, *near]),
        }
        arrived = bytearray(self.slots)
        arrived[:m] = b"\1" * m
        arrived[2 * size - m : 2 * size + 1] = b"\1" * (m + 1)
        columns: list[tuple[int, int, int, int, int]] = []
        cuts: list[int] = []
        at = [0] * len(schedule.ranks)
        playing = [rank for rank, actions in enumerate(schedule.ranks) if actions]
        while playing:
            begun = len(columns)
            for rank in playing:
                kind, stage, microbatch = schedule.ranks[rank][at[rank]]
                row = _ROWS[kind] * stages + stage
                if kind == "W":
                    columns.append((rank, 2 * size, 2 * size + 1, row, stages))
                    continue
                read, write, hop = offsets[kind]
                slot = stage * m + microbatch
                if arrived[read + slot]:
                    columns.append((rank, read + slot, write + slot, row, hop[stage]))
            if len(columns) == begun:
                raise Stuck({rank: schedule.ranks[rank][at[rank]] for rank in playing})
            for rank, _, write, _, _ in columns[begun:]:
                arrived[write] = 1
                at[rank] += 1
            playing = [rank for rank in playing if at[rank] < len(schedule.ranks[rank])]
            cuts.append(len(columns))
        table = np.array(columns, np.int64).T
        self.waves = [table[:, start:stop] for start, stop in zip([0, *cuts[:-1]], cuts, strict=True)]

    def makespans(self, costs: Sequence[Cost], latencies: Sequence[float]) -> np.ndarray:
        """From the first start to the last end under each of the costs, transfers between ranks taking `latencies`."""
        stages, layouts = self.schedule.stages, len(costs)
        durations = np.array([[cost.of(kind) for kind in _ROWS] for cost in costs], np.float64)
        lengths = np.ascontiguousarray(durations.reshape(layouts, -1).T)
        wire = np.repeat(np.asarray(latencies, float)[None], stages + 1, axis=0)
        wire[stages] = 0.0  # between stages of one rank
        arrival = np.zeros((self.slots, layouts))
        clock = np.zeros((len(self.schedule.ranks), layouts))
        for rank, read, write, row, hop in self.waves:
            end = np.maximum(clock[rank], arrival[read])
            end += lengths[row]
            clock[rank] = end
            end += wire[hop]
            arrival[write] = end
        return clock.max(axis=0, initial=0.0)
