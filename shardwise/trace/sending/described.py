"""What is known of a message. It stands in several places, by version and backend: in the arguments of NCCL's kernel or of the
host's `record_param_comms`, in a label of this project's trainer, in the shapes of the call (`nccl:all_reduce`, `c10d::…`), at
worst only in the kernel's name. Distinct descriptions are few, so each is worked out once.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import prod

import numpy as np
from numpy.typing import NDArray

from shardwise.labels import read_label
from shardwise.ledger import AXIS_OF, wire_bytes
from shardwise.trace.reading.events import Integers, Profile
from shardwise.trace.sending.axes import axis_of, collective_of, element_bytes
from shardwise.trace.sending.sent import Described

CHANGES_SIZE = ("all_gather", "reduce_scatter", "all_to_all")
"""Collectives whose calls name both what is read and what is written."""


def describe(
    profile: Profile, own: Integers, label: Integers, carrier: Integers, call: Integers
) -> tuple[tuple[Described, ...], Integers]:
    """Descriptions, each once, and which is whose."""
    events, messages, shapes = profile.events, profile.messages, profile.shapes
    if not len(own):
        return (), np.zeros(0, np.int64)
    row = message_row(profile, carrier)
    at = np.minimum(np.searchsorted(shapes.event, call), max(len(shapes) - 1, 0))
    shaped = np.where((call >= 0) & (shapes.event[at] == call), at, -1) if len(shapes) else np.full(len(own), -1)
    told = (
        messages.group, messages.description, messages.collective, messages.dtype, messages.ranks, messages.splits_in,
        messages.elements_in, messages.elements_out, messages.size,
    )  # fmt: skip
    names = [np.where(at >= 0, events.name[at], -1) for at in (own, label, call)]
    columns = [
        *names,
        column_at(shapes.dims, shaped),
        column_at(shapes.types, shaped),
        *(column_at(column, row) for column in told),
    ]
    distinct, what = np.unique(np.stack(columns, 1).astype(np.int64), axis=0, return_inverse=True)
    return tuple(_Reader(profile, *line).read() for line in distinct.tolist()), what.reshape(-1)


def column_at(column: NDArray[np.integer], row: Integers) -> Integers:
    """A column at some rows, -1 at no row."""
    return np.where(row >= 0, column[row].astype(np.int64), -1) if len(column) else np.full(len(row), -1, np.int64)


def message_row(profile: Profile, event: Integers) -> Integers:
    """Row of the arguments that an event carries, -1 for none."""
    held = profile.messages.event
    if not len(held):
        return np.full(len(event), -1, np.int64)
    at = np.minimum(np.searchsorted(held, event), len(held) - 1)
    return np.where(held[at] == event, at, -1)


@dataclass(frozen=True)
class _Reader:
    """One distinct description, in the numbers of the profile's tables."""

    profile: Profile
    own: int
    label: int
    call: int
    dims: int
    types: int
    group: int
    description: int
    collective: int
    dtype: int
    ranks: int
    splits: int
    given: int
    got: int
    size: int

    def read(self) -> Described:
        """In words and bytes."""
        names = self.profile.events.names
        name = self._text(self.group)
        group = self.profile.groups.get(name)
        own, call = names[self.own], names[self.call] if self.call >= 0 else ""
        # What a backend's thread does is not always what was asked for; a kernel's name says least.
        spelled = (self._text(self.collective), *((own, call) if own.startswith("c10d::") else (call, own)))
        collective = next((word for word in map(collective_of, spelled) if word), "unknown")
        description = self._text(self.description) or (group.description if group else "")
        axis = axis_of(description, name)
        label = read_label(names[self.label]) if self.label >= 0 else None
        labelled = label is not None and len(label.words) >= 3
        if label is not None and labelled:
            axis, collective = AXIS_OF.get(label.words[0], label.words[0]), label.words[1]
        size = self.size if self.size > 0 else group.size if group else 0
        if not name:
            name, size = self._group_of_axis(axis)
        given = self._given(collective)
        if not name and size <= 0:
            size = self._size_by_shapes(collective)
        wire = self._wire(collective, size, given) if given is not None and size > 0 else None
        if label is not None and labelled:
            wire = _number(label.words[2])
        payload = 0 if given is None else given * (size if collective == "all_gather" else 1)
        sized = wire is not None or collective in ("recv", "barrier")
        return Described(axis, collective, name, max(size, 0), float(wire or 0), float(payload), sized)

    def _group_of_axis(self, axis: str) -> tuple[str, int]:
        """The group of an axis whose messages name none: where all groups of that axis have the same members."""
        alike = {g.ranks: name for name, g in self.profile.groups.items() if axis_of(g.description, name) == axis}
        return (next(iter(alike.values())), len(next(iter(alike)))) if len(alike) == 1 else ("", 0)

    def _text(self, at: int) -> str:
        return self.profile.messages.texts[at] if at >= 0 else ""

    def _given(self, collective: str) -> int | None:
        """Bytes that this rank puts in."""
        element = element_bytes(self._text(self.dtype)) if self.dtype >= 0 else 0
        if element and max(self.given, self.got) > 0:
            return element * (self.got if collective == "recv" and self.got > 0 else max(self.given, 0) or self.got)
        return self._given_by_shapes(collective)

    def _tensors(self) -> list[tuple[int, int]]:
        """Elements and bytes of an element of each tensor of the call."""
        dims, types = self.profile.shapes.decode(self.dims), self.profile.shapes.decode(self.types)
        found: list[tuple[int, int]] = []
        for shape, kind in zip(dims, types, strict=False):
            shapes = shape if shape and isinstance(shape[0], list) else [shape]
            element = element_bytes(str(kind))  # of a list of tensors the type is not written
            if element and all(isinstance(n, int) for one in shapes for n in one):
                found += [(prod(one), element) for one in shapes if one]
        return found

    def _given_by_shapes(self, collective: str) -> int | None:
        tensors = self._tensors()
        if not tensors:
            return None
        called = self.profile.events.names[self.call]
        # Operators of `c10d` take what is written before what is read; annotations have only what is read.
        second = called.startswith("c10d::") and collective in CHANGES_SIZE
        if second and len(tensors) < 2:
            return None
        elements, element = tensors[1] if second else tensors[0]
        return elements * element

    def _size_by_shapes(self, collective: str) -> int:
        """Ranks of the group: by how much an all-gather or reduce-scatter changes the size, or else all of the job."""
        tensors = self._tensors()
        if collective in ("all_gather", "reduce_scatter") and len(tensors) >= 2 and self.call >= 0:
            small, large = sorted(elements for elements, _ in tensors[:2])
            return large // small if small else 0
        return 0 if self.profile.groups else max(self.profile.world, 0)

    def _wire(self, collective: str, size: int, given: int) -> Fraction:
        splits = self._splits()
        if collective == "all_to_all" and len(splits) == size and any(splits):
            place = self._place()
            if 0 <= place < size:
                return Fraction(given * (sum(splits) - splits[place]), sum(splits))
        return wire_bytes(collective, size, given)

    def _splits(self) -> list[int]:
        return _numbers(self._text(self.splits))

    def _place(self) -> int:
        """This rank's place in its group."""
        group = self.profile.groups.get(self._text(self.group))
        members = list(group.ranks) if group and group.ranks else _numbers(self._text(self.ranks))
        return members.index(self.profile.rank) if self.profile.rank in members else -1


def _numbers(text: str) -> list[int]:
    """The whole numbers of a list as the file writes it; [] when it is shortened or is none."""
    parts = text.strip().strip("[]").split(",")
    try:
        return [int(part) for part in parts if part.strip()]
    except ValueError:
        return []


def _number(text: str) -> Fraction | None:
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None
