"""Turns batches of records into columns. Names, lanes and shapes repeat, so each distinct one is kept once and referred to by a
number. Only what the columns need is taken out of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.trace.reading.profile import (
    CODE,
    KIND_OF_CATEGORY,
    NONE,
    Allocations,
    Events,
    Integers,
    Lane,
    Messages,
    Shapes,
)
from shardwise.trace.reading.records import Arguments, Instant, Naming, Problems, Record, Scalar, Span, nanoseconds

LONGEST_NAME = 1 << 14
_ON_DEVICE = np.zeros(len(CODE), np.bool_)
_ON_DEVICE[[CODE[kind] for kind in ("kernel", "copy", "set", "gpu_annotation", "sync")]] = True
_OTHERS = frozenset((Instant, Naming))
_MESSAGE_TEXTS = ("group", "description", "collective", "dtype", "ranks", "splits_in", "splits_out")
_MESSAGE_NUMBERS = ("elements_in", "elements_out", "size", "number", "source", "destination")
_ALLOCATION_NUMBERS = ("bytes", "allocated", "reserved", "device_type", "device", "address")


class Interned(dict[Any, int]):
    """Numbers distinct keys in the order they come."""

    def __missing__(self, key: Any) -> int:
        number = len(self)
        self[key] = number
        return number


class Columns:
    """Collects one rank's columns."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._names, self._lanes, self._tracks = Interned(), Interned(), Interned()
        self._shaped, self._message_texts = Interned(), Interned()
        self._kind_of: list[int] = []
        """Of each track: a category, process and thread."""
        self._lane_of: list[int] = []
        self._streams: dict[int, tuple[int, int]] = {}
        self._thread_names: dict[tuple[Any, Any], str] = {}
        self._parts: list[tuple[NDArray[Any], ...]] = []
        self._messages: list[list[int]] = []
        self._shapes: list[NDArray[np.int64]] = []
        self._allocations: list[NDArray[np.int64]] = []
        self._count = 0

    def add(self, position: int, records: list[Record]) -> None:
        """Add a batch of events that begins at that byte."""
        spans = [record for record in records if type(record) is Span]
        self._add_others(position, [record for record in records if type(record) in _OTHERS])
        start, known = nanoseconds([span.ts for span in spans])
        if not known.all():
            self._problems.count("could not be read: no time (ts)", position, int((~known).sum()))
            spans = [span for span, good in zip(spans, known, strict=True) if good]
            start = start[known]
        if spans:
            self._add_spans(position, spans, start)

    def _add_spans(self, position: int, spans: list[Span], start: Integers) -> None:
        duration, known = nanoseconds([span.dur for span in spans])
        self._problems.count("have no duration, taken as 0", position, int((~known).sum()))
        self._problems.count("have a negative duration, taken as 0", position, int((duration < 0).sum()))
        empty = Arguments()
        arguments = [span.args or empty for span in spans]
        names, tracks = self._names, self._tracks
        name = np.array([names[span.name] for span in spans], np.int32)
        track = np.array([tracks[span.cat, span.pid, span.tid] for span in spans], np.int32)
        kind, lane = self._kinds_and_lanes(track)
        self._learn_streams(lane, arguments)
        external = whole([a.external for a in arguments])
        if (external == NONE).any():
            external = np.where(external == NONE, whole([a.external_before_1_12 for a in arguments]), external)
        self._parts.append((
            kind, name, start, np.maximum(duration, 0), lane, whole([a.correlation for a in arguments]), external,
            whole([a.sequence for a in arguments]), whole([a.forward_thread for a in arguments]),
        ))  # fmt: skip
        self._add_shapes(arguments)
        self._add_messages(arguments, name)
        self._count += len(spans)

    def _kinds_and_lanes(self, track: NDArray[np.int32]) -> tuple[NDArray[np.int8], NDArray[np.int32]]:
        """Kind and lane of each span. A lane's number is even for a thread and odd for a stream, since their ids may coincide."""
        for category, process, thread in islice(self._tracks, len(self._kind_of), None):
            code = CODE[KIND_OF_CATEGORY.get(category, "other")]
            self._kind_of.append(code)
            self._lane_of.append(self._lanes[process, thread] * 2 + int(_ON_DEVICE[code]))
        return np.array(self._kind_of, np.int8)[track], np.array(self._lane_of, np.int32)[track]

    def _learn_streams(self, lane: NDArray[np.int32], arguments: Sequence[Arguments]) -> None:
        """Note stream and device of new lanes."""
        for number in np.flatnonzero(np.bincount(lane)).tolist():
            if number % 2 and number not in self._streams:
                first = arguments[int(np.argmax(lane == number))]
                self._streams[number] = (_number(first.stream), _number(first.device))

    def _add_shapes(self, arguments: Sequence[Arguments]) -> None:
        rows = [row for row, a in enumerate(arguments) if a.dims or a.values]
        if rows:
            shaped, join = self._shaped, b"\0".join
            inputs = [shaped[join((a.dims, a.types, a.values))] for a in map(arguments.__getitem__, rows)]
            self._shapes.append(np.array([np.array(rows) + self._count, inputs], np.int64))

    def _add_messages(self, arguments: Sequence[Arguments], name: NDArray[np.int32]) -> None:
        rows = [row for row, a in enumerate(arguments) if a.collective is not None]
        recorded = self._names.get("record_param_comms")
        if recorded is not None:
            rows = sorted({*rows, *np.flatnonzero(name == recorded).tolist()})
        texts = self._message_texts
        for row in rows:
            a = arguments[row]
            words = [getattr(a, column) for column in _MESSAGE_TEXTS]
            self._messages.append([
                self._count + row,
                *(NONE if word is None else texts[str(word)] for word in words),
                *(getattr(a, column) for column in _MESSAGE_NUMBERS),
            ])  # fmt: skip

    def _add_others(self, position: int, records: list[Instant | Naming]) -> None:
        """Add allocations and names of threads."""
        memory = [r for r in records if type(r) is Instant and r.name == "[memory]" and r.args is not None]
        if memory:
            time, known = nanoseconds([record.ts for record in memory])
            self._problems.count("of memory could not be read: no time (ts)", position, int((~known).sum()))
            numbers = [whole([getattr(record.args, column) for record in memory]) for column in _ALLOCATION_NUMBERS]
            self._allocations.append(np.stack([time, *numbers])[:, known])
        for record in records:
            if type(record) is Naming and record.name == "thread_name" and record.args is not None:
                self._thread_names[record.pid, record.tid] = str(record.args.name or "").strip()[:LONGEST_NAME]

    def absorb(self, later: Columns) -> None:
        """Add the columns of a later part of the same file."""
        names, shaped, texts, lanes = (
            np.array([mine[key] for key in theirs] or [0], np.int64)
            for mine, theirs in (
                (self._names, later._names),
                (self._shaped, later._shaped),
                (self._message_texts, later._message_texts),
                (self._lanes, later._lanes),
            )
        )
        for kind, name, start, duration, lane, *numbers in later._parts:
            moved = (lanes[lane // 2] * 2 + lane % 2).astype(np.int32)
            self._parts.append((kind, names[name].astype(np.int32), start, duration, moved, *numbers))
        for number, stream in later._streams.items():
            self._streams.setdefault(int(lanes[number // 2]) * 2 + number % 2, stream)
        self._thread_names |= later._thread_names
        self._shapes += [np.stack([event + self._count, shaped[inputs]]) for event, inputs in later._shapes]
        words = len(_MESSAGE_TEXTS) + 1
        self._messages += [
            [row[0] + self._count, *(int(texts[word]) if word >= 0 else NONE for word in row[1:words]), *row[words:]]
            for row in later._messages
        ]
        self._allocations += later._allocations
        self._problems.absorb(later._problems)
        self._count += later._count

    def finish(self) -> tuple[Events, Messages, Shapes, Allocations]:
        """The columns, sorted by time."""
        kind, name, start, duration, lane, *numbers = self._joined()
        order = np.argsort(start, kind="stable")
        ties = np.diff(start[order]) == 0
        if (ties & (np.diff(duration[order]) > 0)).any():
            order = np.lexsort((-duration, start))
        used = np.flatnonzero(np.bincount(lane))
        lane = np.searchsorted(used, lane)
        pairs = list(self._lanes)
        correlation, external, sequence, forward_thread = (column[order] for column in numbers)
        events = Events(
            kind=kind[order],
            name=name[order],
            start=start[order],
            duration=duration[order],
            lane=lane.astype(np.int32)[order],
            correlation=correlation,
            external=external,
            sequence=sequence,
            forward_thread=forward_thread,
            names=tuple(text[:LONGEST_NAME] for text in self._names),
            lanes=tuple(self._lane(int(number), pairs[number // 2]) for number in used),
        )
        position = np.empty(len(order), np.int32)
        position[order] = np.arange(len(order), dtype=np.int32)
        return events, self._finish_messages(position), self._finish_shapes(position), self._finish_allocations()

    def _joined(self) -> list[NDArray[Any]]:
        kinds = (np.int8, np.int32, np.int64, np.int64, np.int32, *[np.int64] * 4)
        if not self._parts:
            return [np.zeros(0, kind) for kind in kinds]
        columns = [np.concatenate(column) for column in zip(*self._parts, strict=True)]
        self._parts = []
        return columns

    def _lane(self, number: int, pair: tuple[Any, Any]) -> Lane:
        process, thread = pair
        stream, device = NONE, NONE
        if number % 2:
            stream, device = self._streams[number]
            stream = stream if stream >= 0 else max(_number(thread), 0)
            device = device if device >= 0 else max(_number(process), 0)
        return Lane(str(process), str(thread), self._thread_names.get(pair, ""), stream, device)

    def _finish_messages(self, position: NDArray[np.int32]) -> Messages:
        width = 1 + len(_MESSAGE_TEXTS) + len(_MESSAGE_NUMBERS)
        table = whole([number for row in self._messages for number in row]).reshape(-1, width).T
        event, group, description, collective, dtype, ranks, splits_in, splits_out, *numbers = _in_order(
            table, position
        )
        short = (c.astype(np.int32) for c in (group, description, collective, dtype, ranks, splits_in, splits_out))
        return Messages(event.astype(np.int32), *short, *numbers, texts=tuple(self._message_texts))  # type: ignore[misc]

    def _finish_shapes(self, position: NDArray[np.int32]) -> Shapes:
        table = np.concatenate(self._shapes, axis=1) if self._shapes else np.zeros((2, 0), np.int64)
        event, inputs = _in_order(table, position)
        texts = Interned()
        parts = [[texts[text] if text else NONE for text in shaped.split(b"\0")] for shaped in self._shaped]
        dims, types, values = np.array(parts, np.int32).reshape(-1, 3).T
        decoded = tuple(text.decode("utf-8", "replace") for text in texts)
        return Shapes(event.astype(np.int32), dims[inputs], types[inputs], values[inputs], decoded)

    def _finish_allocations(self) -> Allocations:
        table = np.concatenate(self._allocations, axis=1) if self._allocations else np.zeros((7, 0), np.int64)
        return Allocations(*table[:, np.argsort(table[0], kind="stable")])


def _in_order(table: Integers, position: NDArray[np.int32]) -> Integers:
    """Columns whose first refers to events, in the order of the sorted events; `position` is where each event went."""
    if table.shape[1]:
        table[0] = position[table[0]]
    return table[:, np.argsort(table[0], kind="stable")]


def whole(numbers: Sequence[int]) -> Integers:
    """Integers as a column; those beyond 64 bits become `NONE`."""
    try:
        return np.array(numbers, np.int64)
    except OverflowError:
        return np.array([n if abs(n) < 1 << 63 else NONE for n in numbers], np.int64)


def _number(value: Scalar) -> int:
    try:
        return int(value) if value is not None and abs(int(value)) < 1 << 31 else NONE
    except (ValueError, OverflowError):
        return NONE
