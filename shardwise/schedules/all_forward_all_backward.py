"""GPipe and the breadth-first pipeline: all forwards, then all backwards.

GPipe (Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism"): with P ranks,
m microbatches, F and B the times of one stage, the bubble on each rank is (P - 1)(F + B), and every rank holds the
activations of m microbatches, which is what all later schedules improve on. The paper runs backwards in reverse order. Here
they run in the order of the forwards, as in every schedule of this folder: a stage accumulates its gradients in one order,
and all schedules give the same sum, bit for bit.

Breadth-first (Lamy-Poirier 2023, "Breadth-First Pipeline Parallelism"): each rank holds v stages, placed round-robin, and
runs the forward of all microbatches through one of them before the next; then the backward likewise. With m >= P
microbatches, F and B the times of one of the v stages:

- bubble on each rank: (P - 1)(F + B), 1/v of GPipe's, since a stage is 1/v of a rank's layers;
- activations held: m on each of v stages, m v in all, as much as GPipe.

In return for that memory a rank works on one stage for a long stretch: with sharded parameters each stage is gathered once for the
forward and once for the backward, not once for each microbatch, and its gradients can be reduced while the next stage computes.
With fewer microbatches than ranks a rank waits for the first one to come round.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, repeat

from shardwise.schedules.actions import Schedule, actions_of, loop_placement


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards."""
    return replace(breadth_first(ranks, microbatches, chunks=1), name="gpipe")


def breadth_first(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """All microbatches through one stage, then all through the rank's next; the backward takes the stages in reverse."""
    lists = []
    for rank in range(ranks):
        stages = range(rank, ranks * chunks, ranks)
        forward = (actions_of("F", repeat(stage), range(microbatches)) for stage in stages)
        backward = (actions_of("B", repeat(stage), range(microbatches)) for stage in reversed(stages))
        lists.append(tuple(chain.from_iterable(chain(forward, backward))))
    return Schedule("breadth-first", tuple(lists), loop_placement(ranks, chunks), microbatches)
