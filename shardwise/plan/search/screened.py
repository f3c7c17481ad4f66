"""The inputs and results of screening: rows of a group of layouts, the bytes of their ranks, and their step time and memory."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

Array = Any


class LayoutIndex(NamedTuple):
    """A layout of a group: its schedule, and the indices of its method and its row."""

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
        """A selection of the rows."""
        return self._replace(rows=self.rows[which], seconds=self.seconds[:, which], memory=self.memory[which])

    def joined(self, more: Screened) -> Screened:
        """These rows followed by more."""
        both = np.concatenate
        return self._replace(
            rows=both([self.rows, more.rows]),
            seconds=both([self.seconds, more.seconds], axis=1),
            memory=both([self.memory, more.memory]),
        )


class Limit(Protocol):
    """A limit beyond which layouts are dropped."""

    @property
    def seconds(self) -> float:
        """Layouts that take longer are dropped."""

    def seconds_with(self, memory: Array) -> Array:
        """The same limit for layouts with this memory; below 0 where the memory is too much."""


class TableRows(NamedTuple):
    """Rows of a group, with their row indices in the tables."""

    recompute: Array
    zero: Array
    column: Array
    layer: Array
    parameters: Array
    microbatches: Array

    def some(self, which: Array) -> TableRows:
        return TableRows(*(column[which] for column in self))


class RankBytes(NamedTuple):
    """The bytes that each kind of rank holds: [kind of rank, row]."""

    fixed: Array
    gradients: Array
    """Where gradients are reduced in every microbatch, or as soon as they are computed."""
    whole_gradients: Array
    once: Array
    """Whether gradients are reduced once a step: [row]."""
    saved: Array
    """Saved tensors of one microbatch on all stages of the rank."""
    loss_saved: Array
    loss: Array
    again: Array
    """Activations of a layer while it is recomputed."""
