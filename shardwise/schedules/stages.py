"""Which layers stand on which stage: the slowest stage sets the pace of a pipeline, so its cost is made least.

The embedding counts as work of the first stage and the head, norm and loss as work of the last, so those get fewer
layers. The result is exact: the least bottleneck is one of the sums of neighbouring layers, and a greedy fill says of
each such sum whether it suffices.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import takewhile


def split_layers(costs: Sequence[float], stages: int, first: float = 0, last: float = 0) -> tuple[int, ...]:
    """Layers of each stage, in order, such that the costliest stage costs least; each has at least one layer.

    `costs` has a number for each layer, `first` is added to the first stage and `last` to the last. Of the splits with
    that bottleneck it is the most even in layers (least sum of squares), and of those the one that has fewer layers
    early, where a pipeline holds the most microbatches.
    """
    layers = len(costs)
    if stages < 1 or stages > layers:
        raise ValueError(f"{layers} layers cannot be cut into {stages} stages: each stage needs at least one layer")
    if min(*costs, first, last) < 0:
        raise ValueError("a layer with a negative cost: the work of a layer, the embedding and the head is 0 or more")

    sums = sorted({total for start in range(layers) for total in _totals(costs, start, first, last)})
    bottleneck = sums[bisect_left(sums, True, key=lambda most: _fewest_stages(costs, most, first, last) <= stages)]

    # best[start] is the least sum of squares with which the layers from `start` on fill the stages still to fill, and
    # the layers of the first of those; from the last stage backwards.
    best: list[tuple[int, int] | None] = [None] * layers + [(0, 0)]
    longest = [
        sum(1 for _ in takewhile(lambda total: total <= bottleneck, _totals(costs, start, first, last)))
        for start in range(layers)
    ]
    choices = []
    for _ in range(stages):
        now: list[tuple[int, int] | None] = [None] * (layers + 1)
        for start, most in enumerate(longest):
            for count in range(1, most + 1):
                rest = best[start + count]
                if rest is not None:
                    option = (rest[0] + count**2, count)
                    now[start] = min(now[start] or option, option)
        best = now
        choices.append(best)
    counts: list[int] = []
    for choice in reversed(choices):
        found = choice[sum(counts)]
        assert found is not None  # the bottleneck was found to suffice
        counts.append(found[1])
    return tuple(counts)


def _totals(costs: Sequence[float], start: int, first: float, last: float) -> Iterator[float]:
    """The cost of a stage of 1, 2, … layers from `start` on. Always added in this order, so that equal sums are equal."""
    total = first if start == 0 else 0
    for layer in range(start, len(costs)):
        total += costs[layer]
        yield total + last if layer == len(costs) - 1 else total


def _fewest_stages(costs: Sequence[float], most: float, first: float, last: float) -> float:
    """Stages needed when none may cost more than `most`; infinite when one layer alone does."""
    start = count = 0
    while start < len(costs):
        fits = 0
        for total in _totals(costs, start, first, last):
            if total > most:
                break
            fits += 1
        if fits == 0:
            return float("inf")
        start += fits
        count += 1
    return count
