"""Communication beside compute: how long the collectives of each axis took, how much of that no compute overlapped, how many bytes
moved and how much of the time was waiting for another rank.

Without a device, a thread that waits for its collective is still inside an operator but does not compute. `asyncOp` of `c10d`
tells such blocking calls from overlap, and their time is taken out of compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from shardwise.labels import read_label
from shardwise.ledger import AXIS_OF
from shardwise.trace.answers import AxisTime, CommTime
from shardwise.trace.comms.events import CollectiveEvents
from shardwise.trace.reading.profile import Integers
from shardwise.trace.spans.activity import COMMUNICATION, Activity
from shardwise.trace.spans.intervals import Intervals, difference, intersect, join, nothing, total, union


def busy_intervals(activity: Activity, comms: CollectiveEvents, rows: NDArray[np.bool_]) -> Intervals:
    """When any of these rows ran, without the time in which its thread waited for a collective."""
    blocked = dict(_blocked(activity, comms))
    if not blocked:
        return union(activity.start[rows], activity.end[rows])
    found = nothing()
    for lane in np.flatnonzero(np.bincount(activity.lane[rows], minlength=1)).tolist():
        mine = rows & (activity.lane == lane)
        ran = union(activity.start[mine], activity.end[mine])
        found = join(found, difference(ran, blocked[lane]) if lane in blocked else ran)
    return found


def resumed(activity: Activity, comms: CollectiveEvents) -> Integers:
    """When each row began, or went on after its thread had waited for a collective."""
    start = activity.start.copy()
    for lane, blocked in _blocked(activity, comms):
        mine = np.flatnonzero((activity.kind != COMMUNICATION) & (activity.lane == lane))
        at = np.searchsorted(blocked.start, start[mine], side="right") - 1
        until = np.where(at >= 0, blocked.end[np.maximum(at, 0)], start[mine])
        start[mine] = np.clip(until, start[mine], activity.end[mine])
    return start


def _blocked(activity: Activity, comms: CollectiveEvents) -> Iterator[tuple[int, Intervals]]:
    """Threads that waited for collectives, and when."""
    events = activity.profile.events
    if activity.on_host and comms.blocking.any():
        lane_of_call = events.lane[comms.call]
        for lane in np.unique(lane_of_call[comms.blocking]).tolist():
            waits = comms.blocking & (lane_of_call == lane)
            yield lane, union(events.start[comms.call[waits]], comms.end[waits])


def row_axes(activity: Activity, comms: CollectiveEvents) -> tuple[Integers, list[str]]:
    """The axis of each row that communicates, as an index into a list of axes; -1 for other rows and unknown axes."""
    events = activity.profile.events
    number: dict[str, int] = {}
    of_comm = np.array([number.setdefault(d.axis, len(number)) for d in comms.descriptions] or [-1], np.int64)[
        comms.which
    ]

    def labelled(name: str) -> int:
        one = read_label(name)
        if one is None or one.kind != "message":
            return -1
        return number.setdefault(AXIS_OF.get(one.words[0], one.words[0]), len(number))

    of_event = events.by_name(labelled)[events.name]
    for event in (comms.call, comms.carrier) if activity.on_host else (comms.carrier,):
        of_event[event[event >= 0]] = of_comm[event >= 0]
    return np.where(activity.kind == COMMUNICATION, of_event[activity.event], -1), list(number)


def comm_times(
    comms: CollectiveEvents,
    chosen: NDArray[np.bool_],
    wait: Integers,
    matched: NDArray[np.bool_],
    window: Intervals,
    computing: Intervals,
) -> dict[tuple[str, str], CommTime]:
    """The `chosen` events of one rank by axis and collective, their time cut to the window. `wait` and `matched` are per event."""
    found = {}
    length = comms.end - comms.start
    size, payload = comms.column(lambda d: d.bytes), comms.column(lambda d: d.payload)
    sized = comms.mask(lambda d: d.sized)
    for pair in sorted({(d.axis, d.collective) for d in comms.descriptions}):
        mine = chosen & comms.mask(lambda d: (d.axis, d.collective) == pair)  # noqa: B023
        if not mine.any():
            continue
        once = mine & comms.first
        busy = intersect(union(comms.start[mine], comms.end[mine]), window)
        found[pair] = CommTime(
            messages=int(once.sum()),
            bytes=float(size[once].sum()),
            payload=float(payload[once].sum()),
            sized=int((once & sized).sum()),
            time=total(busy),
            exposed=total(difference(busy, computing)),
            summed=int(length[mine].sum()),
            wait=int(wait[mine].sum()),
            matched=int((mine & matched).sum()),
            timed=int((length - wait)[mine & sized].sum()),
        )
    return found


def axis_times(
    ranks: Mapping[int, Mapping[tuple[str, str], CommTime]], comms_of: Mapping[int, CollectiveEvents]
) -> tuple[AxisTime, ...]:
    """All ranks, by exposed time."""
    rows = []
    for pair in {pair for of_rank in ranks.values() for pair in of_rank}:
        sizes = [d.size for comms in comms_of.values() for d in comms.descriptions if (d.axis, d.collective) == pair]
        times = {rank: of[pair] for rank, of in ranks.items() if pair in of}
        rows.append(AxisTime(*pair, times, max(sizes, default=0)))
    return tuple(sorted(rows, key=lambda row: (-row.total.exposed, -row.total.time, row.axis, row.collective)))
