"""Packs several answers, which do not attend to each other, into one row, and drops the rows that are no longer needed. A step of
short answers then has fewer microbatches. The gradients are the same up to rounding; only the experts' auxiliary losses, which are
means over all tokens of the rows, see less padding."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.data.pack import best_fit
from shardwise.run import Run

Ints = NDArray[np.int64]


class Packing:
    """Maps each answer's own row, of which the first `sizes` tokens count, to its position in the packed rows."""

    def __init__(self, sizes: Ints, run: Run) -> None:
        self.answers, self.length = len(sizes), run.train.seq_len
        items, ends = best_fit(sizes, self.length)
        first = np.concatenate(([0], ends[:-1]))
        self.of_row = np.empty(self.answers, dtype=np.int64)
        """The packed row of each answer."""
        starts, number = (np.empty(self.answers, dtype=np.int64) for _ in range(2))
        for row, (start, end) in enumerate(zip(first.tolist(), ends.tolist(), strict=True)):
            own = items[start:end]
            self.of_row[own] = row
            starts[own] = np.concatenate(([0], np.cumsum(sizes[own])[:-1]))
            number[own] = np.arange(len(own))
        step = run.layout.data_ranks * run.train.microbatch
        self.rows = -(-len(ends) // step) * step
        self.answer = np.repeat(np.arange(self.answers), sizes)
        self.place = np.concatenate([np.arange(size) for size in sizes])
        self.row, self.column = self.of_row[self.answer], starts[self.answer] + self.place
        self.positions, self.documents = self._laid_out(number)

    def _laid_out(self, number: Ints) -> tuple[Ints, NDArray[np.int32]]:
        """Positions and documents of the packed rows; the unused rest of a row is one more document."""
        positions = np.zeros((self.rows, self.length), dtype=np.int64)
        documents = np.full((self.rows, self.length), -1, dtype=np.int32)
        positions[self.row, self.column] = self.place
        documents[self.row, self.column] = number[self.answer]
        rest = documents < 0
        documents = np.where(rest, documents.max(axis=1, keepdims=True) + 1, documents)
        begin = rest.argmax(axis=1)
        positions = np.where(rest, np.arange(self.length) - begin[:, None], positions)
        return positions, documents

    def lay(self, values: NDArray[Any], fill: float) -> NDArray[Any]:
        """Values [answers, length] laid out in packed rows."""
        found = np.full((self.rows, self.length), fill, dtype=values.dtype)
        found[self.row, self.column] = values[self.answer, self.place]
        return found

    def unlay(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values of packed rows as [answers, length], with zeros after each answer."""
        found = np.zeros((self.answers, self.length), dtype=values.dtype)
        found[self.answer, self.place] = values[self.row, self.column]
        return found
