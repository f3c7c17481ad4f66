"""Why a device had nothing to run. Idle time is what is left of the window when everything that ran is taken away; each piece of
it gets one cause, so the causes add up to it exactly.

In this order: the host was fetching a batch; the host itself was in a collective, or in a message between stages; the host had
waited for the device when it ran out of work, so that nothing was queued; what came next was launched after the device had
fallen idle; it was launched before, and still began later. The end of a window, where nothing comes next, is unknown.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardwise.trace.answers import CAUSES
from shardwise.trace.critical import blocking_calls
from shardwise.trace.places import phase_of
from shardwise.trace.reading.events import Events, Integers
from shardwise.trace.sending.axes import POINT_TO_POINT, collective_of
from shardwise.trace.spans.activity import Activity, lost_launches
from shardwise.trace.spans.intervals import Intervals, difference, intersect, nothing, total, union


def idle_causes(activity: Activity, idle: Intervals) -> dict[str, int]:
    """Nanoseconds of each cause; `idle` is what is idle of the window."""
    pieces = idle_pieces(activity, idle)
    return {cause: total(pieces[cause]) for cause in CAUSES}


def idle_pieces(activity: Activity, idle: Intervals) -> dict[str, Intervals]:
    """The idle time apart by cause."""
    events = activity.profile.events
    found: dict[str, Intervals] = {}
    left = idle
    seen = {"data": _data(events), "pipeline": _host_messages(events, True), "peer": _host_messages(events, False)}
    for cause, spans in seen.items():
        found[cause] = intersect(left, spans)
        left = difference(left, spans)
    if activity.on_host:
        # The time between operators is the host's own: the interpreter, or what the profiler does not see.
        return dict.fromkeys(CAUSES, nothing()) | found | {"host": left}
    launch = _launch_of_next(activity, left[1])
    blocked = _blocked_at(events, left[0])
    start, end = left
    # Up to the launch the host was late; from the launch on the device was.
    ready = np.clip(launch, start, end)
    known = launch >= 0
    # Before the first thing recorded, and after launches of which nothing was, the device may have been busy.
    began = int(activity.start[0]) if len(activity) else 0
    untold = known & ((end <= began) | _something_lost(activity, end))
    late = (start, np.where(known, ready, start))
    found["synchronisation"] = union(late[0][blocked], late[1][blocked])
    found["host"] = union(late[0][~blocked], late[1][~blocked])
    found["device"] = union(ready[known & ~untold], end[known & ~untold])
    found["unknown"] = union(np.where(untold, ready, start)[~known | untold], end[~known | untold])
    return found


def _data(events: Events) -> Intervals:
    wanted = [phase_of(name) == "data" for name in events.names]
    rows = events.named(np.array(wanted or [False])) & events.of_kind("annotation", "cpu_op")
    return union(events.start[rows], events.end[rows])


def _host_messages(events: Events, between_stages: bool) -> Intervals:
    """When the host itself was carrying a message, with a backend of the host's (a device's are launched and let go)."""
    wanted = []
    for name in events.names:
        host = name.startswith(("gloo:", "mpi:", "c10d::barrier", "c10d::monitored_barrier"))
        kind = collective_of(name) if host else ""
        wanted.append(bool(kind) and (kind in POINT_TO_POINT) == between_stages)
    rows = events.named(np.array(wanted or [False])) & events.of_kind("annotation", "cpu_op")
    return union(events.start[rows], events.end[rows])


def _launch_of_next(activity: Activity, gap_end: Integers) -> Integers:
    """When what ends each gap was launched (the call's start); -1 where nothing comes next or its launch is not known."""
    if not len(activity) or not len(gap_end):
        return np.full(len(gap_end), -1, np.int64)
    at = np.searchsorted(activity.start, gap_end, side="left")
    following = np.minimum(at, len(activity) - 1)
    # A gap may also end where a cause of higher rank begins; then what follows it later is what it waited for.
    call = activity.launch[following]
    return np.where((at < len(activity)) & (call >= 0), activity.profile.events.start[call], -1)


def _something_lost(activity: Activity, gap_end: Integers) -> NDArray[np.bool_]:
    """Whether something was launched before what ends each gap, and after what came before it on its stream, that the
    profile does not show."""
    events = activity.profile.events
    lost = np.sort(events.start[lost_launches(activity)])
    if not len(lost) or not len(gap_end):
        return np.zeros(len(gap_end), np.bool_)
    order = np.lexsort((activity.start, activity.lane))
    before = np.full(len(activity), -1, np.int64)
    same = activity.lane[order[1:]] == activity.lane[order[:-1]]
    before[order[1:]] = np.where(same, order[:-1], -1)
    following = np.minimum(np.searchsorted(activity.start, gap_end), len(activity) - 1)
    call, previous = activity.launch[following], activity.launch[before[following]]
    until = np.searchsorted(lost, events.start[call])
    since = np.searchsorted(lost, np.where((before[following] >= 0) & (previous >= 0), events.start[previous], -1))
    return (call >= 0) & (until > since)


def _blocked_at(events: Events, moment: Integers) -> NDArray[np.bool_]:
    """Whether the host was waiting for its device at these moments."""
    rows = blocking_calls(events)
    start, end = union(events.start[rows], events.end[rows])
    if not len(start):
        return np.zeros(len(moment), np.bool_)
    at = np.searchsorted(start, moment, side="right") - 1
    return (at >= 0) & (moment <= end[np.maximum(at, 0)])
