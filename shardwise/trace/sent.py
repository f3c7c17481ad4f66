"""The messages of one rank: whose traffic each was, which collective, how many bytes, when it was under way.

What is known of a message stands in several places, by version and backend: in the arguments of NCCL's kernel or of the host's
`record_param_comms`, in a label of this project's trainer, in the shapes of the call (`nccl:all_reduce`, `c10d::…`), at worst
only in the kernel's name. They are joined here by the launch: what was open on the thread that launched the kernel belongs
to it. Distinct descriptions are few, so each is worked out once.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.labels import read_label
from shardwise.ledger import AXIS_OF, wire_bytes
from shardwise.trace.activity import Activity, Spans, spans_of
from shardwise.trace.axes import UNKNOWN, axis_of, collective_of, element_bytes
from shardwise.trace.classes import COMMUNICATION
from shardwise.trace.events import Integers, Profile
from shardwise.trace.nesting import distinct, nest

_CHANGES_SIZE = ("all_gather", "reduce_scatter", "all_to_all")


class Described(NamedTuple):
    """What is known of a message."""

    axis: str
    collective: str
    group: str
    """Name of the process group; "" when the profile names none."""
    size: int
    """Ranks in it, 0 when not known."""
    bytes: float
    payload: float
    sized: bool


@dataclass(frozen=True)
class Sent:
    """Messages by start. Times are those of the profile."""

    start: Integers
    end: Integers
    described: tuple[Described, ...]
    """The distinct descriptions."""
    what: Integers
    """Each message's description."""
    first: NDArray[np.bool_]
    """False for a further kernel of a message that has several, so that bytes are counted once."""
    sequence: Integers
    """Number within the group, -1 when not said."""
    source: Integers
    destination: Integers
    row: Integers
    """Row of the activity that carried it."""
    call: Integers
    """Event on the host that asked for it, -1 when not known."""
    carrier: Integers
    """Event that carried it: a kernel, or a span of a backend's thread; -1 when not known."""

    def __len__(self) -> int:
        return len(self.start)

    def sorted_by(self, order: Integers) -> Sent:
        """The messages in another order."""
        return Sent(
            self.start[order], self.end[order], self.described, self.what[order], self.first[order], self.sequence[order],
            self.source[order], self.destination[order], self.row[order], self.call[order], self.carrier[order],
        )  # fmt: skip

    def column(self, of: Callable[[Described], float]) -> NDArray[np.float64]:
        """A number of each message's description."""
        return np.array([of(d) for d in self.described], np.float64)[self.what] if len(self) else np.zeros(0)

    def those(self, of: Callable[[Described], bool]) -> NDArray[np.bool_]:
        """Which messages have such a description."""
        return np.array([of(d) for d in self.described], np.bool_)[self.what] if len(self) else np.zeros(0, np.bool_)


def sent(activity: Activity) -> Sent:
    """All messages of a rank."""
    return _on_host(activity) if activity.on_host else _on_device(activity)


def label_spans(profile: Profile, kind: str) -> Spans:
    """Labels of one kind on the host's threads."""
    events = profile.events
    wanted = np.array([(found := read_label(n)) is not None and found.kind == kind for n in events.names] or [False])
    return spans_of(events, events.named(wanted) & events.of_kind("cpu_op", "annotation"))


def _on_device(activity: Activity) -> Sent:
    profile = activity.profile
    events, messages = profile.events, profile.messages
    rows = np.flatnonzero(activity.kind == COMMUNICATION)
    launch = activity.launch[rows]
    lane = np.where(launch >= 0, events.lane[launch], -1)
    time = np.where(launch >= 0, events.start[launch], 0)
    label = _where(launch >= 0, label_spans(profile, "message").innermost(lane, time))
    told = np.zeros(len(events), np.bool_)
    told[messages.event] = True
    host = _where(launch >= 0, spans_of(events, told).innermost(lane, time))
    own = activity.event[rows]
    carrier = np.where(told[own], own, host)
    call = _where(launch >= 0, _best_call(profile, lane, time))
    described, what = _describe(profile, own, label, carrier, call)
    described = _agreed(described, what, activity.name[rows])
    row = _message_row(profile, carrier)
    _, once = np.unique(np.where(label >= 0, label, -1 - np.arange(len(rows))), return_index=True)
    first = np.zeros(len(rows), np.bool_)
    first[once] = True
    return Sent(
        activity.start[rows], activity.end[rows], described, what, first,
        _of(messages.sequence, row), _of(messages.source, row), _of(messages.destination, row), rows, launch, own,
    )  # fmt: skip


def _where(condition: NDArray[np.bool_], found: Integers) -> Integers:
    return np.where(condition, found, -1)


def _of(column: NDArray[np.integer], row: Integers) -> Integers:
    """A column at some rows, -1 at no row."""
    return np.where(row >= 0, column[row].astype(np.int64), -1) if len(column) else np.full(len(row), -1, np.int64)


def _message_row(profile: Profile, event: Integers) -> Integers:
    """Row of the arguments that an event carries, -1 for none."""
    held = profile.messages.event
    if not len(held):
        return np.full(len(event), -1, np.int64)
    at = np.minimum(np.searchsorted(held, event), len(held) - 1)
    return np.where(held[at] == event, at, -1)


def _best_call(profile: Profile, lane: NDArray[np.integer], time: Integers) -> Integers:
    """The call of a communication library that was open, and carries the better shapes: the operator where it names both what is
    read and what is written, since the two tell the size of the group; else the annotation, which knows the type."""
    events = profile.events
    operator, annotation = (
        spans_of(events, events.named(np.array(wanted or [False])) & events.of_kind("cpu_op", "annotation")).innermost(
            lane, time
        )
        for wanted in (
            [n.startswith("c10d::") for n in events.names],
            [n.startswith(("nccl:", "gloo:", "mpi:", "ucc:")) for n in events.names],
        )
    )
    both = np.array([collective_of(n) in _CHANGES_SIZE and "base" in n for n in events.names] or [False])
    use = (operator >= 0) & (both[events.name[operator]] | (annotation < 0))
    return np.where(use, operator, annotation)


def _agreed(described: tuple[Described, ...], what: Integers, name: NDArray[np.integer]) -> tuple[Described, ...]:
    """NCCL has one kernel for all-to-all and for messages between two. Where its call was not recorded, it is what all others of
    that name are."""
    found: dict[int, set[str]] = defaultdict(set)
    for one, kernel in set(zip(what.tolist(), name.tolist(), strict=True)):
        found[kernel].add(described[one].collective)
    said = {one: found[kernel] - {"send_recv"} for one, kernel in zip(what.tolist(), name.tolist(), strict=True)}
    return tuple(
        d._replace(collective=next(iter(said[at]))) if d.collective == "send_recv" and len(said.get(at, ())) == 1 else d
        for at, d in enumerate(described)
    )


def _describe(
    profile: Profile, own: Integers, label: Integers, carrier: Integers, call: Integers
) -> tuple[tuple[Described, ...], Integers]:
    """Descriptions, each once, and which is whose."""
    events, messages, shapes = profile.events, profile.messages, profile.shapes
    if not len(own):
        return (), np.zeros(0, np.int64)
    row = _message_row(profile, carrier)
    at = np.minimum(np.searchsorted(shapes.event, call), max(len(shapes) - 1, 0))
    shaped = np.where((call >= 0) & (shapes.event[at] == call), at, -1) if len(shapes) else np.full(len(own), -1)
    told = (
        messages.group, messages.description, messages.collective, messages.dtype, messages.ranks, messages.splits_in,
        messages.elements_in, messages.elements_out, messages.size,
    )  # fmt: skip
    names = [np.where(at >= 0, events.name[at], -1) for at in (own, label, call)]
    columns = [*names, _of(shapes.dims, shaped), _of(shapes.types, shaped), *(_of(column, row) for column in told)]
    distinct, what = np.unique(np.stack(columns, 1).astype(np.int64), axis=0, return_inverse=True)
    return tuple(_Reader(profile, *line).read() for line in distinct.tolist()), what.reshape(-1)


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
        second = called.startswith("c10d::") and collective in _CHANGES_SIZE
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


def _on_host(activity: Activity) -> Sent:
    """Without a device: each call of `c10d`, with the time its backend's thread took to carry it where that can be told."""
    profile = activity.profile
    events = profile.events
    of_name = [(n.startswith("c10d::"), n.startswith(("gloo:", "mpi:", "ucc:"))) for n in events.names] or [
        (False,) * 2
    ]
    issued, carried = (events.named(np.array(wanted, np.bool_)) for wanted in zip(*of_name, strict=True))
    calls = np.flatnonzero(issued & events.of_kind("cpu_op"))
    calls = calls[[bool(collective_of(events.names[n])) for n in events.name[calls]]] if len(calls) else calls
    # A dispatch mode calls the operator again inside of itself: the inner one is the message.
    outer = nest(events.lane[calls], events.start[calls], events.end[calls]).parent
    calls = np.delete(calls, np.unique(outer[outer >= 0]))
    carriers = np.flatnonzero(carried & events.of_kind("annotation", "cpu_op"))
    by_call = _carried_by(profile, calls, carriers)
    alone = np.setdiff1d(carriers, by_call[by_call >= 0])
    unit = np.sort(np.concatenate((calls, alone)))
    carrier = np.full(len(unit), -1, np.int64)
    carrier[np.searchsorted(unit, calls)] = by_call
    carrier[np.searchsorted(unit, alone)] = alone
    # What a send's span shows is when somebody asked whether it was gone, not when it went.
    sends = np.array([collective_of(n) == "send" for n in events.names] or [False])[events.name[unit]]
    shown = np.where((carrier >= 0) & ~sends, carrier, unit)
    label = label_spans(profile, "message").innermost(events.lane[unit], events.start[unit])
    host = _message_inside(profile, unit)
    described, what = _describe(profile, unit, label, host, shown)
    described = _of_stages(described)
    row = _message_row(profile, host)
    source, destination = _peers(profile, unit, described, what)
    messages = profile.messages
    order = np.argsort(events.start[shown], kind="stable")
    found = Sent(
        events.start[shown], events.end[shown], described, what, np.ones(len(unit), np.bool_),
        _of(messages.sequence, row), source, destination, activity.rows_of(shown), unit, carrier,
    )  # fmt: skip
    return found.sorted_by(order)


def _of_stages(described: tuple[Described, ...]) -> tuple[Described, ...]:
    """A receive has no label, since it sends nothing; where all sends are of one axis, receives are too."""
    sends = {(d.axis, d.group, d.size) for d in described if d.collective == "send" and d.axis != UNKNOWN}
    if len(sends) != 1:
        return described
    axis, group, size = next(iter(sends))
    return tuple(
        d._replace(axis=axis, group=group, size=size) if d.collective == "recv" and d.axis == UNKNOWN else d
        for d in described
    )


def _peers(
    profile: Profile, unit: Integers, described: tuple[Described, ...], what: Integers
) -> tuple[Integers, Integers]:
    """Who sends and who receives, from the arguments of `c10d::send` and `c10d::recv_`: a place in the group each."""
    source, destination = np.full(len(unit), -1, np.int64), np.full(len(unit), -1, np.int64)
    shapes = profile.shapes
    for at, event in enumerate(unit.tolist()):
        one = described[what[at]]
        group = profile.groups.get(one.group)
        row = int(np.searchsorted(shapes.event, event))
        if one.collective not in ("send", "recv") or group is None or row >= len(shapes) or shapes.event[row] != event:
            continue
        values = shapes.decode(int(shapes.values[row]))
        place = int(values[2]) if len(values) > 2 and str(values[2]).isdigit() else -1
        if 0 <= place < len(group.ranks):
            (destination if one.collective == "send" else source)[at] = group.ranks[place]
    return source, destination


def _message_inside(profile: Profile, unit: Integers) -> Integers:
    """The `record_param_comms` that began inside each call on its thread, -1 for none."""
    events, held = profile.events, profile.messages.event.astype(np.int64)
    if not len(held) or not len(unit):
        return np.full(len(unit), -1, np.int64)
    moments = distinct(events.start[held])
    keys = events.lane[held].astype(np.int64) * (len(moments) + 1) + np.searchsorted(moments, events.start[held])
    order = np.argsort(keys, kind="stable")
    wanted = events.lane[unit].astype(np.int64) * (len(moments) + 1) + np.searchsorted(moments, events.start[unit])
    at = np.searchsorted(keys[order], wanted)
    safe = held[order][np.minimum(at, len(held) - 1)]
    inside = (at < len(held)) & (events.lane[safe] == events.lane[unit]) & (events.start[safe] < events.end[unit])
    return np.where(inside, safe, -1)


def _carried_by(profile: Profile, calls: Integers, carriers: Integers) -> Integers:
    """For each call the span of the backend's thread that carried it, -1 for none. A backend serves calls in order, so the
    next span of a collective belongs to the earliest call of it that has none; gloo adds up and keeps a piece for a
    reduce-scatter, so its span is an all-reduce."""
    events = profile.events
    kinds = [collective_of(name) for name in events.names]
    waiting: dict[str, deque[int]] = defaultdict(deque)
    found = np.full(len(calls), -1, np.int64)
    moments = sorted(
        [(int(events.start[e]), 0, at) for at, e in enumerate(calls)]
        + [(int(events.start[e]), 1, int(e)) for e in carriers]
    )
    for _, carries, which in moments:
        if not carries:
            kind = kinds[events.name[calls[which]]]
            waiting["all_reduce" if kind == "reduce_scatter" else kind].append(which)
        else:
            queue = waiting[kinds[events.name[which]]]
            if queue:
                found[queue.popleft()] = which
    return found


def axes_of(sent: Sent) -> list[tuple[str, str]]:
    """Axes and collectives there are, in the order of the ledger's words, what is not known last."""
    pairs = {(d.axis, d.collective) for d in sent.described}
    return sorted(pairs, key=lambda pair: (pair[0] == UNKNOWN, pair))
