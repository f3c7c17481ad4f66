"""Messages that a device's kernels carry. What is known of them is joined by the launch: what was open on the thread that
launched a kernel belongs to it.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from shardwise.trace.reading.events import Integers, Profile
from shardwise.trace.sending.axes import collective_of
from shardwise.trace.sending.described import CHANGES_SIZE, column_at, describe, message_row
from shardwise.trace.sending.sent import Described, Sent, label_spans
from shardwise.trace.spans.activity import Activity, spans_of
from shardwise.trace.spans.classes import COMMUNICATION


def sent_on_device(activity: Activity) -> Sent:
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
    described, what = describe(profile, own, label, carrier, call)
    described = _agreed(described, what, activity.name[rows])
    row = message_row(profile, carrier)
    _, once = np.unique(np.where(label >= 0, label, -1 - np.arange(len(rows))), return_index=True)
    first = np.zeros(len(rows), np.bool_)
    first[once] = True
    return Sent(
        activity.start[rows], activity.end[rows], described, what, first,
        column_at(messages.sequence, row), column_at(messages.source, row), column_at(messages.destination, row), rows, launch, own,
        np.zeros(len(rows), np.bool_),
    )  # fmt: skip


def _where(condition: NDArray[np.bool_], found: Integers) -> Integers:
    return np.where(condition, found, -1)


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
    both = np.array([collective_of(n) in CHANGES_SIZE and "base" in n for n in events.names] or [False])
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
