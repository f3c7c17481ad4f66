"""Token sets to batches. A sample is a window of consecutive tokens, with documents packed; for conversations, it is a row of
whole documents that do not attend to each other and of which only some tokens are learned (`pack.py`). Sample i depends on (seed,
i) alone, so any number of ranks and any batch size draw the same samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardwise.data.order import shuffled
from shardwise.data.pack import Packs
from shardwise.data.shards import TokenSet

# Targets with this value have no loss; PyTorch's cross entropy ignores it by default.
IGNORE_INDEX = -100

# Keep the two uses of the seed apart.
_ORDER, _MIXTURE = 1, 2


@dataclass(frozen=True)
class Batch:
    """Rows of tokens and their targets."""

    tokens: NDArray[np.int64]  # [rows, length]
    targets: NDArray[np.int64]  # [rows, length], IGNORE_INDEX where there is no loss
    positions: NDArray[np.int64] | None = None  # [rows, length], from 0 in each document
    documents: NDArray[np.int32] | None = None  # [rows, length], 0, 1, … in each row
    labels: NDArray[np.int8] | None = None  # [rows, length], of the token's document: 1 desirable, 0 not
    sums: NDArray[np.int64] | None = None  # [rows, length], documents where `documents` is None

    margins: NDArray[np.float32] | None = None  # [rows, length], the margin of the token's pair
    reference: NDArray[np.floating[Any]] | None = None  # [rows, length], reference log-probabilities
    teacher_tokens: NDArray[np.int64] | None = None  # [rows, length, k], a teacher's k likeliest tokens
    teacher_logprobs: NDArray[np.floating[Any]] | None = None
    step_tokens: int | None = None  # non-padding tokens of the step over all ranks; None: no padding

    @property
    def slots(self) -> NDArray[np.int64]:
        """The document of each token within its row, by which an objective sums."""
        own = self.documents if self.sums is None else self.sums
        return np.zeros_like(self.tokens) if own is None else own.astype(np.int64)

    @property
    def loss_tokens(self) -> int:
        """Targets with a loss."""
        return int(np.count_nonzero(self.targets != IGNORE_INDEX))


@dataclass(frozen=True)
class Windows:
    """Windows `first` to `first + count` of a set, each `length` tokens after the one before."""

    tokens: TokenSet
    first: int
    count: int


class Stored(Protocol):
    """Precomputed scores of the tokens of a set (`scores.py`)."""

    def fill(self, places: NDArray[np.int64], logprobs: NDArray[Any], tokens: NDArray[Any] | None) -> None:
        """Copy the scores of the set's tokens at indices `places` into arrays [places, k]; -1 is skipped."""


def windows_in(tokens: int, length: int) -> int:
    """The number of windows of a set; each needs one token more than its length, the last target."""
    return max((tokens - 1) // length, 0)


class Samples:
    """Samples numbered 0, 1, 2, … without end; each `count` of them are one epoch.

    Shuffled, they are in the order of `order.shuffled`. Not shuffled, windows come in order, round-robin over the sets, so that the
    first few samples represent all of them. With the `stored` scores of each part, batches include them: the `asked` likeliest
    tokens of a teacher, or the log-probabilities of a reference.
    """

    def __init__(
        self,
        parts: Sequence[Windows | Packs],
        length: int,
        *,
        seed: int = 0,
        weights: Sequence[float] = (),
        shuffled: bool = True,
        separate_documents: bool = False,
        stored: Sequence[Stored] = (),
        asked: int = 0,
    ) -> None:
        self.parts = tuple(parts)
        self.length = length
        self.seed = seed
        self.weights = tuple(weights)
        self.shuffled = shuffled
        self.separate_documents = separate_documents
        self.stored, self.asked = tuple(stored), asked
        self._counts = np.array([part.count for part in parts], dtype=np.int64)
        self._packed = any(isinstance(part, Packs) for part in parts)
        self._margins = any(part.tokens.index.margins for part in parts)
        self._labelled = any(part.tokens.index.kind == "preference" for part in parts)

    @property
    def count(self) -> int:
        """Samples in an epoch."""
        return int(self._counts.sum())

    def take(self, indices: ArrayLike) -> Batch:
        """The samples with these indices."""
        numbers = np.asarray(indices, dtype=np.int64).ravel()
        if numbers.size and (numbers.min() < 0 or not self.count):
            raise IndexError(f"there is no sample {numbers.min()} among {self.count}")
        chosen, window = self._find(numbers) if numbers.size else (numbers, numbers)
        rows = np.empty((len(numbers), self.length + 1), dtype=np.int64)
        separate = self.separate_documents or self._packed
        positions = np.empty((len(numbers), self.length), dtype=np.int64) if separate else None
        documents = np.empty((len(numbers), self.length), dtype=np.int32) if separate else None
        # Sets without verdicts hold what is desirable.
        labels = np.ones((len(numbers), self.length), dtype=np.int8) if self._labelled else None
        margins = np.zeros((len(numbers), self.length), dtype=np.float32) if self._margins else None
        targets = np.empty((len(numbers), self.length), dtype=np.int64)
        for row, (part_number, number) in enumerate(zip(chosen.tolist(), window.tolist(), strict=True)):
            part = self.parts[part_number]
            if isinstance(part, Packs):
                assert positions is not None
                assert documents is not None
                own, by = None if labels is None else labels[row], None if margins is None else margins[row]
                fill(part, number, rows[row, :-1], targets[row], positions[row], documents[row], own, by)
                continue
            start = (part.first + number) * self.length
            rows[row] = part.tokens.read(start, start + self.length + 1)
            targets[row] = rows[row, 1:]
            if positions is not None and documents is not None:
                ends = part.tokens.ends_between(start, start + self.length) - start
                positions[row], documents[row] = _inside_documents(ends, self.length)
                # The last token of a document cannot predict the next document.
                targets[row, ends - 1] = IGNORE_INDEX
        told = (self._told(chosen, window) if self.stored else {}) | dict(margins=margins)
        return Batch(np.ascontiguousarray(rows[:, :-1]), targets, positions, documents, labels, **told)

    __call__ = take

    def _told(self, chosen: NDArray[np.int64], window: NDArray[np.int64]) -> dict[str, Any]:
        """The stored scores of the targets of some rows."""
        shape = (len(chosen), self.length, self.asked or 1)
        logprobs, tokens = np.zeros(shape), np.zeros(shape, np.int64) if self.asked else None
        for row, (part, number) in enumerate(zip(chosen.tolist(), window.tolist(), strict=True)):
            places = target_places(self.parts[part], number, self.length)
            self.stored[part].fill(places, logprobs[row], None if tokens is None else tokens[row])
        if tokens is None:
            return dict(reference=logprobs[..., 0])
        return dict(teacher_tokens=tokens, teacher_logprobs=logprobs)

    def _find(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The part each sample is in, and its window there."""
        if not self.shuffled:
            return self._round_robin(numbers % self.count)
        return shuffled(numbers, self._counts, self.weights, self.seed, _ORDER, _MIXTURE)

    def _round_robin(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The part and window of each sample, round-robin over the parts; an exhausted part is skipped."""
        chosen, window = np.empty_like(numbers), np.empty_like(numbers)
        taken = below = 0  # samples, and windows of each part, in earlier rounds
        for size in np.unique(self._counts[self._counts > 0]).tolist():
            parts = np.flatnonzero(self._counts >= size)
            stop = taken + (size - below) * len(parts)
            mine = (numbers >= taken) & (numbers < stop)
            row, column = np.divmod(numbers[mine] - taken, len(parts))
            chosen[mine], window[mine] = parts[column], below + row
            taken, below = stop, size
        return chosen, window


def target_places(part: Windows | Packs, number: int, length: int) -> NDArray[np.int64]:
    """For each position of a row, the index in the set of its target token, learned or not; -1 where there is none."""
    if isinstance(part, Windows):
        start = (part.first + number) * length
        return np.arange(start + 1, start + length + 1)
    places = np.full(length, -1, dtype=np.int64)
    at = 0
    for _, first, kept in part.row(number):
        places[at : at + kept - 1] = np.arange(first + 1, first + kept)
        at += kept if part.whole else kept - 1
    return places


def fill(
    packs: Packs,
    number: int,
    tokens: NDArray[np.int64],
    targets: NDArray[np.int64],
    positions: NDArray[np.int64],
    documents: NDArray[np.int32],
    labels: NDArray[np.int8] | None,
    margins: NDArray[np.float32] | None,
) -> None:
    """Write a row of packed documents into arrays of its length. The padding is one more document, without targets."""
    source, at, n = packs.tokens, 0, -1
    targets[:] = IGNORE_INDEX
    for n, (document, first, kept) in enumerate(packs.row(number)):
        own = source.read(first, first + kept)
        places = kept if packs.whole else kept - 1
        place = slice(at, at + places)
        tokens[place] = own[:places]
        if packs.whole:
            targets[at + places - 1] = own[-1]
        else:
            learned = source.read_mask(first + 1, first + kept) > 0
            targets[place] = np.where(learned, own[1:].astype(np.int64), IGNORE_INDEX)
        positions[place] = np.arange(places)
        documents[place] = n
        if labels is not None and source.index.kind == "preference":
            labels[place] = source.labels[document]
        if margins is not None and source.index.margins:
            margins[place] = source.margins[document]
        at += places
    tokens[at:] = source.index.tokenizer["end"]
    positions[at:] = np.arange(len(tokens) - at)
    documents[at:] = n + 1


def _inside_documents(ends: NDArray[np.int64], length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The position of each token in its document, and the document, for a window in which documents end at `ends`."""
    places = np.arange(length)
    document = np.searchsorted(ends, places, side="right")
    return places - np.concatenate([[0], ends])[document], document
