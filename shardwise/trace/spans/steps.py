"""Selects the part of a profile to analyse, profiler steps or the whole file, and breaks its time down into compute,
communication, copy and idle.

A step's window is its `ProfilerStep#N` range on the host, for the device too: these windows follow each other without gaps, so
their sum is the time of the steps. The device runs behind the host, so a window holds the tail of the step before and lacks its
own; over a few steps this evens out. Work that crosses the edge of a window is clipped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from shardwise.trace.reading.profile import DEVICE_KINDS, Events, Profile
from shardwise.trace.spans.activity import COMMUNICATION, COMPUTE, COPY, Activity, host_work
from shardwise.trace.spans.intervals import Intervals, difference, empty, intersect, join, total, union, window

_STEP = re.compile(r"ProfilerStep#?\s*(\d{1,15})")
_WHOLE_RECORDING = re.compile(r"PyTorch Profiler \(\d+\)$")


@dataclass(frozen=True)
class Step:
    """One step of the profiler's schedule."""

    number: int
    start: int
    end: int
    complete: bool
    """Recorded from start to end, with work in it. A profiler stopped after a step has opened one more, empty step."""


@dataclass(frozen=True)
class Selection:
    """The part of one rank's profile that is analysed."""

    windows: Intervals
    steps: tuple[Step, ...] = ()
    """() if the whole file is analysed."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the selected steps."""
        return tuple(step.number for step in self.steps)


def find_steps(profile: Profile) -> tuple[Step, ...]:
    """The steps of a profile, by number. Of two with the same number the longer is used."""
    events = profile.events
    number = events.by_name(
        lambda name: int(found[1]) if (found := _STEP.fullmatch(name)) else -1,
        "annotation", "gpu_annotation", otherwise=-1,
    )[events.name]  # fmt: skip
    rows = np.flatnonzero((number >= 0) & events.of_kind("annotation"))
    if not len(rows):  # recorded without the host
        rows = np.flatnonzero((number >= 0) & events.of_kind("gpu_annotation"))
    # Of each number the longest, and of equals the first.
    rows = rows[np.lexsort((rows, -events.duration[rows], number[rows]))]
    rows = rows[np.append(np.ones(min(len(rows), 1), np.bool_), np.diff(number[rows]) != 0)]
    first, last = _recorded(events)
    work = events.start[host_work(events)]
    if not len(work):
        work = events.start[events.of_kind(*DEVICE_KINDS)]
    start, end = events.start[rows], events.end[rows]
    holds_work = np.searchsorted(work, start) < np.searchsorted(work, end)
    complete = (first <= start) & (start < end) & (end <= last) & holds_work
    columns = (number[rows].tolist(), start.tolist(), end.tolist(), complete.tolist())
    return tuple(map(Step, *columns))


def _recorded(events: Events) -> tuple[int, int]:
    """Start and end of the recording, as far as the file gives them."""
    rows = np.flatnonzero(events.named(lambda name: _WHOLE_RECORDING.match(name) is not None, "other"))
    if not len(rows):
        return -(1 << 62), 1 << 62
    return int(events.start[rows].min()), int(events.end[rows].max())


def select_steps(
    activity: Activity, first: int | None = None, last: int | None = None, all_events: bool = False
) -> Selection:
    """All complete steps; or the steps from `first` to `last`, complete or not; or the whole file, also if it has no complete step.

    If a profile has none of the requested steps, the result has no window.
    """
    steps = () if all_events else find_steps(activity.profile)
    if first is None and last is None:
        selected = tuple(step for step in steps if step.complete)
        if not selected:
            whole = window(int(activity.start.min()), int(activity.end.max())) if len(activity) else empty()
            return Selection(whole)
    else:
        low, high = first or 0, last if last is not None else 1 << 62
        selected = tuple(step for step in steps if low <= step.number <= high)
    starts = np.array([step.start for step in selected], np.int64)
    ends = np.array([step.end for step in selected], np.int64)
    return Selection(union(starts, ends), selected)


@dataclass(frozen=True)
class Breakdown:
    """Nanoseconds of one rank within its windows. Classes may overlap; busy and idle add up to the span exactly."""

    span: int
    """Length of the windows."""
    compute: int
    """While any compute kernel ran; without a device, while any thread was in an operator."""
    communication: int
    """While any collective was in flight, waiting for other ranks included."""
    copy: int
    """While memory was copied or set."""
    idle: int
    """While none of these ran."""
    exposed_communication: int
    """Communication that no compute overlapped. Copies do not count as overlap."""


def break_down(activity: Activity, windows: Intervals) -> Breakdown:
    """Where the time of the windows went."""
    compute, communication, copy = (
        intersect(activity.intervals(kind), windows) for kind in (COMPUTE, COMMUNICATION, COPY)
    )
    span = total(windows)
    return Breakdown(
        span=span,
        compute=total(compute),
        communication=total(communication),
        copy=total(copy),
        idle=span - total(join(compute, communication, copy)),
        exposed_communication=total(difference(communication, compute)),
    )
