"""Communication by axis and collective: time, exposed time (not overlapped by compute), bytes, and time spent waiting for other
ranks.

In a CPU-only profile a thread that waits for its collective is inside an operator but does not compute. `asyncOp` of the `c10d`
call identifies such blocking calls, and their time is subtracted from compute.
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
from shardwise.trace.spans.intervals import Intervals, difference, empty, intersect, join, total, union


def busy_intervals(activity: Activity, comms: CollectiveEvents, rows: NDArray[np.bool_]) -> Intervals:
    """When any of these rows ran, without the time in which their thread was blocked in a collective."""
    blocked = dict(_blocked(activity, comms))
    if not blocked:
        return union(activity.start[rows], activity.end[rows])
    found = empty()
    for track in np.flatnonzero(np.bincount(activity.track[rows], minlength=1)).tolist():
        mine = rows & (activity.track == track)
        ran = union(activity.start[mine], activity.end[mine])
        found = join(found, difference(ran, blocked[track]) if track in blocked else ran)
    return found


def start_after_waits(activity: Activity, comms: CollectiveEvents) -> Integers:
    """Start of each row, or the time it resumed if its thread was blocked in a collective."""
    start = activity.start.copy()
    for track, blocked in _blocked(activity, comms):
        mine = np.flatnonzero((activity.kind != COMMUNICATION) & (activity.track == track))
        at = np.searchsorted(blocked.start, start[mine], side="right") - 1
        until = np.where(at >= 0, blocked.end[np.maximum(at, 0)], start[mine])
        start[mine] = np.clip(until, start[mine], activity.end[mine])
    return start


def _blocked(activity: Activity, comms: CollectiveEvents) -> Iterator[tuple[int, Intervals]]:
    """Threads that were blocked in collectives, and when."""
    events = activity.profile.events
    if activity.on_host and comms.blocking.any():
        track_of_call = events.track[comms.call]
        for track in np.unique(track_of_call[comms.blocking]).tolist():
            waits = comms.blocking & (track_of_call == track)
            yield track, union(events.start[comms.call[waits]], comms.end[waits])


def row_axes(activity: Activity, comms: CollectiveEvents) -> tuple[Integers, list[str]]:
    """The axis of each communication row, as an index into a list of axes; -1 for other rows and unknown axes."""
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
    found = {}
    length = comms.end - comms.start
    size, payload = comms.column(lambda d: d.bytes), comms.column(lambda d: d.payload)
    sized = comms.mask(lambda d: d.sized)
    for pair in sorted({(d.axis, d.collective) for d in comms.descriptions}):
        mine = selected & comms.mask(lambda d: (d.axis, d.collective) == pair)  # noqa: B023
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
    """Rows of all ranks, sorted by exposed time."""
    rows = []
    for pair in {pair for of_rank in ranks.values() for pair in of_rank}:
        sizes = [d.size for comms in comms_of.values() for d in comms.descriptions if (d.axis, d.collective) == pair]
        times = {rank: of[pair] for rank, of in ranks.items() if pair in of}
        rows.append(AxisTime(*pair, times, max(sizes, default=0)))
    return tuple(sorted(rows, key=lambda row: (-row.total.exposed, -row.total.time, row.axis, row.collective)))
