"""What screening reads and gives: rows of a group of layouts, the bytes of their ranks, and their step time and memory."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

Array = Any


class LayoutIndex(NamedTuple):
    """A layout of a group: its schedule, and the numbers of its method and its row."""

    schedule: str
    chunks: int
    method: int
    row: int


class Screened(NamedTuple):
    """Step seconds [method, row] and bytes of the fullest rank [row] of some rows of a group under one schedule."""

    schedule: str
    chunks: int
    rows: Array
    seconds: Array
    memory: Array

    def at(self, which: Array) -> Screened:
        """Some of the rows."""
        return self._replace(rows=self.rows[which], seconds=self.seconds[:, which], memory=self.memory[which])

    def joined(self, more: Screened) -> Screened:
        """With more rows behind these."""
        both = np.concatenate
        return self._replace(
            rows=both([self.rows, more.rows]),
            seconds=both([self.seconds, more.seconds], axis=1),
            memory=both([self.memory, more.memory]),
        )


class Limit(Protocol):
    """What is of no interest."""

    @property
    def seconds(self) -> float:
        """Whatever takes longer."""

    def seconds_with(self, memory: Array) -> Array:
        """What takes longer and needs so much memory; below 0 where that is too much."""


class TableRows(NamedTuple):
    """Rows of a group, and their rows in the tables."""

    recompute: Array
    zero: Array
    column: Array
    layer: Array
    parameters: Array
    microbatches: Array

    def some(self, which: Array) -> TableRows:
        return TableRows(*(column[which] for column in self))


class RankBytes(NamedTuple):
    """What the kinds of ranks hold: bytes of [kind of rank, row]."""

    fixed: Array
    gradients: Array
    """Where they are reduced in every microbatch, or as they come."""
    whole_gradients: Array
    once: Array
    """Whether gradients are reduced once a step: [row]."""
    saved: Array
    """Of one microbatch, by all stages of the rank."""
    loss_saved: Array
    loss: Array
    again: Array
    """Of a layer that is being recomputed."""
