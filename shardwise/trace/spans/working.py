"""What a rank worked at, and whose its communication was, row by row.

Without a device a thread that called a collective and waits for it is still inside an operator, but does not compute. What
calls say of themselves (`asyncOp` of `c10d`) tells such waiting from overlap; so what it hides is hidden by nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardwise.labels import read_label
from shardwise.ledger import AXIS_OF
from shardwise.trace.reading.events import Integers
from shardwise.trace.sending.sent import Sent
from shardwise.trace.spans.activity import Activity
from shardwise.trace.spans.classes import COMMUNICATION
from shardwise.trace.spans.intervals import Intervals, difference, join, nothing, union


def working(activity: Activity, sent: Sent, rows: NDArray[np.bool_]) -> Intervals:
    """When any of these rows was worked at: on a device all of their time, on the host without that of threads that wait."""
    if not activity.on_host or not sent.blocking.any():
        return union(activity.start[rows], activity.end[rows])
    events = activity.profile.events
    lane_of_call = events.lane[sent.call]
    found = nothing()
    for lane in np.flatnonzero(np.bincount(activity.lane[rows], minlength=1)).tolist():
        mine, waits = rows & (activity.lane == lane), sent.blocking & (lane_of_call == lane)
        blocked = union(events.start[sent.call[waits]], sent.end[waits])
        found = join(found, difference(union(activity.start[mine], activity.end[mine]), blocked))
    return found


def resumed(activity: Activity, sent: Sent) -> Integers:
    """When each row began, or went on after its thread had waited for a collective."""
    start = activity.start.copy()
    if not activity.on_host or not sent.blocking.any():
        return start
    events = activity.profile.events
    lane_of_call = events.lane[sent.call]
    computing = activity.kind != COMMUNICATION
    for lane in np.unique(lane_of_call[sent.blocking]).tolist():
        mine, waits = np.flatnonzero(computing & (activity.lane == lane)), sent.blocking & (lane_of_call == lane)
        blocked = union(events.start[sent.call[waits]], sent.end[waits])
        at = np.searchsorted(blocked.start, start[mine], side="right") - 1
        until = np.where(at >= 0, blocked.end[np.maximum(at, 0)], start[mine])
        start[mine] = np.clip(until, start[mine], activity.end[mine])
    return start


def row_axes(activity: Activity, sent: Sent) -> tuple[Integers, list[str]]:
    """The axis of each row that communicates, into the words given with it; -1 for the others and where it is not known."""
    events = activity.profile.events
    words: list[str] = []
    number: dict[str, int] = {}

    def numbered(axis: str) -> int:
        if axis not in number:
            number[axis] = len(words)
            words.append(axis)
        return number[axis]

    of_message = np.array([numbered(d.axis) for d in sent.described] or [-1], np.int64)[sent.what]
    labels = [read_label(name) for name in events.names]
    of_name = [
        numbered(AXIS_OF.get(one.words[0], one.words[0])) if one and one.kind == "message" else -1 for one in labels
    ]
    of_event = np.array(of_name or [-1], np.int64)[events.name] if len(events) else np.zeros(0, np.int64)
    for event in (sent.call, sent.carrier) if activity.on_host else (sent.carrier,):
        of_event[event[event >= 0]] = of_message[event >= 0]
    return np.where(activity.kind == COMMUNICATION, of_event[activity.event], -1), words
