"""Messages of a profile without a device. A call of `c10d` asks for them, and a thread of the backend (gloo) carries them, in
the order of the calls.
"""

from __future__ import annotations

from collections import defaultdict, deque

import numpy as np
from numpy.typing import NDArray

from shardwise.trace.reading.events import Integers, Profile
from shardwise.trace.sending.axes import UNKNOWN, collective_of
from shardwise.trace.sending.described import column_at, describe, message_row
from shardwise.trace.sending.sent import Described, Sent, label_spans
from shardwise.trace.spans.activity import Activity
from shardwise.trace.spans.nesting import distinct, nest


def sent_on_host(activity: Activity) -> Sent:
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
    described, what = describe(profile, unit, label, host, shown)
    described = _of_stages(described)
    row = message_row(profile, host)
    source, destination = _peers(profile, unit, described, what)
    messages = profile.messages
    order = np.argsort(events.start[shown], kind="stable")
    found = Sent(
        events.start[shown], events.end[shown], described, what, np.ones(len(unit), np.bool_),
        column_at(messages.sequence, row), source, destination, activity.rows_of(shown), unit, carrier,
        _blocking(profile, unit),
    )  # fmt: skip
    return found.sorted_by(order)


def _blocking(profile: Profile, unit: Integers) -> NDArray[np.bool_]:
    """Which calls say that they are not asynchronous: the last argument but one of `c10d`'s collectives."""
    shapes = profile.shapes
    if not len(shapes) or not len(unit):
        return np.zeros(len(unit), np.bool_)
    at = np.minimum(np.searchsorted(shapes.event, unit), len(shapes) - 1)
    values = np.where(shapes.event[at] == unit, shapes.values[at], -1)
    said = {one: shapes.decode(one) for one in set(values.tolist())}
    waits = {one: len(given) > 2 and given[-2] == "False" for one, given in said.items()}
    return np.array([waits[one] for one in values.tolist()], np.bool_)


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
