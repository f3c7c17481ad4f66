"""How far the host is ahead of the device: from each launch call to the start of what it launched.

A host that is ahead keeps a queue of launched work and the device never waits. One that is not shows kernels that begin as soon
as they are launched, on an empty queue; then the time of a launch, and not the device, sets the pace.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardwise.trace.answers import LaunchQueue
from shardwise.trace.spans.activity import Activity
from shardwise.trace.spans.intervals import total, union
from shardwise.trace.spans.nesting import distinct


def launch_queue(activity: Activity, chosen: NDArray[np.bool_], span: int) -> LaunchQueue | None:
    """The queue of one rank; None where launches are not known (a host-only profile, or one of the device alone)."""
    rows = np.flatnonzero(chosen & (activity.launch >= 0))
    if not len(rows) or span <= 0:
        return None
    events = activity.profile.events
    call = events.start[activity.launch[rows]]
    start, end = activity.start[rows], activity.end[rows]
    # Clocks of host and device differ by a little: a kernel that seems to begin before its launch was not delayed.
    delay = np.maximum(start - call, 0)
    busy_until = np.concatenate(([np.iinfo(np.int64).min], np.maximum.accumulate(end)[:-1]))
    pace = _pace(activity, rows)
    gap = np.where(np.arange(len(rows)) > 0, start - busy_until, 0)
    change = np.repeat((1, -1), len(rows))
    # What begins as it is launched never was in the queue, so at one moment beginnings count first.
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
        short=int(((end - start) < pace).sum()),
        launch_time=pace,
        short_gaps=int(gap[(call <= busy_until) & (gap > 0) & (gap <= pace)].sum()),
    )


def _pace(activity: Activity, rows: NDArray[np.int64]) -> int:
    """Median time from one launch to the next on the thread that launches most."""
    events = activity.profile.events
    call = distinct(activity.launch[rows])
    lane = np.bincount(events.lane[call]).argmax()
    steps = np.diff(events.start[call[events.lane[call] == lane]])
    return int(np.sort(steps)[(len(steps) - 1) // 2]) if len(steps) else 0
