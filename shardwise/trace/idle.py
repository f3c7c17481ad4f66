"""Idle time of a device by cause, its launch queue, and a rank's whole time in the ledger's categories.

Every idle moment gets one cause, so the causes add up exactly. In this order: the host was fetching a batch; the host was in a P2P
message or another collective; the host was blocked in a synchronisation when the device became idle, so nothing was queued; the
next kernel was launched after the device became idle; it was launched before and still started late. At the end of a window, where
no kernel follows, the cause is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from shardwise.ledger import CATEGORIES
from shardwise.run.axes import AXES
from shardwise.trace.answers import CAUSES, LaunchQueue
from shardwise.trace.attribution import phase_of
from shardwise.trace.comms.describe import POINT_TO_POINT, UNKNOWN, collective_of
from shardwise.trace.comms.events import OTHER_GROUPS, CollectiveEvents
from shardwise.trace.comms.overlap import busy_intervals
from shardwise.trace.rank import Rank
from shardwise.trace.reading.integers import Integers
from shardwise.trace.reading.profile import Events
from shardwise.trace.spans.activity import COMMUNICATION, COMPUTE, COPY, Activity, blocking_calls
from shardwise.trace.spans.intervals import Intervals, difference, distinct, empty, intersect, total, union

_CATEGORY_OF_CAUSE = {
    "host": "host", "synchronisation": "host", "data": "data", "peer": "other", "pipeline": "bubble", "device": "other",
    "unknown": "other",
}  # fmt: skip
"""The ledger has no category for kernels that were launched in time and started late."""


GROUPS = 6
"""Process groups of no known axis that are a category each."""
UNNAMED_GROUP = "unnamed group"
"""Category of communication whose process group the profile does not name."""


def idle_causes(rank: Rank) -> dict[str, int]:
    """Nanoseconds of idle time by cause."""
    by_cause = _idle_by_cause(rank.activity, rank.idle)
    return {cause: total(by_cause[cause]) for cause in CAUSES}


def _idle_by_cause(activity: Activity, idle: Intervals) -> dict[str, Intervals]:
    """Idle intervals by cause."""
    events = activity.profile.events
    found: dict[str, Intervals] = {}
    left = idle
    for cause, spans in (
        ("data", _intervals(events, events.named(lambda name: phase_of(name) == "data", "annotation", "cpu_op"))),
        ("pipeline", _host_comms(events, point_to_point=True)),
        ("peer", _host_comms(events, point_to_point=False)),
    ):
        found[cause] = intersect(left, spans)
        left = difference(left, spans)
    if activity.on_host:
        # Time between operators is host time: the interpreter, or what the profiler does not record.
        return dict.fromkeys(CAUSES, empty()) | found | {"host": left}
    start, end = left
    launch = _launch_of_next(activity, end)
    blocked = _blocked_at(events, start)
    # Until the launch the host was late; after it the device was.
    known = launch >= 0
    ready = np.where(known, np.clip(launch, start, end), start)
    # Before the first recorded kernel, and after launches whose kernels are missing, the device may have been busy.
    began = int(activity.start[0]) if len(activity) else 0
    unknown = ~known | (end <= began) | _after_lost_launch(activity, end)
    found["synchronisation"] = union(start[blocked], ready[blocked])
    found["host"] = union(start[~blocked], ready[~blocked])
    found["device"] = union(ready[~unknown], end[~unknown])
    found["unknown"] = union(ready[unknown], end[unknown])
    return found


def _intervals(events: Events, rows: NDArray[np.bool_] | Integers) -> Intervals:
    return union(events.start[rows], events.end[rows])


def _host_comms(events: Events, point_to_point: bool) -> Intervals:
    """When the host itself executed a collective, which a device does asynchronously."""

    def wanted(name: str) -> bool:
        host = name.startswith(("gloo:", "mpi:", "c10d::barrier", "c10d::monitored_barrier"))
        kind = collective_of(name) if host else ""
        return bool(kind) and (kind in POINT_TO_POINT) == point_to_point

    return _intervals(events, events.named(wanted, "annotation", "cpu_op"))


def _launch_of_next(activity: Activity, gap_end: Integers) -> Integers:
    """Launch time (start of the call) of the kernel after each gap; -1 if none follows or its launch is unknown."""
    if not len(activity) or not len(gap_end):
        return np.full(len(gap_end), -1, np.int64)
    # A gap may also end where a cause of higher priority begins; then it waited for the next kernel after that.
    at = np.searchsorted(activity.start, gap_end, side="left")
    call = activity.launch[np.minimum(at, len(activity) - 1)]
    return np.where((at < len(activity)) & (call >= 0), activity.profile.events.start[call], -1)


def _after_lost_launch(activity: Activity, gap_end: Integers) -> NDArray[np.bool_]:
    """Whether a launch whose kernels are missing lies between the launch of the kernel after each gap and that of the kernel before
    it on its stream."""
    events = activity.profile.events
    lost = np.sort(events.start[activity.lost_launches])
    if not len(lost) or not len(gap_end):
        return np.zeros(len(gap_end), np.bool_)
    following = np.minimum(np.searchsorted(activity.start, gap_end), len(activity) - 1)
    before = activity.before[following]
    call, previous = activity.launch[following], activity.launch[before]
    until = np.searchsorted(lost, events.start[call])
    since = np.searchsorted(lost, np.where((before >= 0) & (previous >= 0), events.start[previous], -1))
    return (call >= 0) & (until > since)


def _blocked_at(events: Events, moment: Integers) -> NDArray[np.bool_]:
    """Whether the host was blocked in a synchronisation at these moments."""
    start, end = _intervals(events, blocking_calls(events))
    if not len(start):
        return np.zeros(len(moment), np.bool_)
    at = np.searchsorted(start, moment, side="right") - 1
    return (at >= 0) & (moment <= end[np.maximum(at, 0)])


def launch_queue(rank: Rank) -> LaunchQueue | None:
    """How far the host is ahead: a host that is ahead keeps launched kernels queued, so the device never waits. None if launches
    are unknown (a CPU-only profile, or one of the device alone)."""
    activity, span = rank.activity, total(rank.windows)
    rows = np.flatnonzero(rank.rows & (activity.launch >= 0))
    if not len(rows) or span <= 0:
        return None
    call = activity.profile.events.start[activity.launch[rows]]
    start, end = activity.start[rows], activity.end[rows]
    # Clocks of host and device differ slightly: a kernel that seems to start before its launch was not delayed.
    delay = np.maximum(start - call, 0)
    busy_until = np.concatenate(([np.iinfo(np.int64).min], np.maximum.accumulate(end)[:-1]))
    interval = _launch_interval(activity, rows)
    gap = np.where(np.arange(len(rows)) > 0, start - busy_until, 0)
    change = np.repeat((1, -1), len(rows))
    # A kernel that starts as it is launched was never queued, so at equal times starts count first.
    depth = np.cumsum(change[np.lexsort((change, np.concatenate((call, np.maximum(start, call)))))])
    covered = total(union(np.minimum(call, start), end))
    reach = int(end.max() - min(int(call.min()), int(start.min())))
    return LaunchQueue(
        launches=len(rows),
        median_delay=int(np.sort(delay)[(len(delay) - 1) // 2]),
        longest_delay=int(delay.max()),
        late=int((call > busy_until).sum()),
        mean_depth=float(delay.sum() / span),
        deepest=int(depth.max()),
        empty=max(reach - covered, 0),
        short=int(((end - start) < interval).sum()),
        launch_time=interval,
        short_gaps=int(gap[(call <= busy_until) & (gap > 0) & (gap <= interval)].sum()),
    )


def _launch_interval(activity: Activity, rows: Integers) -> int:
    """Median time between launches on the thread with most launches."""
    events = activity.profile.events
    call = distinct(activity.launch[rows])
    track = np.bincount(events.track[call]).argmax()
    steps = np.diff(events.start[call[events.track[call] == track]])
    return int(np.sort(steps)[(len(steps) - 1) // 2]) if len(steps) else 0


def categories(rank: Rank) -> dict[str, int]:
    """Nanoseconds in each of the ledger's categories within the windows, and in those of process groups that belong to no axis of
    the ledger. Every moment has exactly one category, so they add up to the span. Priority: compute, exposed communication by
    axis, copies, idle time by cause."""
    found = dict.fromkeys(CATEGORIES, 0)
    left = rank.windows
    for category, moments in _categories_in_order(rank):
        found[category] = found.get(category, 0) + total(intersect(left, moments))
        left = difference(left, moments)
    for cause, moments in _idle_by_cause(rank.activity, left).items():
        found[_CATEGORY_OF_CAUSE[cause]] += total(moments)
    return found


def _categories_in_order(rank: Rank) -> Iterator[tuple[str, Intervals]]:
    activity, comms, attribution = rank.activity, rank.comms, rank.attribution
    kind = activity.category
    optimizer = np.array([name == "(phase optimizer)" for name in attribution.names])[attribution.owner]
    computing = activity.kind == COMPUTE
    for category, rows in (
        ("matmul", computing & (kind == 0) & ~optimizer),
        ("attention", computing & (kind == 1) & ~optimizer),
        ("optimizer", computing & optimizer),
        ("memory", computing & (kind == 2) & ~optimizer),
    ):
        yield category, busy_intervals(activity, comms, rows)
    number: dict[str, int] = {axis: at for at, axis in enumerate((*AXES, UNKNOWN))}
    at = np.array([number.setdefault(d.axis, len(number)) for d in comms.descriptions] or [0], np.int64)[comms.which]
    receives = comms.mask(lambda d: d.axis == "pipeline" and d.collective in ("recv", "send_recv"))
    for axis in AXES:
        mine = at == number[axis]
        # A receive lasts from when it is posted: nearly all of it is waiting for the previous stage.
        waits = mine & receives
        yield axis, union(comms.start[mine & ~waits], comms.end[mine & ~waits])
        yield "bubble", union(comms.start[waits], comms.end[waits])
    for name, mine in _own_groups(comms, number, at):
        yield name, union(comms.start[mine], comms.end[mine])
    yield "memory", activity.intervals(COPY)
    yield UNNAMED_GROUP, activity.intervals(COMMUNICATION)
    yield "other", activity.intervals()


def _own_groups(
    comms: CollectiveEvents, number: dict[str, int], at: Integers
) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """Communication of no axis of the ledger: the groups that took longest by their names, then the others together, and that of
    groups without a name. `at` is the axis of each event, by `number`."""
    took = np.bincount(at, comms.end - comms.start, minlength=len(number))
    own = sorted(set(number) - {*AXES, UNKNOWN}, key=lambda axis: (-took[number[axis]], axis))
    named = [axis for axis in own if axis != OTHER_GROUPS][:GROUPS]
    for axis in named:
        yield f"group {axis}" if axis in CATEGORIES else axis, at == number[axis]
    yield OTHER_GROUPS, np.isin(at, [number[axis] for axis in own if axis not in named])
    yield UNNAMED_GROUP, at == number[UNKNOWN]
