"""The collective events of one rank, P2P messages included: kind, bytes, and when each was in flight.

On a device they are communication kernels, described by the spans open on the launching thread at their launch. In a CPU-only
profile each is a `c10d` call, and a thread of the backend (gloo) executes them in the order of the calls.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardwise.run.axes import AXES
from shardwise.trace.comms.describe import CHANGES_SIZE, UNKNOWN, WORLD, Description, collective_of, describe
from shardwise.trace.reading.integers import Integers
from shardwise.trace.reading.profile import Profile, column_at, row_of
from shardwise.trace.spans.activity import COMMUNICATION, Activity, label_spans, spans_of
from shardwise.trace.spans.intervals import distinct, nest

_HOST_BACKENDS = ("gloo:", "mpi:", "ucc:")
_HOST = ("cpu_op", "annotation")
MOST_GROUPS = 100
"""Process groups of no known axis that a rank's answers name; the others are taken together."""
OTHER_GROUPS = "other groups"


@dataclass(frozen=True)
class CollectiveEvents:
    """Collective events sorted by start. Times are on the profile's clock."""

    start: Integers
    end: Integers
    descriptions: tuple[Description, ...]
    """The distinct descriptions."""
    which: Integers
    """Each event's index into `descriptions`."""
    first: NDArray[np.bool_]
    """False for all but the first kernel of a collective, so that its bytes are counted once."""
    sequence: Integers
    """Sequence number in the process group, -1 if not given."""
    source: Integers
    destination: Integers
    row: Integers
    """Its row of the activity."""
    call: Integers
    """The host event that issued it, -1 if unknown."""
    execution: Integers
    """The event that executed it: a kernel, or a span of a backend's thread; -1 if unknown."""
    blocking: NDArray[np.bool_]
    """In a CPU-only profile: whether the issuing thread blocked until it was done."""

    def __len__(self) -> int:
        return len(self.start)

    def column(self, value: Callable[[Description], float]) -> NDArray[np.float64]:
        """`value` of each event's description."""
        return np.array([value(d) for d in self.descriptions], np.float64)[self.which] if len(self) else np.zeros(0)

    def mask(self, wanted: Callable[[Description], bool]) -> NDArray[np.bool_]:
        """Mask of the events whose description satisfies `wanted`."""
        return self.column(wanted) > 0


def collective_events(activity: Activity) -> CollectiveEvents:
    """The collective events of a rank, on its device, or on its host if it has none."""
    return _folded(_on_host(activity) if activity.on_host else _on_device(activity))


def _folded(comms: CollectiveEvents) -> CollectiveEvents:
    """With more process groups of no known axis than anyone reads, those that took longest keep their names."""
    own = sorted({d.axis for d in comms.descriptions} - {*AXES, WORLD, UNKNOWN})
    if len(own) <= MOST_GROUPS:
        return comms
    number = {axis: at for at, axis in enumerate(own)}
    at = np.array([number.get(d.axis, len(own)) for d in comms.descriptions], np.int64)[comms.which]
    took = np.bincount(at, comms.end - comms.start, minlength=len(own) + 1)[: len(own)]
    others = {own[one] for one in np.argsort(-took, kind="stable")[MOST_GROUPS:].tolist()}
    descriptions = tuple(Description(OTHER_GROUPS, *d[1:]) if d.axis in others else d for d in comms.descriptions)
    return replace(comms, descriptions=descriptions)


def _on_device(activity: Activity) -> CollectiveEvents:
    profile = activity.profile
    events, comm_params = profile.events, profile.comm_params
    rows = np.flatnonzero(activity.kind == COMMUNICATION)
    launch = activity.launch[rows]
    track, time = activity.issued
    track, time = track[rows], time[rows]
    label = label_spans(events, "message").innermost(track, time)
    has_params = np.zeros(len(events), np.bool_)
    has_params[comm_params.event] = True
    host = spans_of(events, has_params).innermost(track, time)
    own = activity.event[rows]
    params = np.where(has_params[own], own, host)
    call = _best_call(profile, track, time)
    descriptions, which = describe(profile, own, label, params, call)
    descriptions = _agreed(descriptions, which, activity.name[rows])
    row = row_of(comm_params.event, params)
    _, once = np.unique(np.where(label >= 0, label, -1 - np.arange(len(rows))), return_index=True)
    first = np.zeros(len(rows), np.bool_)
    first[once] = True
    return CollectiveEvents(
        activity.start[rows], activity.end[rows], descriptions, which, first, column_at(comm_params.sequence, row),
        column_at(comm_params.source, row), column_at(comm_params.destination, row), rows, launch, own,
        np.zeros(len(rows), np.bool_),
    )  # fmt: skip


def _best_call(profile: Profile, track: NDArray[np.integer], time: Integers) -> Integers:
    """The open call with the better shapes: the `c10d` operator if it has both input and output, which give the group's size; else
    the backend's annotation, which has the dtype."""
    events = profile.events

    def innermost(*prefixes: str) -> Integers:
        calls = events.named(lambda name: name.startswith(prefixes), "cpu_op", "annotation")
        return spans_of(events, calls).innermost(track, time)

    operator, annotation = innermost("c10d::"), innermost("nccl:", *_HOST_BACKENDS)
    both = events.by_name(lambda name: "base" in name and collective_of(name) in CHANGES_SIZE, *_HOST) > 0
    return np.where((operator >= 0) & (both[events.name[operator]] | (annotation < 0)), operator, annotation)


def _agreed(
    descriptions: tuple[Description, ...], which: Integers, name: NDArray[np.integer]
) -> tuple[Description, ...]:
    """NCCL has one kernel for all-to-all and P2P. If its call was not recorded, it is what all other kernels of its name are."""
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
    """Each `c10d` call, with the time of its execution on the backend's thread where that can be found."""
    profile = activity.profile
    events = profile.events
    calls = np.flatnonzero(events.named(lambda n: n.startswith("c10d::") and bool(collective_of(n)), "cpu_op"))
    # A dispatch mode calls the operator again inside itself: only the inner call counts.
    outer = nest(events.track[calls], events.start[calls], events.end[calls]).parent
    calls = np.delete(calls, np.unique(outer[outer >= 0]))
    backend_spans = np.flatnonzero(events.named(lambda n: n.startswith(_HOST_BACKENDS), "annotation", "cpu_op"))
    by_call = _executions(profile, calls, backend_spans)
    without_call = np.setdiff1d(backend_spans, by_call[by_call >= 0])
    issued = np.sort(np.concatenate((calls, without_call)))
    execution = np.full(len(issued), -1, np.int64)
    execution[np.searchsorted(issued, calls)] = by_call
    execution[np.searchsorted(issued, without_call)] = without_call
    # The backend's span of a send shows when its completion was polled, not when it was sent.
    sends = (events.by_name(lambda name: collective_of(name) == "send", *_HOST) > 0)[events.name[issued]]
    shown = np.where((execution >= 0) & ~sends, execution, issued)
    order = np.argsort(events.start[shown], kind="stable")
    issued, execution, shown = issued[order], execution[order], shown[order]
    label = label_spans(events, "message").innermost(events.track[issued], events.start[issued])
    params = _params_inside(profile, issued)
    descriptions, which = describe(profile, issued, label, params, shown)
    descriptions = _receives_like_sends(descriptions)
    values = _concrete_inputs(profile, issued)
    source, destination = _peers(profile, values, descriptions, which)
    # The last argument but one of a `c10d` collective is `asyncOp`.
    blocking = np.array([len(given) > 2 and given[-2] == "False" for given in values], np.bool_)
    sequence = column_at(profile.comm_params.sequence, row_of(profile.comm_params.event, params))
    return CollectiveEvents(
        events.start[shown], events.end[shown], descriptions, which, np.ones(len(issued), np.bool_), sequence, source,
        destination, activity.rows_of(shown), issued, execution, blocking,
    )  # fmt: skip


def _concrete_inputs(profile: Profile, calls: Integers) -> list[list[object]]:
    """The scalar inputs of each call, [] where they were not recorded."""
    text = column_at(profile.shapes.values, row_of(profile.shapes.event, calls)).tolist()
    decoded = {one: profile.shapes.decode(one) for one in set(text)}
    return [decoded[one] for one in text]


def _receives_like_sends(descriptions: tuple[Description, ...]) -> tuple[Description, ...]:
    """Receives have no label. If all sends are of one axis, receives are too."""
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
    """Source and destination ranks, from the arguments of `c10d::send` and `c10d::recv_`, which are indices into the group."""
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


def _params_inside(profile: Profile, calls: Integers) -> Integers:
    """The `record_param_comms` that began inside each call on its thread, -1 for none."""
    events, params = profile.events, profile.comm_params.event.astype(np.int64)
    if not len(params) or not len(calls):
        return np.full(len(calls), -1, np.int64)
    moments = distinct(events.start[params])
    keys = events.track[params].astype(np.int64) * (len(moments) + 1) + np.searchsorted(moments, events.start[params])
    order = np.argsort(keys, kind="stable")
    wanted = events.track[calls].astype(np.int64) * (len(moments) + 1) + np.searchsorted(moments, events.start[calls])
    at = np.searchsorted(keys[order], wanted)
    after = params[order][np.minimum(at, len(params) - 1)]
    inside = (
        (at < len(params)) & (events.track[after] == events.track[calls]) & (events.start[after] < events.end[calls])
    )
    return np.where(inside, after, -1)


def _executions(profile: Profile, calls: Integers, backend_spans: Integers) -> Integers:
    """For each call the backend's span that executed it, -1 for none. A backend executes calls in order, so the next span of a
    collective belongs to the earliest such call without one. Gloo's span of a reduce-scatter is an all-reduce."""
    events = profile.events
    kinds = {name: collective_of(events.names[name]) for name in events.names_of(*_HOST).tolist()}
    waiting: dict[str, deque[int]] = defaultdict(deque)
    found = np.full(len(calls), -1, np.int64)
    moments = sorted(
        [(int(events.start[e]), 0, at) for at, e in enumerate(calls)]
        + [(int(events.start[e]), 1, int(e)) for e in backend_spans]
    )
    for _, is_span, which in moments:
        if not is_span:
            kind = kinds[int(events.name[calls[which]])]
            waiting["all_reduce" if kind == "reduce_scatter" else kind].append(which)
        else:
            queue = waiting[kinds[int(events.name[which])]]
            if queue:
                found[queue.popleft()] = which
    return found
