"""Prompts to be answered, each with the row it comes from, which determines the reward of an answer. The prompt of sample i
depends on (seed, i) alone; each epoch visits every prompt once, in its own order. With weights, sets are drawn in
their proportions, each in epochs of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardwise.data.order import key_of, mixture, permute
from shardwise.data.shards import TokenSet
from shardwise.run.problems import Problem, UserError

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
        seed: int = 0,
        shuffled: bool = True,
        documents: Sequence[NDArray[np.int64]] | None = None,
        weights: Sequence[float] = (),
    ) -> None:
        """`documents`: the documents used of each set; None: all. `weights`: the proportions of the sets; none: by their sizes."""
        wrong = [each for each in sets if each.index.kind != "prompts"]
        if wrong:
            raise UserError(*(Problem("holds no prompts with their rows", "data.sets", str(s.folder)) for s in wrong))
        self.sets, self.seed, self.shuffled = tuple(sets), seed, shuffled
        self._documents = [np.arange(each.documents) for each in sets] if documents is None else list(documents)
        self.weights = tuple(weights)
        self._counts = np.array([len(each) for each in self._documents], dtype=np.int64)
        self._ends = np.cumsum(self._counts)

    @property
    def count(self) -> int:
        """Prompts in an epoch."""
        return int(self._ends[-1]) if len(self._ends) else 0

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
            start = int(own.ends[document - 1]) if document else 0
            found.append(Prompt(own.read(start, int(own.ends[document])).astype(np.int64), own.row(document)))
        return found

    __call__ = take

    def _find(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The set of each sample, and its place among the documents used of it."""
        if self.weights and self.shuffled:
            chosen, index = mixture(numbers, self.weights, int(key_of(self.seed, _MIXTURE)[0]))
            nth = np.empty_like(index)
            for number in np.unique(chosen).tolist():
                mine, count = chosen == number, int(self._counts[number])
                epochs, places = index[mine] // count, index[mine] % count
                nth[mine] = permute(places, count, key_of(self.seed, _ORDER, number, epochs))
            return chosen, nth
        epochs, places = numbers // self.count, numbers % self.count
        if self.shuffled:
            places = permute(places, self.count, key_of(self.seed, _ORDER, epochs))
        chosen = np.searchsorted(self._ends, places, side="right")
        return chosen, places - (self._ends - self._counts)[chosen]
