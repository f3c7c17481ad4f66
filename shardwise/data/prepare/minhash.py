"""Fuzzy deduplication by MinHash (Broder 1997) with bands (Leskovec et al., "Mining of Massive Datasets", section 3.4).

A document's signature is the minimum of each of many hash functions over its runs of words. Two documents whose sets of runs have
Jaccard similarity s agree in all r hashes of one band with probability s^r. Documents that agree in a band are joined, and one of
every cluster is kept. Hash functions, bands, the order of joining and so the survivors are those of datatrove with the same
settings. Signatures are computed with array operations for a whole document, in blocks that stay in the processor's cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from shardwise.data.prepare.words import Hashes
from shardwise.run.problems import Problem, UserError, install

HASHES = ("xxhash", "sha1")
PRIME = np.uint64(2**61 - 1)
_BLOCK = 128


def _sha1(text: bytes) -> int:
    return int.from_bytes(hashlib.sha1(text).digest()[:8], "little")


def hash_function(name: str) -> Callable[[bytes], int]:
    """A 64-bit hash function of a text, one of `HASHES`."""
    if name == "sha1":
        return _sha1
    try:
        import xxhash
    except ModuleNotFoundError:
        message = f'"xxhash" is not installed: {install("prepare")}, or set hash = "sha1"'
        raise UserError(Problem(message, "hash")) from None
    return xxhash.xxh64_intdigest


class MinHash:
    """Computes signatures with one choice of settings."""

    def __init__(self, words: int, bands: int, rows: int, seed: int, hash: str) -> None:
        self.words, self.bands, self.rows = words, bands, rows
        self._hash = hash_function(hash)
        draw = np.random.RandomState(seed)  # the generator that datatrove draws from, whose values never change
        count = bands * rows
        self._a = draw.randint(1, int(PRIME), dtype=np.uint64, size=(count, 1))
        self._b = draw.randint(0, int(PRIME), dtype=np.uint64, size=(count, 1))
        self._work = [np.empty((count, _BLOCK), np.uint64) for _ in range(2)]

    def signature(self, words: list[bytes]) -> Hashes | None:
        """The signature [bands, rows] of a document's simplified words; None if it is too short for a run of words."""
        runs = zip(*(islice(words, place, None) for place in range(self.words)), strict=False)
        shingles = np.fromiter(map(self._hash, map(b" ".join, runs)), np.uint64)
        if not len(shingles):
            return None
        least: Hashes | None = None
        for start in range(0, len(shingles), _BLOCK):
            found = self._least(shingles[start : start + _BLOCK])
            least = found if least is None else np.minimum(least, found, out=least)
        assert least is not None
        return least.reshape(self.bands, self.rows)

    def _least(self, shingles: Hashes) -> Hashes:
        """The minimum of (a x + b) mod (2^61 - 1) over a block, for every hash function. The product wraps at 2^64 before the
        remainder, as in datatrove. The remainder folds the bits above 2^61, which count as 1 each, onto the low ones and subtracts
        the prime; for a value below the prime the difference wraps to a large number, and the minimum ignores it."""
        value, rest = (array[:, : len(shingles)] for array in self._work)
        np.multiply(shingles[None, :], self._a, out=value)
        np.add(value, self._b, out=value)
        np.right_shift(value, np.uint64(61), out=rest)
        np.bitwise_and(value, PRIME, out=value)
        np.add(value, rest, out=value)
        np.subtract(value, PRIME, out=rest)
        np.minimum(value, rest, out=value)
        return value.min(axis=1)


def survivors(pairs: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The documents to remove, in order, and for each the kept document of its cluster. Pairs are joined in their order, the
    smaller cluster into the larger; of equal ones, that of the pair's second document into that of its first. Needs some 60 bytes
    for each duplicate."""
    if not len(pairs):
        return np.empty(0, np.uint64), np.empty(0, np.uint64)
    documents, numbers = np.unique(pairs, return_inverse=True)
    numbers = numbers.reshape(-1, 2)
    # A repeated pair changes nothing.
    joined = numbers[:, 0].astype(np.int64) * len(documents) + numbers[:, 1]
    first = np.sort(np.unique(joined, return_index=True)[1])
    parent = list(range(len(documents)))
    size = [1] * len(documents)
    for a, b in numbers[first].tolist():
        while parent[a] != a:
            parent[a] = parent[parent[a]]
            a = parent[a]
        while parent[b] != b:
            parent[b] = parent[parent[b]]
            b = parent[b]
        if a != b:
            if size[a] < size[b]:
                a, b = b, a
            parent[b] = a
            size[a] += size[b]
    roots = np.array(parent)
    while not np.array_equal(above := roots[roots], roots):
        roots = above
    gone = roots != np.arange(len(roots))
    return documents[gone], documents[roots[gone]]
