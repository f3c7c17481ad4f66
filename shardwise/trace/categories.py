"""A rank's time in the ledger's categories, as the planner tells it too. Every moment of the windows has exactly one category, so
they add up to the span: what is computed comes first, then traffic that nothing hid by its axis, then copies, then why the
device was idle.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shardwise.ledger import CATEGORIES
from shardwise.trace.idle import idle_pieces
from shardwise.trace.places import Places
from shardwise.trace.sending.axes import AXES, POINT_TO_POINT
from shardwise.trace.sending.sent import Sent
from shardwise.trace.spans.activity import Activity
from shardwise.trace.spans.classes import COMPUTE, COPY
from shardwise.trace.spans.intervals import Intervals, difference, intersect, total, union
from shardwise.trace.spans.kinds import category_of
from shardwise.trace.spans.working import working

_OF_CAUSE = {
    "host": "host", "synchronisation": "host", "data": "data", "peer": "other", "pipeline": "bubble", "device": "other",
    "unknown": "other",
}  # fmt: skip
"""Idle time by its cause. What was launched in time and began later is nobody's by the planner's words."""


def categories(activity: Activity, sent: Sent, places: Places, windows: Intervals) -> dict[str, int]:
    """Nanoseconds of each category within the windows."""
    found = dict.fromkeys(CATEGORIES, 0)
    left = windows
    for category, moments in _in_order(activity, sent, places):
        found[category] += total(intersect(left, moments))
        left = difference(left, moments)
    for cause, moments in idle_pieces(activity, left).items():
        found[_OF_CAUSE[cause]] += total(moments)
    return found


def _in_order(activity: Activity, sent: Sent, places: Places) -> Iterator[tuple[str, Intervals]]:
    names = activity.profile.events.names
    kind = np.array([("matmul", "attention", "memory").index(category_of(name)) for name in names] or [0])[
        activity.name
    ]
    optimizer = np.array([name == "(phase optimizer)" for name in places.names])[places.place]
    computing = activity.kind == COMPUTE
    for category, rows in (
        ("matmul", computing & (kind == 0) & ~optimizer),
        ("attention", computing & (kind == 1) & ~optimizer),
        ("optimizer", computing & optimizer),
        ("memory", computing & (kind == 2) & ~optimizer),
    ):
        yield category, working(activity, sent, rows)
    for axis in AXES:
        mine = sent.those(lambda d: d.axis == axis)  # noqa: B023
        # A receive lasts from when it is posted: nearly all of it is waiting for the stage before.
        waits = mine & sent.those(lambda d: d.collective in POINT_TO_POINT and d.collective != "send")
        waits &= axis == "pipeline"
        yield axis, union(sent.start[mine & ~waits], sent.end[mine & ~waits])
        yield "bubble", union(sent.start[waits], sent.end[waits])
    copying = activity.kind == COPY
    yield "memory", union(activity.start[copying], activity.end[copying])
    yield "other", union(activity.start, activity.end)
