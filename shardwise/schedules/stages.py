"""Which layers are on which stage: the slowest stage sets the pace of a pipeline, so its cost is minimised.

The embedding counts as work of the first stage and the head, norm and loss as work of the last, so those get fewer
layers. The result is exact: the least bottleneck is one of the sums of neighbouring layers, and a greedy fill tests
whether such a sum suffices.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate


def split_layers(costs: Sequence[float], stages: int, first: float = 0, last: float = 0) -> tuple[int, ...]:
    """Layers of each stage, in order, such that the slowest stage is as fast as possible. Each has at least one layer, but for the
    first and the last where layers are too few.

    `costs` has a number for each layer, `first` is added to the first stage and `last` to the last. Of the splits with
    that bottleneck it is the most even in layers (least sum of squares), and of those the one with fewer layers early,
    where a pipeline has the most microbatches in flight.
    """
    layers = len(costs)
    if stages < 1 or stages > layers + (2 if stages > 1 else 0):
        raise ValueError(f"{layers} layers cannot be split into {stages} stages: only the ends may have none")
    if min(*costs, first, last) < 0:
        raise ValueError("a layer with a negative cost: the work of a layer, the embedding and the head is 0 or more")

    if stages > layers:  # one layer each, none beside the embedding and the head, or beside the costlier of them
        ends = (0, 0) if stages > layers + 1 else (0, 1) if first > last else (1, 0)
        return (ends[0], *[1] * (stages - 2), ends[1])
    totals = [_totals(costs, start, first, last) for start in range(layers)]
    sums = sorted(set().union(*totals))

    def fitting(limit: float) -> list[int]:
        """For each first layer, how many layers a stage of at most this cost may have. Totals only grow."""
        return [bisect_right(some, limit) for some in totals]

    bottleneck = sums[bisect_left(sums, True, key=lambda limit: _fewest_stages(fitting(limit)) <= stages)]

    # best[start] is the least sum of squares with which the layers from `start` on fill the stages still to fill, and the
    # layers of the first of those; from the last stage backwards, and only where a stage can start.
    longest = fitting(bottleneck)
    best: dict[int, tuple[int, int]] = {layers: (0, 0)}
    choices = []
    for starts in reversed(_starts(longest, stages)):
        options = {
            at: [(best[at + n][0] + n**2, n) for n in range(1, longest[at] + 1) if at + n in best] for at in starts
        }
        best = {at: min(some) for at, some in options.items() if some}
        choices.append(best)
    counts: list[int] = []
    for choice in reversed(choices):
        counts.append(choice[sum(counts)][1])
    return tuple(counts)


def _totals(costs: Sequence[float], start: int, first: float, last: float) -> list[float]:
    """The cost of a stage of 1, 2, … layers from `start` on. Always added in this order, so that equal sums are equal."""
    totals = list(accumulate(costs[start:], initial=first if start == 0 else 0))[1:]
    totals[-1] += last
    return totals


def _starts(longest: Sequence[int], stages: int) -> list[range]:
    """Where each stage can start such that the layers before and after it fill the other stages."""
    layers = len(longest)
    latest = [0]
    for _ in range(stages - 1):
        latest.append(min(layers - 1, latest[-1] + longest[latest[-1]]))
    earliest = layers
    result: list[range] = []
    for stage in reversed(range(stages)):
        while earliest > stage and earliest - 1 + longest[earliest - 1] >= (result[-1].start if result else layers):
            earliest -= 1
        result.append(range(earliest, min(latest[stage], layers - stages + stage) + 1))
    return result[::-1]


def _fewest_stages(longest: Sequence[int]) -> float:
    """Stages needed when a stage has at most `longest[first layer]` layers; infinite when one layer alone is too many."""
    start = count = 0
    while start < len(longest):
        if longest[start] == 0:
            return float("inf")
        start += longest[start]
        count += 1
    return count
