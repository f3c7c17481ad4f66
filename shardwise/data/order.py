"""The order of samples as arithmetic: the position of sample i in a shuffled epoch, and the set of a mixture it comes from,
are computed from (seed, i) alone. Nothing is stored: a run resumes anywhere, on any number of ranks, and shuffling 10^13
samples costs no more than shuffling ten."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]

# Samples over which a mixture keeps its shares exactly.
BLOCK = 2**14

_ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = 2**64 - 1


def mix64(x: Words) -> Words:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): every input bit moves about half of the
    output bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key_of(*parts: ArrayLike) -> Words:
    """One 64-bit key from several integers (or arrays of them); changing any of them yields an unrelated key."""
    key: Words = np.zeros(1, dtype=np.uint64)
    for part in parts:
        words = np.atleast_1d(np.asarray(part)).astype(np.uint64)
        key = mix64((key ^ words) + np.uint64(_GOLDEN))
    return key


def permute(index: ArrayLike, n: int, key: ArrayLike) -> Ints:
    """The image of each `index` under the permutation of [0, n) that `key` selects. `key` may be an array as long as `index`.

    A Feistel network (Luby and Rackoff 1988) permutes the smallest power of two that holds n: each round changes one half of the
    bits by a hash of the other half, which can always be undone. A result of n or more is sent through again until it falls below
    n (cycle walking, Black and Rogaway 2002), fewer than two passes on average.
    """
    start = np.asarray(index, dtype=np.int64)
    if n < 1 or n > 2**62:
        raise ValueError(f"cannot permute {n} elements")
    if start.size and (start.min() < 0 or start.max() >= n):
        raise ValueError(f"an index lies outside [0, {n})")
    bits = (n - 1).bit_length()
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)

    x = start.ravel().astype(np.uint64)
    keys = np.broadcast_to(np.asarray(key).astype(np.uint64).ravel(), x.shape)
    outside = np.arange(x.size)
    while outside.size:
        walked, walking_keys = x[outside], keys[outside]
        high, low = walked >> low_bits, walked & low_mask
        for step in range(_ROUNDS):
            round_keys = walking_keys + np.uint64((step + 1) * _GOLDEN & _WORD)
            if step % 2:
                low = low ^ (mix64(high ^ mix64(round_keys)) & low_mask)
            else:
                high = high ^ (mix64(low ^ mix64(round_keys)) & high_mask)
        x[outside] = (high << low_bits) | low
        outside = outside[x[outside] >= np.uint64(n)]
    return x.astype(np.int64).reshape(start.shape)


def quotas(weights: Sequence[float]) -> Ints:
    """Samples of each set in a block: its share of BLOCK, rounded by largest remainder, so that they add up exactly. A set with
    positive weight gets at least one, or it would never be used."""
    exact = [Fraction(w) for w in weights]
    total = sum(exact)
    if total <= 0 or min(exact) < 0 or sum(w > 0 for w in exact) > BLOCK:
        raise ValueError("weights must not be negative, one must be above 0, and no more than a block can hold")
    shares = [w * BLOCK / total for w in exact]
    counts = [max(int(share), 1 if share > 0 else 0) for share in shares]
    while (missing := BLOCK - sum(counts)) != 0:
        step = 1 if missing > 0 else -1
        # The set furthest from its share moves by one; a tie goes to the first. A set that has 1 keeps it.
        movable = [k for k, share in enumerate(shares) if share > 0 and (step > 0 or counts[k] > 1)]
        furthest = max(movable, key=lambda k: step * (shares[k] - counts[k]))
        counts[furthest] += step
    return np.array(counts, dtype=np.int64)


def mixture(index: ArrayLike, weights: Sequence[float], seed: int) -> tuple[Ints, Ints]:
    """For each sample: the set it comes from, and its index among that set's samples.

    Every block of BLOCK samples holds each set's quota, its slots shuffled by a permutation of the block. So
    the index is block x quota + offset: no counting, and over all samples the indices of a set are 0, 1, 2, …
    each once.
    """
    numbers = np.asarray(index, dtype=np.int64)
    quota = quotas(weights)
    block, slot = numbers // BLOCK, numbers % BLOCK
    chosen, place = divided(permute(slot, BLOCK, key_of(seed, block.ravel())), quota)
    return chosen, block * quota[chosen] + place


def divided(places: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """For each place in a row of sets of these sizes: the set it is in, and its place there."""
    ends = np.cumsum(counts)
    chosen = np.searchsorted(ends, places, side="right")
    return chosen, places - (ends - counts)[chosen]


def shuffled(
    numbers: Ints, counts: Ints, weights: Sequence[float], seed: int, order: int, share: int
) -> tuple[Ints, Ints]:
    """For each sample of sets of these sizes: the set it comes from, and its place there.

    Without weights, an epoch visits every place of every set once, in its own order. With weights, sets are drawn by their share
    and each has its own epochs. `order` and `share` keep the uses of the seed apart.
    """
    if not weights:
        count = int(counts.sum())
        return divided(permute(numbers % count, count, key_of(seed, order, numbers // count)), counts)
    chosen, index = mixture(numbers, weights, int(key_of(seed, share)[0]))
    places = np.empty_like(index)
    for part in np.unique(chosen).tolist():
        mine, count = chosen == part, int(counts[part])
        places[mine] = permute(index[mine] % count, count, key_of(seed, order, part, index[mine] // count))
    return chosen, places
