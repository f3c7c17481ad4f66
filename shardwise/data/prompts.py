"""Prompts to be answered, each with the row it comes from, which determines the reward of an answer. The prompt of sample i
depends on (seed, i) alone; each epoch visits every prompt once, in its own order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardwise.data.order import key_of, permute
from shardwise.data.shards import TokenSet
from shardwise.run.problems import Problem, UserError

_ORDER = 3


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
    ) -> None:
        """`documents`: the documents used of each set; None: all."""
        wrong = [each for each in sets if each.index.kind != "prompts"]
        if wrong:
            raise UserError(*(Problem("holds no prompts with their rows", "data.sets", str(s.folder)) for s in wrong))
        self.sets, self.seed, self.shuffled = tuple(sets), seed, shuffled
        self._documents = [np.arange(each.documents) for each in sets] if documents is None else list(documents)
        self._ends = np.cumsum([len(each) for each in self._documents])

    @property
    def count(self) -> int:
        """Prompts in an epoch."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def take(self, indices: ArrayLike) -> list[Prompt]:
        """The prompts of samples with these indices."""
        numbers = np.asarray(indices, dtype=np.int64).ravel()
        if numbers.size and (numbers.min() < 0 or not self.count):
            raise IndexError(f"there is no prompt {numbers.min()} among {self.count}")
        epochs, places = numbers // max(self.count, 1), numbers % max(self.count, 1)
        if self.shuffled and numbers.size:
            places = permute(places, self.count, key_of(self.seed, _ORDER, epochs))
        found = []
        for place in places.tolist():
            number = int(np.searchsorted(self._ends, place, side="right"))
            own, nth = self.sets[number], place - (int(self._ends[number - 1]) if number else 0)
            document = int(self._documents[number][nth])
            start = int(own.ends[document - 1]) if document else 0
            found.append(Prompt(own.read(start, int(own.ends[document])).astype(np.int64), own.row(document)))
        return found

    __call__ = take
