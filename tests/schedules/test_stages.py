"""Layers over stages: the least bottleneck, against trying every split; and splits given by hand."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.schedules import split_layers


def every_split(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, layers), stages - 1):
        yield tuple(b - a for a, b in zip((0, *cuts), (*cuts, layers), strict=True))


def bottleneck(counts: tuple[int, ...], costs: list[float], first: float, last: float) -> float:
    loads = []
    start = 0
    for count in counts:
        loads.append(sum(costs[start : start + count]))
        start += count
    loads[0] += first
    loads[-1] += last
    return max(loads)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=9), st.integers(0, 12), st.integers(0, 12), st.data())
def test_no_other_split_is_better_or_as_good_and_more_even(
    costs: list[float], first: float, last: float, data: st.DataObject
) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    best = min(
        every_split(len(costs), stages),
        key=lambda counts: (bottleneck(counts, costs, first, last), sum(count**2 for count in counts), counts),
    )
    assert split_layers(costs, stages, first, last) == best


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1, width=32), min_size=2, max_size=8), st.data())
def test_the_bottleneck_is_exact_for_any_numbers(costs: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    counts = split_layers(costs, stages, 0.3, 0.7)
    assert len(counts) == stages
    assert sum(counts) == len(costs)
    assert min(counts) >= 1
    least = min(bottleneck(other, costs, 0.3, 0.7) for other in every_split(len(costs), stages))
    assert bottleneck(counts, costs, 0.3, 0.7) == pytest.approx(least, abs=1e-12)


def test_the_embedding_and_the_head_take_the_place_of_layers() -> None:
    assert split_layers([1] * 32, 4) == (8, 8, 8, 8)
    assert split_layers([1] * 30, 4, first=1, last=1) == (7, 8, 8, 7)
    assert split_layers([1] * 30, 4, first=0, last=2) == (8, 8, 8, 6)
    assert split_layers([1] * 10, 4) == (2, 2, 3, 3)  # fewer early, where the most microbatches are held
    assert split_layers([1, 1, 1, 1], 4, last=100) == (1, 1, 1, 1)


def test_where_layers_are_too_few_the_embedding_and_the_head_stand_alone() -> None:
    assert split_layers([1] * 126, 128, first=1, last=9) == (0, *[1] * 126, 0)  # Llama 3 405B (Grattafiori et al. 2024)
    assert split_layers([1, 1, 1], 4, first=1, last=9) == (1, 1, 1, 0)
    assert split_layers([1, 1, 1], 4, first=9, last=1) == (0, 1, 1, 1)
    assert split_layers([1], 2) == (1, 0)


def test_what_cannot_be_split_is_said() -> None:
    with pytest.raises(ValueError, match="3 layers cannot be split into 6 stages"):
        split_layers([1, 1, 1], 6)
    with pytest.raises(ValueError, match="negative"):
        split_layers([1, -1, 1], 2)
