"""Silent corruption: one flipped bit on one rank is found and blamed on it; without one, rechecking changes nothing."""

from __future__ import annotations

import os

import pytest
from fault_cases import compared, twice
from parallel_pool import RankPool


@pytest.mark.parametrize("layout", [{"replicate": 2}, {"shard": 2}, {"shard": 2, "zero": 3}], ids=str)
@pytest.mark.drawn(1)
def test_a_flipped_bit_is_blamed_on_its_rank(ranks: RankPool, layout: dict[str, int]) -> None:
    cache = os.environ["XDG_CACHE_HOME"]
    right = ranks.run(2, twice, layout, None, cache)
    assert right[0] == right[1]
    assert isinstance(right[0], float)
    said = ranks.run(2, twice, layout, 1, cache)
    assert said == ["rank 1 computed other gradients when step 2 was computed again"] * 2


def test_a_flipped_bit_of_a_matrix_that_is_gathered_by_itself_is_blamed_on_its_rank(ranks: RankPool) -> None:
    said = ranks.run(2, twice, {"shard": 2, "zero": 3}, 1, os.environ["XDG_CACHE_HOME"], "embed")
    assert said == ["rank 1 computed other gradients when step 2 was computed again"] * 2


def test_ranks_that_compute_a_sample_together_are_named_together(ranks: RankPool) -> None:
    said = ranks.run(2, twice, {"tensor": 2}, 0, os.environ["XDG_CACHE_HOME"])
    assert said[0] == said[1]
    assert "rank" in said[0]
    assert "0" in said[0].partition("computed")[0]


def test_alone(ranks: RankPool) -> None:
    assert "rank 0 computed other gradients" in ranks.run(1, twice, {}, 0, os.environ["XDG_CACHE_HOME"])[0]


def test_a_rank_that_computes_longer_is_found(ranks: RankPool) -> None:
    for slowest, ratio in ranks.run(2, compared, 1):
        assert slowest == 1
        assert 1.2 < ratio < 2.0  # three to one is one and a half times their mean, the median of two
