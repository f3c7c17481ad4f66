"""Communication by axis and collective: time, exposed time (not overlapped by compute), bytes, and time spent waiting for other
ranks.

In a CPU-only profile a thread that waits for its collective is inside an operator but does not compute. `asyncOp` of the `c10d`
call identifies such blocking calls, and their time is subtracted from compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.ledger import AXIS_OF
from shardwise.trace.answers import AxisTime, CommTime
from shardwise.trace.comms.events import CollectiveEvents
from shardwise.trace.reading.integers import Integers
from shardwise.trace.spans.activity import COMMUNICATION, Activity
from shardwise.trace.spans.intervals import Intervals, covered, difference, join, parts, sums, union, unions


def busy_intervals(activity: Activity, comms: CollectiveEvents, rows: NDArray[np.bool_]) -> Intervals:
    """When any of these rows ran, without the time in which their thread was blocked in a collective."""
    blocked = dict(_blocked(activity, comms))
    if not blocked:
        return union(activity.start[rows], activity.end[rows])
    row = np.flatnonzero(rows)
    free = row[~np.isin(activity.track[row], list(blocked))]
    found = [union(activity.start[free], activity.end[free])]
    for track, at in parts(activity.track[row]):
        if track in blocked:
            mine = row[at]
            found.append(difference(union(activity.start[mine], activity.end[mine]), blocked[track]))
    return join(*found)


def start_after_waits(activity: Activity, comms: CollectiveEvents) -> Integers:
    """Start of each row, or the time it resumed if its thread was blocked in a collective."""
    start = activity.start.copy()
    waits = dict(_blocked(activity, comms))
    row = np.flatnonzero(activity.kind != COMMUNICATION) if waits else np.zeros(0, np.int64)
    for track, where in parts(activity.track[row]):
        if track not in waits:
            continue
        mine, blocked = row[where], waits[track]
        at = np.searchsorted(blocked.start, start[mine], side="right") - 1
        until = np.where(at >= 0, blocked.end[np.maximum(at, 0)], start[mine])
        start[mine] = np.clip(until, start[mine], activity.end[mine])
    return start


def _blocked(activity: Activity, comms: CollectiveEvents) -> Iterator[tuple[int, Intervals]]:
    """Threads that were blocked in collectives, and when."""
    events = activity.profile.events
    if activity.on_host and comms.blocking.any():
        blocking = np.flatnonzero(comms.blocking)
        for track, at in parts(events.track[comms.call[blocking]]):
            waits = blocking[at]
            yield track, union(events.start[comms.call[waits]], comms.end[waits])


def row_axes(activity: Activity, comms: CollectiveEvents) -> tuple[Integers, list[str]]:
    """The axis of each communication row, as an index into a list of axes; -1 for other rows and unknown axes."""
    events = activity.profile.events
    number: dict[str, int] = {}
    of_comm = np.array([number.setdefault(d.axis, len(number)) for d in comms.descriptions] or [-1], np.int64)[
        comms.which
    ]

    of_name = np.full(max(len(events.names), 1), -1, np.int64)
    for name, one in events.labels.items():
        if one.kind == "message":
            of_name[name] = number.setdefault(AXIS_OF.get(one.words[0], one.words[0]), len(number))
    of_event = of_name[events.name]
    for event in (comms.call, comms.execution) if activity.on_host else (comms.execution,):
        of_event[event[event >= 0]] = of_comm[event >= 0]
    return np.where(activity.kind == COMMUNICATION, of_event[activity.event], -1), list(number)


def comm_times(
    comms: CollectiveEvents,
    selected: NDArray[np.bool_],
    wait: Integers,
    matched: NDArray[np.bool_],
    window: Intervals,
    computing: Intervals,
) -> dict[tuple[str, str], CommTime]:
    """The `selected` events of a rank by axis and collective, clipped to the window. `wait` and `matched` are per event."""
    number: dict[tuple[str, str], int] = {}
    pair_of = np.array([number.setdefault((d.axis, d.collective), len(number)) for d in comms.descriptions], np.int64)
    pairs = list(number)
    pair = pair_of[comms.which] if len(comms) else np.zeros(0, np.int64)
    busy_of, busy = unions(pair[selected], comms.start[selected], comms.end[selected])
    in_window = covered(window, busy.end) - covered(window, busy.start)
    overlapped = covered(computing, busy.end) - covered(computing, busy.start)
    length = comms.end - comms.start
    once, sized = selected & comms.first, comms.mask(lambda d: d.sized)

    def added(rows: NDArray[np.bool_], value: NDArray[Any] | None = None) -> NDArray[Any]:
        """The sum of a value over the rows of each pair; without a value, their number."""
        value = np.ones(len(comms), np.int64) if value is None else value
        return sums(pair[rows], value[rows], len(pairs))

    columns = (
        added(once), added(once, comms.column(lambda d: d.bytes)), added(once, comms.column(lambda d: d.payload)),
        added(once & sized), sums(busy_of, in_window, len(pairs)), sums(busy_of, in_window - overlapped, len(pairs)),
        added(selected, length), added(selected, wait), added(selected & matched), added(selected & sized, length - wait),
    )  # fmt: skip
    found = dict(zip(pairs, map(CommTime, *(column.tolist() for column in columns)), strict=True))
    some = added(selected)
    return {name: found[name] for name in sorted(pairs) if some[number[name]]}


def axis_times(
    ranks: Mapping[int, Mapping[tuple[str, str], CommTime]], comms_of: Mapping[int, CollectiveEvents]
) -> tuple[AxisTime, ...]:
    """Rows of all ranks, sorted by exposed time."""
    sizes: dict[tuple[str, str], int] = {}
    for comms in comms_of.values():
        for d in comms.descriptions:
            sizes[d.axis, d.collective] = max(sizes.get((d.axis, d.collective), 0), d.size)
    times: dict[tuple[str, str], dict[int, CommTime]] = {}
    for rank, of_rank in ranks.items():
        for pair, one in of_rank.items():
            times.setdefault(pair, {})[rank] = one
    rows = [AxisTime(*pair, of, sizes.get(pair, 0)) for pair, of in times.items()]

    def most(row: AxisTime) -> tuple[int, int, str, str]:
        each = row.ranks.values()
        return -sum(one.exposed for one in each), -sum(one.time for one in each), row.axis, row.collective

    return tuple(sorted(rows, key=most))
