"""Prompts to be answered, each with the row it comes from, which determines the reward of an answer. The prompt of sample i
depends on (seed, i) alone; each epoch visits every prompt once, in its own order. With weights, sets are drawn in
their proportions, each in epochs of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardwise.data.order import divided, shuffled
from shardwise.data.shards import TokenSet

_ORDER, _MIXTURE = 3, 7


@dataclass(frozen=True)
class Prompt:
    """The tokens of a prompt, and its row."""

    tokens: NDArray[np.int64]
    row: dict[str, Any]


class Prompts:
    """The prompts of some sets, numbered 0, 1, 2, … without end."""

    def __init__(
        self,
        sets: Sequence[TokenSet],
        documents: Sequence[NDArray[np.int64]],
        seed: int = 0,
        shuffled: bool = True,
        weights: Sequence[float] = (),
    ) -> None:
        """`documents`: the documents used of each set. `weights`: the proportions of the sets; none: by their sizes."""
        self.sets, self.seed, self.shuffled = tuple(sets), seed, shuffled
        self._documents = list(documents)
        self.weights = tuple(weights)
        self._counts = np.array([len(each) for each in self._documents], dtype=np.int64)

    @property
    def count(self) -> int:
        """Prompts in an epoch."""
        return int(self._counts.sum())

    def take(self, indices: ArrayLike) -> list[Prompt]:
        """The prompts of samples with these indices."""
        numbers = np.asarray(indices, dtype=np.int64).ravel()
        if numbers.size and (numbers.min() < 0 or not self.count):
            raise IndexError(f"there is no prompt {numbers.min()} among {self.count}")
        chosen, places = self._find(numbers) if numbers.size else (numbers, numbers)
        found = []
        for number, nth in zip(chosen.tolist(), places.tolist(), strict=True):
            own = self.sets[number]
            document = int(self._documents[number][nth])
            tokens = own.read(own.start(document), int(own.ends[document])).astype(np.int64)
            found.append(Prompt(tokens, own.row(document)))
        return found

    def _find(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The set of each sample, and its place among the documents used of it."""
        if self.shuffled:
            return shuffled(numbers, self._counts, self.weights, self.seed, _ORDER, _MIXTURE)
        return divided(numbers % self.count, self._counts)
