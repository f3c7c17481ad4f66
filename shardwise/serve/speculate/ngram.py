"""Drafts by prompt lookup (Saxena 2023): the tokens that followed an earlier occurrence of the latest n-gram in the same sequence.
It costs no device time, and is right where answers repeat their input: code, extraction, rewriting.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from shardwise.schedules.serving import Sequence
from shardwise.serve.speculate.drafter import Drafter

LOOKS = 64
"""Occurrences that are compared, the latest first: if there are more, the text repeats itself, and these are as good."""


class NgramIndex:
    """The occurrences of each n-gram of `least` tokens in a growing text, each linked to the one before: four bytes a token, plus
    the last occurrence of each n-gram."""

    def __init__(self, least: int, most: int) -> None:
        self.least, self.most = least, most
        self._last: dict[tuple[int, ...], int] = {}
        """The end position of each n-gram's last occurrence."""
        self._before = array("i")
        """By the end position of an occurrence: that of the one before; 0: there is none."""

    def guess(self, tokens: list[int], count: int) -> list[int]:
        """The tokens that followed an earlier occurrence of the text's last tokens: the occurrence with the longest match, up to
        `most` tokens, and the latest of those. Returns nothing if the last `least` tokens occur nowhere else. If the continuation
        reaches the end of the text, it repeats."""
        least, last = self.least, self._last
        for end in range(len(self._before), len(tokens)):
            run = tuple(tokens[max(0, end - least) : end])
            self._before.append(last.get(run, 0) if end >= least else 0)
            if end >= least:
                last[run] = end
        at, found, longest = last.get(tuple(tokens[-least:]), 0), 0, 0
        for _ in range(LOOKS):
            if not at:
                break
            same = least
            while same < min(self.most, at) and tokens[at - same - 1] == tokens[-same - 1]:
                same += 1
            if same > longest:
                found, longest = at, same
            if same == self.most:
                break
            at = self._before[at]
        if not found:
            return []
        period = len(tokens) - found
        return [tokens[found + n % period] for n in range(count)]


class NgramDrafter(Drafter):
    """Drafts for all running sequences, before a step is scheduled: there are no draws, pages or kernels to care for."""

    def __init__(self, least: int, most: int, count: int) -> None:
        self.least, self.most, self.count = least, most, count
        self.indices: dict[Sequence, NgramIndex] = {}

    def propose(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            if sequence.pending or sequence.drafts:
                continue
            index = self.indices.get(sequence)
            if index is None:
                index = self.indices[sequence] = NgramIndex(self.least, self.most)
            sequence.drafts = index.guess(sequence.tokens, self.count)

    def forget(self, sequence: Sequence) -> None:
        self.indices.pop(sequence, None)
