"""The order is a bijection for any size and key, looks shuffled, and mixtures keep their shares without
counting."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.data.order import BLOCK, key_of, mixture, permute, quotas

KEYS = st.integers(0, 2**64 - 1)


@settings(max_examples=150, deadline=None)
@given(n=st.integers(1, 3000), key=KEYS)
def test_permute_is_a_bijection(n: int, key: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(n), n, key)), np.arange(n))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 255, 256, 257, 2**16 - 1, 2**16, 2**16 + 1])
def test_permute_is_a_bijection_at_powers_of_two(n: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(n), n, 12345)), np.arange(n))


@settings(max_examples=50, deadline=None)
@given(n=st.integers(1, 2**62), key=KEYS, seed=st.integers(0, 1000))
def test_large_sets_give_distinct_places_inside(n: int, key: int, seed: int) -> None:
    index = np.unique(np.random.default_rng(seed).integers(0, n, 200))
    places = permute(index, n, key)
    assert places.min() >= 0
    assert places.max() < n
    assert len(np.unique(places)) == len(index)


def test_ten_trillion_samples() -> None:
    n = 10**13
    places = permute(np.arange(2000), n, 7)
    assert len(np.unique(places)) == 2000
    assert 0.45 < places.mean() / n < 0.55
    assert places.max() > 0.99 * n


def test_each_index_is_alone() -> None:
    n = 1000
    whole = permute(np.arange(n), n, 3)
    some = np.array([5, 999, 0, 5, 123])
    assert np.array_equal(permute(some, n, 3), whole[some])
    assert permute(np.array([[5], [999]]), n, 3).tolist() == [[whole[5]], [whole[999]]]


def test_a_key_for_each_index() -> None:
    index = np.array([1, 1, 2])
    together = permute(index, 100, np.array([8, 9, 9]))
    assert together.tolist() == [permute([i], 100, k)[0] for i, k in zip(index, (8, 9, 9), strict=True)]


def test_keys_give_different_orders() -> None:
    n = 1000
    orders = [permute(np.arange(n), n, key_of(seed, epoch)) for seed in range(4) for epoch in range(4)]
    for one, other in itertools.combinations(orders, 2):
        assert np.count_nonzero(one == other) < 10  # 1 expected by chance


def test_looks_shuffled() -> None:
    n = 20_000
    order = permute(np.arange(n), n, 1)
    # Neighbours are unrelated, and so are a sample and its place.
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 0.03
    # Any stretch of the order is spread evenly over the set: chi-squared of 10 bins, 9 degrees of freedom.
    for start in range(0, n, 2000):
        counts = np.bincount(order[start : start + 2000] * 10 // n, minlength=10)
        assert ((counts - 200) ** 2 / 200).sum() < 34


@pytest.mark.parametrize("n", [3, 4, 5])
def test_small_sets_take_every_order(n: int) -> None:
    orders = [6, 24, 120][n - 3]
    tries = 15 * orders
    seen = Counter(tuple(permute(np.arange(n), n, key_of(k)).tolist()) for k in range(tries))
    assert len(seen) == orders
    assert max(seen.values()) < 4 * tries / orders


def test_what_lies_outside_is_refused() -> None:
    for index in ([10], [-1]):
        with pytest.raises(ValueError, match="outside"):
            permute(index, 10, 0)
    with pytest.raises(ValueError, match="cannot permute"):
        permute([0], 0, 0)


def test_key_parts_matter_in_order() -> None:
    keys = {int(key_of(*parts)[0]) for parts in [(0,), (1,), (0, 0), (0, 1), (1, 0), (2**63 - 1, 0), (0, 0, 0)]}
    assert len(keys) == 7


def test_quotas_by_largest_remainder() -> None:
    assert quotas([1, 1, 1]).tolist() == [5462, 5461, 5461]
    assert quotas([0.5, 0.25, 0.25]).tolist() == [BLOCK // 2, BLOCK // 4, BLOCK // 4]
    assert quotas([3, 0]).tolist() == [BLOCK, 0]
    assert quotas([1e-9, 1, 1e-12]).tolist() == [1, BLOCK - 2, 1]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=8).filter(lambda w: sum(w) > 0))
def test_quotas_add_up(weights: list[float]) -> None:
    counts = quotas(weights)
    assert counts.sum() == BLOCK
    shares = np.array(weights) / sum(weights) * BLOCK
    assert np.all((counts > 0) == (np.array(weights) > 0))
    assert np.all(np.abs(counts - shares) < len(weights) + 1)


def test_bad_weights() -> None:
    for weights in ([0.0, 0.0], [1.0, -1.0]):
        with pytest.raises(ValueError, match="weights"):
            quotas(weights)


@pytest.mark.parametrize("weights", [[1.0], [0.7, 0.2, 0.1], [5, 0, 1e-6, 3]])
def test_mixture_against_counting(weights: list[float]) -> None:
    """Walk three blocks one by one: every set's ranks are those of a counter, each once and a block at a
    time."""
    chosen, rank = mixture(np.arange(3 * BLOCK), weights, seed=11)
    quota = quotas(weights)
    for k in range(len(weights)):
        for block in range(3):
            inside = slice(block * BLOCK, (block + 1) * BLOCK)
            mine = np.sort(rank[inside][chosen[inside] == k])
            assert np.array_equal(mine, np.arange(block * quota[k], (block + 1) * quota[k]))


def test_mixture_is_spread_and_seeded() -> None:
    chosen, _ = mixture(np.arange(BLOCK), [1, 1], seed=0)
    halves = [np.mean(part) for part in chosen.reshape(16, -1)]
    assert max(abs(h - 0.5) for h in halves) < 0.06  # 1024 draws: 4 standard deviations
    assert np.mean(chosen[1:] == chosen[:-1]) == pytest.approx(0.5, abs=0.02)
    other, _ = mixture(np.arange(BLOCK), [1, 1], seed=1)
    later, _ = mixture(np.arange(BLOCK, 2 * BLOCK), [1, 1], seed=0)
    assert np.mean(chosen == other) == pytest.approx(0.5, abs=0.02)
    assert np.mean(chosen == later) == pytest.approx(0.5, abs=0.02)


def test_mixture_of_one_index_alone() -> None:
    index = np.arange(BLOCK - 50, BLOCK + 50)
    chosen, rank = mixture(index, [2, 1], seed=5)
    for i, c, r in zip(index, chosen, rank, strict=True):
        one, ranked = mixture([i], [2, 1], seed=5)
        assert (one[0], ranked[0]) == (c, r)
