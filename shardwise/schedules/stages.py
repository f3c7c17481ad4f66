"""Which layers are on which stage: the slowest stage sets the pace of a pipeline, so its cost is minimised.

The embedding counts as work of the first stage and the head, norm and loss as work of the last, so those get fewer
layers. The result is exact: the least bottleneck is one of the sums of neighbouring layers, and a greedy fill tests
whether such a sum suffices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = Any
MANY = 512
"""Number of layers above which arrays are faster than lists."""
UNREACHED = np.iinfo(np.int64).max // 2


def split_layers(costs: Sequence[float], stages: int, first: float = 0, last: float = 0) -> tuple[int, ...]:
    """Number of layers of each stage, in order, such that the slowest stage is as fast as possible. Each stage has at least one
    layer, except the first and the last where layers are too few.

    `costs` has a number for each layer, `first` is added to the first stage and `last` to the last. Of the splits with that
    bottleneck, the result is the most even in layers (least sum of squares), and of those the one with fewer layers early, where a
    pipeline has the most microbatches in flight.
    """
    layers = len(costs)
    if stages < 1 or stages > layers + (2 if stages > 1 else 0):
        raise ValueError(f"{layers} layers cannot be split into {stages} stages: only the ends may have none")
    if min(*costs, first, last) < 0:
        raise ValueError("a layer with a negative cost: the work of a layer, the embedding and the head is 0 or more")

    if stages > layers:  # one layer each, but none beside the embedding and the head, or the costlier of them
        ends = (0, 0) if stages > layers + 1 else (0, 1) if first > last else (1, 0)
        return (ends[0], *[1] * (stages - 2), ends[1])
    bottleneck = _bottleneck(costs, stages, first, last)
    longest = _longest(costs, bottleneck, first, last)
    starts = _starts(longest.tolist(), stages)
    if layers > MANY:
        return _most_even_of_many(longest, starts)
    # best[start] is the least sum of squares with which the layers from `start` on fill the remaining stages, and the
    # number of layers of the first of those. It is computed from the last stage backwards, and only where a stage can
    # start.
    most = longest.tolist()
    best: dict[int, tuple[int, int]] = {layers: (0, 0)}
    choices = []
    for some in reversed(starts):
        options = {at: [(best[at + n][0] + n**2, n) for n in range(1, most[at] + 1) if at + n in best] for at in some}
        best = {at: min(ways) for at, ways in options.items() if ways}
        choices.append(best)
    counts: list[int] = []
    for choice in reversed(choices):
        counts.append(choice[sum(counts)][1])
    return tuple(counts)


def _most_even_of_many(longest: Array, starts: list[range]) -> tuple[int, ...]:
    """The same over arrays: thousands of layers may be cut in many ways."""
    best, begin = np.zeros(1, np.int64), len(longest)
    choices = []
    for some in reversed(starts):
        least, chosen = np.full(len(some), UNREACHED), np.zeros(len(some), np.int64)
        most = longest[some.start : some.stop]
        for n in range(max(1, begin - some[-1]), min(int(most.max()), begin + len(best) - 1 - some[0]) + 1):
            a, b = max(some.start, begin - n), min(some.stop, begin + len(best) - n)
            here = slice(a - some.start, b - some.start)
            squares = np.where(most[here] >= n, best[a + n - begin : b + n - begin] + n**2, UNREACHED)
            chosen[here] = np.where(squares < least[here], n, chosen[here])
            least[here] = np.minimum(least[here], squares)
        best, begin = least, some.start
        choices.append((begin, chosen))
    counts: list[int] = []
    for begin, chosen in reversed(choices):
        counts.append(int(chosen[sum(counts) - begin]))
    return tuple(counts)


def _bottleneck(costs: Sequence[float], stages: int, first: float, last: float) -> float:
    """The least cost of the slowest stage: the least limit with which a greedy fill needs at most `stages` stages, by bisection.
    The fullest stage of a fill, or the least total that it refused, is the next limit that matters."""
    low, high = float(max(costs)), float(first + sum(costs) + last) * (1 + 1e-9)
    if _filled(costs, low, first, last)[0] <= stages:
        return low
    while low < (middle := (low + high) / 2) < high:
        count, fullest, refused = _filled(costs, middle, first, last)
        if count <= stages:
            high = fullest
        else:
            low = math.nextafter(refused, 0.0)
    return high


def _filled(costs: Sequence[float], limit: float, first: float, last: float) -> tuple[float, float, float]:
    """Number of stages needed when each costs at most `limit`, infinite when one layer alone exceeds it; the cost of the fullest
    stage, and the least total that exceeded the limit. A stage is always summed in the order of its layers, so that equal sums are
    equal."""
    count, before, fullest, refused, end = 0, math.inf, 0.0, math.inf, len(costs) - 1
    for number, cost in enumerate(costs):
        more = last if number == end else 0
        total = (before if number else first) + cost + more
        if total > limit:
            refused = min(refused, total) if number else total
            count, fullest = count + 1, max(fullest, before) if number else fullest
            total = (0 if number else first) + cost + more
            if total > limit:
                return math.inf, fullest, min(refused, total)
        before = total
    return count + 1, max(fullest, before), refused


def _longest(costs: Sequence[float], limit: float, first: float, last: float) -> Array:
    """For each first layer, the most layers that a stage of at most this cost may have. Totals only grow."""
    array, layers = np.array(costs, float), len(costs)
    found = np.zeros(layers, np.int64)
    size = 1
    for start in range(layers):
        while True:
            part = array[start : start + size + 1].copy()
            part[0] += first if start == 0 else 0.0
            totals = np.cumsum(part)
            if start + len(part) == layers:
                totals[-1] += last
            size = int(np.searchsorted(totals, limit, side="right"))
            if size < len(part) or start + len(part) == layers:
                break
            size = 2 * len(part)
        found[start] = size
    return found


def _starts(longest: Sequence[int], stages: int) -> list[range]:
    """The layers at which each stage can start, such that the layers before and after it fill the other stages."""
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
