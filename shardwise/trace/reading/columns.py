"""Turns batches of records into columns. Names, tracks and shapes repeat, so each distinct value is interned and columns hold its
index. Only the fields that columns need are taken from a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.trace.reading.integers import NONE, Integers
from shardwise.trace.reading.profile import CODE, KIND_OF_CATEGORY, Allocations, CommParams, Events, Shapes, Track
from shardwise.trace.reading.records import Arguments, Instant, Problems, Record, Scalar, Span, nanoseconds

LONGEST_NAME = 1 << 14
_ON_DEVICE = np.zeros(len(CODE), np.bool_)
_ON_DEVICE[[CODE[kind] for kind in ("kernel", "copy", "set", "gpu_annotation", "sync")]] = True
_COMM_TEXTS = ("group", "description", "collective", "dtype", "ranks", "splits_in")
_COMM_NUMBERS = ("elements_in", "elements_out", "size", "number", "source", "destination")
_ALLOCATION_NUMBERS = ("bytes", "allocated", "reserved", "device_type", "device")


class Interned(dict[Any, int]):
    """Maps each distinct key to an index, in order of first use."""

    def __missing__(self, key: Any) -> int:
        number = len(self)
        self[key] = number
        return number


class Columns:
    """Builds the columns of one rank."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._names, self._tracks, self._origins = Interned(), Interned(), Interned()
        self._shaped, self._comm_texts = Interned(), Interned()
        self._kind_of: list[int] = []
        """By origin: category, process and thread."""
        self._track_of: list[int] = []
        self._streams: dict[int, tuple[int, int]] = {}
        kinds = (np.int8, np.int32, np.int64, np.int64, np.int32, *[np.int64] * 3)
        self._parts: list[tuple[NDArray[Any], ...]] = [tuple(np.zeros(0, kind) for kind in kinds)]
        self._comm_params: list[NDArray[np.int64]] = []
        self._shapes: list[NDArray[np.int64]] = []
        self._allocations: list[NDArray[np.int64]] = []
        self._count = 0

    def add(self, position: int, records: list[Record]) -> None:
        """Add a batch of events; `position` is the byte where it begins."""
        spans = [record for record in records if type(record) is Span]
        self._add_allocations(position, [r for r in records if type(r) is Instant and r.name == "[memory]" and r.args])
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
        names, origins = self._names, self._origins
        name = np.array([names[span.name] for span in spans], np.int32)
        origin = np.array([origins[span.cat, span.pid, span.tid] for span in spans], np.int32)
        kind, track = self._kinds_and_tracks(origin)
        self._record_streams(track, arguments)
        numbers = (whole(list(map(attrgetter(of), arguments))) for of in ("correlation", "sequence", "forward_thread"))
        self._parts.append((kind, name, start, np.maximum(duration, 0), track, *numbers))
        self._add_shapes(arguments)
        self._add_comm_params(arguments, name)
        self._count += len(spans)

    def _kinds_and_tracks(self, origin: NDArray[np.int32]) -> tuple[NDArray[np.int8], NDArray[np.int32]]:
        """Kind and track of each span. Tracks of threads are even and those of streams odd, since their ids may coincide."""
        known = len(self._kind_of)
        for category, process, thread in islice(self._origins, known, None) if len(self._origins) > known else ():
            code = CODE[KIND_OF_CATEGORY.get(category, "other")]
            self._kind_of.append(code)
            self._track_of.append(self._tracks[process, thread] * 2 + int(_ON_DEVICE[code]))
        # Only those of this batch become arrays: a file may have as many origins as events.
        used, which = np.unique(origin, return_inverse=True)
        kind, track = ([of[one] for one in used.tolist()] for of in (self._kind_of, self._track_of))
        return np.array(kind, np.int8)[which], np.array(track, np.int32)[which]

    def _record_streams(self, track: NDArray[np.int32], arguments: Sequence[Arguments]) -> None:
        """Record stream and device of new tracks."""
        for number, row in zip(*(column.tolist() for column in np.unique(track, return_index=True)), strict=True):
            if number % 2 and number not in self._streams:
                first = arguments[row]
                self._streams[number] = (_number(first.stream), _number(first.device))

    def _add_shapes(self, arguments: Sequence[Arguments]) -> None:
        rows = [row for row, a in enumerate(arguments) if a.dims or a.values]
        if rows:
            shaped, join = self._shaped, b"\0".join
            inputs = [shaped[join((a.dims, a.types, a.values))] for a in map(arguments.__getitem__, rows)]
            self._shapes.append(np.array([np.array(rows) + self._count, inputs], np.int64))

    def _add_comm_params(self, arguments: Sequence[Arguments], name: NDArray[np.int32]) -> None:
        rows = [row for row, a in enumerate(arguments) if a.collective is not None]
        recorded = self._names.get("record_param_comms")
        if recorded is not None:
            rows = sorted({*rows, *np.flatnonzero(name == recorded).tolist()})
        if not rows:
            return
        texts, some = self._comm_texts, [arguments[row] for row in rows]
        words = (
            [NONE if word is None else texts[str(word)] for word in map(attrgetter(name), some)] for name in _COMM_TEXTS
        )
        numbers = (whole(list(map(attrgetter(name), some))) for name in _COMM_NUMBERS)
        self._comm_params.append(np.array([np.array(rows) + self._count, *words, *numbers], np.int64))

    def _add_allocations(self, position: int, records: list[Instant]) -> None:
        if records:
            time, known = nanoseconds([record.ts for record in records])
            self._problems.count("of memory could not be read: no time (ts)", position, int((~known).sum()))
            numbers = [whole([getattr(record.args, column) for record in records]) for column in _ALLOCATION_NUMBERS]
            self._allocations.append(np.stack([time, *numbers])[:, known])

    def absorb(self, later: Columns) -> None:
        """Add the columns of a later part of the same file."""
        names, shaped, texts, tracks = (
            np.array([mine[key] for key in theirs] or [0], np.int64)
            for mine, theirs in (
                (self._names, later._names),
                (self._shaped, later._shaped),
                (self._comm_texts, later._comm_texts),
                (self._tracks, later._tracks),
            )
        )
        for kind, name, start, duration, track, *numbers in later._parts:
            moved = (tracks[track // 2] * 2 + track % 2).astype(np.int32)
            self._parts.append((kind, names[name].astype(np.int32), start, duration, moved, *numbers))
        for number, stream in later._streams.items():
            self._streams.setdefault(int(tracks[number // 2]) * 2 + number % 2, stream)
        self._shapes += [np.stack([event + self._count, shaped[inputs]]) for event, inputs in later._shapes]
        words = len(_COMM_TEXTS)
        for event, *numbers in later._comm_params:
            own = [np.where(column >= 0, texts[column], NONE) for column in numbers[:words]]
            self._comm_params.append(np.stack([event + self._count, *own, *numbers[words:]]))
        self._allocations += later._allocations
        self._problems.absorb(later._problems)
        self._count += later._count

    def finish(self) -> tuple[Events, CommParams, Shapes, Allocations]:
        """The columns, sorted by time."""
        kind, name, start, duration, track, *numbers = map(np.concatenate, zip(*self._parts, strict=True))
        self._parts = []
        order = np.argsort(start, kind="stable")
        ties = np.diff(start[order]) == 0
        if (ties & (np.diff(duration[order]) > 0)).any():
            order = np.lexsort((-duration, start))
        used = np.flatnonzero(np.bincount(track))
        track = np.searchsorted(used, track)
        pairs = list(self._tracks)
        correlation, sequence, forward_thread = (column[order] for column in numbers)
        events = Events(
            kind=kind[order],
            name=name[order],
            start=start[order],
            duration=duration[order],
            track=track.astype(np.int32)[order],
            correlation=correlation,
            sequence=sequence,
            forward_thread=forward_thread,
            names=tuple(text[:LONGEST_NAME] for text in self._names),
            tracks=tuple(self._track(int(number), pairs[number // 2]) for number in used),
        )
        position = np.empty(len(order), np.int32)
        position[order] = np.arange(len(order), dtype=np.int32)
        return events, self._finish_comm_params(position), self._finish_shapes(position), self._finish_allocations()

    def _track(self, number: int, pair: tuple[Any, Any]) -> Track:
        process, thread = pair
        stream, device = NONE, NONE
        if number % 2:
            stream, device = self._streams[number]
            stream = stream if stream >= 0 else max(_number(thread), 0)
            device = device if device >= 0 else max(_number(process), 0)
        return Track(str(process), str(thread), stream, device)

    def _finish_comm_params(self, position: NDArray[np.int32]) -> CommParams:
        width = 1 + len(_COMM_TEXTS) + len(_COMM_NUMBERS)
        table = np.concatenate([np.zeros((width, 0), np.int64), *self._comm_params], axis=1)
        table, words = _in_order(table, position), 1 + len(_COMM_TEXTS)
        return CommParams(*table[:words].astype(np.int32), *table[words:], texts=tuple(self._comm_texts))  # type: ignore[misc]

    def _finish_shapes(self, position: NDArray[np.int32]) -> Shapes:
        table = np.concatenate(self._shapes, axis=1) if self._shapes else np.zeros((2, 0), np.int64)
        event, inputs = _in_order(table, position)
        texts = Interned()
        parts = [[texts[text] if text else NONE for text in shaped.split(b"\0")] for shaped in self._shaped]
        dims, types, values = np.array(parts, np.int32).reshape(-1, 3).T
        decoded = tuple(text.decode("utf-8", "replace") for text in texts)
        return Shapes(event.astype(np.int32), dims[inputs], types[inputs], values[inputs], decoded)

    def _finish_allocations(self) -> Allocations:
        empty = np.zeros((1 + len(_ALLOCATION_NUMBERS), 0), np.int64)
        table = np.concatenate([empty, *self._allocations], axis=1)
        return Allocations(*table[:, np.argsort(table[0], kind="stable")])


def _in_order(table: Integers, position: NDArray[np.int32]) -> Integers:
    """A table in the order of the sorted events. Its first column indexes events; `position` maps old to new indices."""
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
