"""The collective events of one rank, point-to-point messages included: what each was, how many bytes, when it was in flight.

On a device they are the kernels that communicate. What is known of one comes from what was open on the launching thread when it
was launched. On a profile without a device a call of `c10d` asks for each, and a thread of the backend (gloo) carries it out, in
the order of the calls.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from shardwise.trace.comms.describe import CHANGES_SIZE, UNKNOWN, Description, collective_of, describe
from shardwise.trace.reading.profile import Integers, Profile, column_at, row_of
from shardwise.trace.spans.activity import COMMUNICATION, Activity, label_spans, spans_of
from shardwise.trace.spans.intervals import distinct, nest

_HOST_BACKENDS = ("gloo:", "mpi:", "ucc:")


@dataclass(frozen=True)
class CollectiveEvents:
    """Collective events by start. Times are those of the profile."""

    start: Integers
    end: Integers
    descriptions: tuple[Description, ...]
    """The distinct ones."""
    which: Integers
    """The description of each event."""
    first: NDArray[np.bool_]
    """False for a further kernel of one collective, so that bytes are counted once."""
    sequence: Integers
    """Number within the group, -1 when not given."""
    source: Integers
    destination: Integers
    row: Integers
    """The row of the activity that carried it."""
    call: Integers
    """The event on the host that asked for it, -1 when not known."""
    carrier: Integers
    """The event that carried it: a kernel, or a span of a backend's thread; -1 when not known."""
    blocking: NDArray[np.bool_]
    """On a profile without a device: whether the thread that asked for it waited until it was done."""

    def __len__(self) -> int:
        return len(self.start)

    def sorted_by(self, order: Integers) -> CollectiveEvents:
        """The events in another order."""
        columns = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "descriptions"}
        return replace(self, **{name: column[order] for name, column in columns.items()})

    def column(self, of: Callable[[Description], float]) -> NDArray[np.float64]:
        """A number of each event's description."""
        return np.array([of(d) for d in self.descriptions], np.float64)[self.which] if len(self) else np.zeros(0)

    def mask(self, of: Callable[[Description], bool]) -> NDArray[np.bool_]:
        """Which events have such a description."""
        return self.column(of) > 0


def collective_events(activity: Activity) -> CollectiveEvents:
    """The collective events of a rank, on its device or, where it has none, on its host."""
    return _on_host(activity) if activity.on_host else _on_device(activity)


def _on_device(activity: Activity) -> CollectiveEvents:
    profile = activity.profile
    events, messages = profile.events, profile.messages
    rows = np.flatnonzero(activity.kind == COMMUNICATION)
    launch = activity.launch[rows]
    lane = np.where(launch >= 0, events.lane[launch], -1)
    time = np.where(launch >= 0, events.start[launch], 0)
    label = label_spans(events, "message").innermost(lane, time)
    with_arguments = np.zeros(len(events), np.bool_)
    with_arguments[messages.event] = True
    host = spans_of(events, with_arguments).innermost(lane, time)
    own = activity.event[rows]
    carrier = np.where(with_arguments[own], own, host)
    call = _best_call(profile, lane, time)
    descriptions, which = describe(profile, own, label, carrier, call)
    descriptions = _agreed(descriptions, which, activity.name[rows])
    row = row_of(messages.event, carrier)
    _, once = np.unique(np.where(label >= 0, label, -1 - np.arange(len(rows))), return_index=True)
    first = np.zeros(len(rows), np.bool_)
    first[once] = True
    return CollectiveEvents(
        activity.start[rows], activity.end[rows], descriptions, which, first,
        column_at(messages.sequence, row), column_at(messages.source, row), column_at(messages.destination, row), rows, launch, own,
        np.zeros(len(rows), np.bool_),
    )  # fmt: skip


def _best_call(profile: Profile, lane: NDArray[np.integer], time: Integers) -> Integers:
    """The open call of a communication library that has the better shapes. That is the operator if it names both input and
    output, since the two give the size of the group; else the annotation, which has the type."""
    events = profile.events

    def innermost(*prefixes: str) -> Integers:
        calls = events.named(lambda name: name.startswith(prefixes), "cpu_op", "annotation")
        return spans_of(events, calls).innermost(lane, time)

    operator, annotation = innermost("c10d::"), innermost("nccl:", *_HOST_BACKENDS)
    both = events.by_name(lambda name: collective_of(name) in CHANGES_SIZE and "base" in name) > 0
    return np.where((operator >= 0) & (both[events.name[operator]] | (annotation < 0)), operator, annotation)


def _agreed(
    descriptions: tuple[Description, ...], which: Integers, name: NDArray[np.integer]
) -> tuple[Description, ...]:
    """NCCL has one kernel for all-to-all and point-to-point. One whose call was not recorded is what all others of its name are."""
    pairs = set(zip(which.tolist(), name.tolist(), strict=True))
    found: dict[int, set[str]] = defaultdict(set)
    for one, kernel in pairs:
        found[kernel].add(descriptions[one].collective)
    others = {one: found[kernel] - {"send_recv"} for one, kernel in pairs}
    return tuple(
        d._replace(collective=next(iter(others[at])))
        if d.collective == "send_recv" and len(others.get(at, ())) == 1
        else d
        for at, d in enumerate(descriptions)
    )


def _on_host(activity: Activity) -> CollectiveEvents:
    """Each call of `c10d`, with the time that its backend's thread took where that can be found."""
    profile = activity.profile
    events = profile.events
    calls = np.flatnonzero(events.named(lambda n: n.startswith("c10d::") and bool(collective_of(n)), "cpu_op"))
    # A dispatch mode calls the operator again inside itself: the inner call is the collective.
    outer = nest(events.lane[calls], events.start[calls], events.end[calls]).parent
    calls = np.delete(calls, np.unique(outer[outer >= 0]))
    carriers = np.flatnonzero(events.named(lambda n: n.startswith(_HOST_BACKENDS), "annotation", "cpu_op"))
    by_call = _carried_by(profile, calls, carriers)
    alone = np.setdiff1d(carriers, by_call[by_call >= 0])
    unit = np.sort(np.concatenate((calls, alone)))
    carrier = np.full(len(unit), -1, np.int64)
    carrier[np.searchsorted(unit, calls)] = by_call
    carrier[np.searchsorted(unit, alone)] = alone
    # The backend's span of a send shows when somebody asked whether it was gone, not when it went.
    sends = (events.by_name(lambda name: collective_of(name) == "send") > 0)[events.name[unit]]
    shown = np.where((carrier >= 0) & ~sends, carrier, unit)
    label = label_spans(events, "message").innermost(events.lane[unit], events.start[unit])
    host = _arguments_inside(profile, unit)
    descriptions, which = describe(profile, unit, label, host, shown)
    descriptions = _receives_like_sends(descriptions)
    values = _concrete_inputs(profile, unit)
    source, destination = _peers(profile, values, descriptions, which)
    # The last argument but one of a collective of `c10d` is whether it is asynchronous.
    blocking = np.array([len(given) > 2 and given[-2] == "False" for given in values], np.bool_)
    sequence = column_at(profile.messages.sequence, row_of(profile.messages.event, host))
    found = CollectiveEvents(
        events.start[shown], events.end[shown], descriptions, which, np.ones(len(unit), np.bool_), sequence, source,
        destination, activity.rows_of(shown), unit, carrier, blocking,
    )  # fmt: skip
    return found.sorted_by(np.argsort(events.start[shown], kind="stable"))


def _concrete_inputs(profile: Profile, unit: Integers) -> list[list[object]]:
    """The scalar arguments of each call, [] where they were not recorded."""
    text = column_at(profile.shapes.values, row_of(profile.shapes.event, unit)).tolist()
    decoded = {one: profile.shapes.decode(one) for one in set(text)}
    return [decoded[one] for one in text]


def _receives_like_sends(descriptions: tuple[Description, ...]) -> tuple[Description, ...]:
    """A receive has no label, since it sends nothing. Where all sends are of one axis, receives are too."""
    sends = {(d.axis, d.group, d.size) for d in descriptions if d.collective == "send" and d.axis != UNKNOWN}
    if len(sends) != 1:
        return descriptions
    axis, group, size = next(iter(sends))
    return tuple(
        d._replace(axis=axis, group=group, size=size) if d.collective == "recv" and d.axis == UNKNOWN else d
        for d in descriptions
    )


def _peers(
    profile: Profile, values: list[list[object]], descriptions: tuple[Description, ...], which: Integers
) -> tuple[Integers, Integers]:
    """Who sends and who receives, from the arguments of `c10d::send` and `c10d::recv_`, which hold an index into the group."""
    source, destination = np.full(len(values), -1, np.int64), np.full(len(values), -1, np.int64)
    for at, given in enumerate(values):
        one = descriptions[which[at]]
        group = profile.groups.get(one.group)
        if one.collective not in ("send", "recv") or group is None or len(given) < 3 or not str(given[2]).isdigit():
            continue
        index = int(str(given[2]))
        if index < len(group.ranks):
            (destination if one.collective == "send" else source)[at] = group.ranks[index]
    return source, destination


def _arguments_inside(profile: Profile, unit: Integers) -> Integers:
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
    """For each call the span of the backend's thread that carried it, -1 for none. A backend serves calls in order, so the next
    span of a collective belongs to the earliest call of it that has none. Gloo's span of a reduce-scatter is an all-reduce."""
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
