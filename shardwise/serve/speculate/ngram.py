"""Guesses by prompt lookup (Saxena 2023): what followed the latest tokens where they stood before in the same sequence. It costs no
device time, and is right where answers repeat what they were given: code, extraction, rewriting.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Items

from shardwise.schedules.serving import Sequence, Step
from shardwise.serve.request import Sampling

LOOKS = 64
"""Places that are compared, the latest first: where there are more, the text repeats itself, and these are as good."""


class NgramIndex:
    """Where runs of `least` tokens of a growing text stand, each linked to the one before: four bytes for a token beside the last
    place of each run."""

    def __init__(self, least: int, most: int) -> None:
        self.least, self.most = least, most
        self._last: dict[tuple[int, ...], int] = {}
        """The position behind its last place."""
        self._before = array("i")
        """The same of the place before, by the last; 0: there is none."""

    def guess(self, tokens: list[int], count: int) -> list[int]:
        """What followed the end of the text where it stood before: at the place with most tokens alike, up to `most`, the latest of
        those; nothing where `least` stood nowhere. Where what followed is all the text there is, it goes on repeating."""
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


class NgramDrafter:
    """Guesses of all sequences that run."""

    def __init__(self, least: int, most: int, count: int) -> None:
        self.least, self.most, self.count = least, most, count
        self.indices: dict[Sequence, NgramIndex] = {}

    def warm(self, step_tokens: int) -> None:
        """There is nothing to warm."""

    def propose(self, sequences: Iterable[Sequence]) -> None:
        """Before a step is scheduled: guesses for those whose last token is known."""
        for sequence in sequences:
            if sequence.pending or sequence.drafts:
                continue
            index = self.indices.get(sequence)
            if index is None:
                index = self.indices[sequence] = NgramIndex(self.least, self.most)
            sequence.drafts = index.guess(sequence.tokens, self.count)

    def assign(self, slot: int, sampling: Sampling, seed: int) -> None:
        """Nothing here is drawn."""

    def swap(self, step: Step, host_pages: int) -> None:
        """Nothing here lies in pages."""

    def fill(self, step: Step, changes: Items[tuple[int, int, int]]) -> None:
        """The guesses were made before."""

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        self.indices.pop(sequence, None)
