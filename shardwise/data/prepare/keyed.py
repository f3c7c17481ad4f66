"""Steps that compare documents with each other. Each computes the keys of a document, finds repeats among the keys of a partition,
and decides what happens to a document that repeats another."""

from __future__ import annotations

import hashlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from shardwise.data.prepare.minhash import MinHash, survivors
from shardwise.data.prepare.shuffle import VERDICT, Records
from shardwise.data.prepare.words import Document, runs
from shardwise.run.problems import Problem, UserError

PARTITION = 2**27
"""The target size of one partition, in bytes of keys."""
SMALL_DOCUMENT = 500
"""Assumed bytes per document, for the expected number of keys; a corpus of smaller documents gets larger partitions."""


BYTES_A_WORD = 4
_WORD = re.compile(r"\S+")


class Shuffle(ABC):
    """A comparison of documents by keys."""

    dtype: np.dtype[Any]
    """The dtype of a key; the caller fills in its field `id`."""
    joined = False
    """Whether matches are pairs, which `join` makes into clusters."""

    @abstractmethod
    def partitions(self, size: int) -> int:
        """The number of partitions of the keys, from the bytes of the corpus alone."""

    @abstractmethod
    def keys(self, document: Document, partitions: int) -> tuple[NDArray[np.int64], Records]:
        """The partitions and the keys of everything to compare in a document."""

    @abstractmethod
    def match(self, records: Records) -> Records:
        """The repeats in a partition, ordered by document; pairs in the order in which they are to be joined."""

    def join(self, pairs: Sequence[Records]) -> Records:
        """The verdicts on documents, from all pairs."""
        raise NotImplementedError

    @abstractmethod
    def apply(self, text: str, found: Records) -> tuple[str, str]:
        """For a document with repeats: the reason for removing it, or "" and the rest of its text."""


def _verdicts(ids: NDArray[np.uint64], others: NDArray[np.uint64], places: Any = 0) -> Records:
    found = np.zeros(len(ids), VERDICT)
    found["id"], found["other"], found["place"] = ids, others, places
    return found


def _repeats(same: NDArray[np.bool_], ids: NDArray[np.uint64], places: NDArray[np.uint32]) -> Records:
    """The verdicts, by document, on ordered keys, of which `same` says whether each but the first equals the one before: all equal
    ones repeat the first of them."""
    again = np.concatenate([[False], same])[: len(ids)]
    first = np.maximum.accumulate(np.where(again, 0, np.arange(len(ids))))
    found = _verdicts(ids[again], ids[first[again]], places[again])
    return found[np.lexsort((found["place"], found["id"]))]


def _several(records: Records, keys: NDArray[np.uint64]) -> Records:
    """The records whose key others have too."""
    if not len(keys):
        return records
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    same = ordered[1:] == ordered[:-1]
    return records[order[np.concatenate([same, [False]]) | np.concatenate([[False], same])]]


class Exact(Shuffle):
    """Documents with the same characters; the first one in the corpus is kept. Keys have 128 bits, so that different documents do
    not collide."""

    dtype = np.dtype([("key", "<u8", (2,)), ("id", "<u8")])

    def __init__(self, *, blanks: bool = False) -> None:
        self._blanks = blanks  # whether documents that differ only in blanks count as different

    def partitions(self, size: int) -> int:
        return math.ceil(size * self.dtype.itemsize / SMALL_DOCUMENT / PARTITION) or 1

    def keys(self, document: Document, partitions: int) -> tuple[NDArray[np.int64], Records]:
        text = document.text if self._blanks else " ".join(document.text.split())
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        record = np.zeros(1, self.dtype)
        record["key"][0] = np.frombuffer(digest, "<u8")
        partition = (int(record["key"][0, 0]) >> 32) * partitions >> 32
        return np.array([partition], np.int64), record

    def match(self, records: Records) -> Records:
        order = np.lexsort((records["id"], records["key"][:, 1], records["key"][:, 0]))
        keys, ids = records["key"][order], records["id"][order]
        return _repeats((keys[1:] == keys[:-1]).all(axis=1), ids, np.zeros(len(ids), np.uint32))

    def apply(self, text: str, found: Records) -> tuple[str, str]:
        return "the same text as an earlier document", ""


class Fuzzy(Shuffle):
    """Documents that share most runs of words, by MinHash; datatrove's defaults, with which FineWeb was made."""

    joined = True
    _TYPICAL: ClassVar[float] = 1 / 300
    """The typical minimum hash of a document, as a fraction of the range: one over its number of words."""

    def __init__(self, *, words: int = 5, bands: int = 14, rows: int = 8, seed: int = 1, hash: str = "xxhash") -> None:
        self._minhash = MinHash(words, bands, rows, seed, hash)
        self._bands, self._rows = bands, rows
        self.dtype = np.dtype([("key", "<u8", (rows,)), ("id", "<u8")])

    def partitions(self, size: int) -> int:
        return self._bands * (math.ceil(size * self.dtype.itemsize / SMALL_DOCUMENT / PARTITION) or 1)

    def keys(self, document: Document, partitions: int) -> tuple[NDArray[np.int64], Records]:
        signature = self._minhash.signature(document.vocabulary.simplified(document.text))
        if signature is None:
            return np.empty(0, np.int64), np.empty(0, self.dtype)
        records = np.zeros(self._bands, self.dtype)
        records["key"] = signature
        # Partitions are in the order of the first hash, since pairs are joined in the order of signatures. They are of
        # even size for documents of usual length.
        each = partitions // self._bands
        first = signature[:, 0].astype(np.float64) / 2.0**61
        part = np.minimum((first / (first + self._TYPICAL) * each).astype(np.int64), each - 1)
        return np.arange(self._bands) * each + part, records

    def match(self, records: Records) -> Records:
        records = _several(records, records["key"][:, 0])
        keys = records["key"]
        order = np.lexsort((records["id"], *(keys[:, column] for column in reversed(range(self._rows)))))
        keys, ids = keys[order], records["id"][order]
        again = np.flatnonzero((keys[1:] == keys[:-1]).all(axis=1))
        return _verdicts(ids[again], ids[again + 1])

    def join(self, pairs: Sequence[Records]) -> Records:
        together = [np.stack([each["id"], each["other"]], axis=1) for each in pairs if len(each)]
        return _verdicts(*survivors(np.concatenate(together) if together else np.empty((0, 2), np.uint64)))

    def apply(self, text: str, found: Records) -> tuple[str, str]:
        return "nearly the same as another document", ""


class Substring(Shuffle):
    """Text that also occurs elsewhere, word for word: runs of `words` words or more, wherever they begin (Lee et al. 2022, whose
    runs are of 50 tokens). The first occurrence in the corpus is kept, the others are cut out; a document with fewer than `least`
    characters left is removed. Blanks are ignored. Runs are compared by 64-bit hashes. Needs 20 bytes of disk per word until it is
    done."""

    dtype = np.dtype([("key", "<u8"), ("id", "<u8"), ("place", "<u4")])

    def __init__(self, *, words: int = 50, least: int = 100) -> None:
        if words < 2:
            raise UserError(Problem(f"{words} must be at least 2", "steps.substring.words"))
        self._words, self._least = words, least

    def partitions(self, size: int) -> int:
        return math.ceil(size / BYTES_A_WORD * self.dtype.itemsize / PARTITION) or 1

    def keys(self, document: Document, partitions: int) -> tuple[NDArray[np.int64], Records]:
        words = document.vocabulary.chunk_hashes(document.text)
        records = np.zeros(max(0, len(words) - self._words + 1), self.dtype)
        if len(records):
            records["key"] = runs(words, self._words)
            records["place"] = np.arange(len(records))
        return ((records["key"] >> np.uint64(32)) * np.uint64(partitions) >> np.uint64(32)).astype(np.int64), records

    def match(self, records: Records) -> Records:
        records = _several(records, records["key"])
        records = records[np.lexsort((records["place"], records["id"], records["key"]))]
        keys = records["key"]
        return _repeats(keys[1:] == keys[:-1], records["id"], records["place"])

    def apply(self, text: str, found: Records) -> tuple[str, str]:
        spans = [match.span() for match in _WORD.finditer(text)]
        parts, kept, at = [], 0, 0
        for first in sorted(set(found["place"].tolist())):
            start, stop = first, first + self._words
            if start > at:
                parts.append(text[kept : spans[start][0]])
            at = max(at, stop)
            kept = spans[at][0] if at < len(spans) else len(text)
        left = "".join([*parts, text[kept:]]).strip()
        return ("", left) if len(left) >= self._least else ("nearly all of it stands in other documents", "")
