"""Which part of a profile is looked at: the profiler's steps, or the whole file.

A step's window is that of its `ProfilerStep#N` range on the host, also for what its device did: these windows follow each other
without gaps, so their sum is the time the steps took. The device runs behind the host, so a window holds the end of the
step before and lacks the end of its own; over a few steps that evens out. Work that crosses a window's edge is cut there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from shardwise.trace.reading.events import DEVICE_KINDS, Events, Profile
from shardwise.trace.spans.classes import Classified, host_work
from shardwise.trace.spans.intervals import Intervals, nothing, union, window

_STEP = re.compile(r"ProfilerStep#?\s*(\d{1,15})")
_WHOLE_RECORDING = re.compile(r"PyTorch Profiler \(\d+\)$")


@dataclass(frozen=True)
class Step:
    """One step of the profiler's schedule."""

    number: int
    start: int
    end: int
    complete: bool
    """Recorded from beginning to end, with work in it. The profiler opens a last, empty one when it is stopped after a step."""


@dataclass(frozen=True)
class Chosen:
    """What is looked at of one rank."""

    windows: Intervals
    steps: tuple[Step, ...] = ()
    """() when the whole file is."""
    left_out: tuple[Step, ...] = ()
    """Steps of the file that are not."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the steps looked at."""
        return tuple(step.number for step in self.steps)


def find_steps(profile: Profile) -> tuple[Step, ...]:
    """The steps of a profile, by number. Of two with one number the longer counts."""
    events = profile.events
    numbers = [int(found[1]) if (found := _STEP.fullmatch(name)) else -1 for name in events.names]
    number = np.array(numbers or [-1])[events.name]
    rows = np.flatnonzero((number >= 0) & events.of_kind("annotation"))
    if not len(rows):  # recorded without the host
        rows = np.flatnonzero((number >= 0) & events.of_kind("gpu_annotation"))
    longest: dict[int, int] = {}
    for row in rows.tolist():
        step = int(number[row])
        if step not in longest or events.duration[row] > events.duration[longest[step]]:
            longest[step] = row
    first, last = _recorded(events)
    work = events.start[host_work(events)]
    if not len(work):
        work = events.start[events.of_kind(*DEVICE_KINDS)]
    steps = []
    for step, row in sorted(longest.items()):
        start, end = int(events.start[row]), int(events.end[row])
        holds_work = np.searchsorted(work, start) < np.searchsorted(work, end)
        steps.append(Step(step, start, end, bool(first <= start < end <= last and holds_work)))
    return tuple(steps)


def _recorded(events: Events) -> tuple[int, int]:
    """From when to when the profiler recorded, as far as it says."""
    whole = np.array([_WHOLE_RECORDING.match(name) is not None for name in events.names], np.bool_)
    rows = np.flatnonzero(events.named(whole) & events.of_kind("other"))
    if not len(rows):
        return -(1 << 62), 1 << 62
    return int(events.start[rows].min()), int(events.end[rows].max())


def choose(
    profile: Profile,
    classified: Classified,
    first: int | None = None,
    last: int | None = None,
    all_events: bool = False,
) -> Chosen:
    """All complete steps, or those from `first` to `last`, complete or not, or the whole file; that too when it has no steps.

    Asked for steps that a profile lacks, it gives no window at all.
    """
    steps = () if all_events else find_steps(profile)
    if first is None and last is None:
        chosen = tuple(step for step in steps if step.complete)
        if not chosen:
            return Chosen(whole(classified), (), steps)
    else:
        low, high = first or 0, last if last is not None else 1 << 62
        chosen = tuple(step for step in steps if low <= step.number <= high)
    left_out = tuple(step for step in steps if step not in chosen)
    starts = np.array([step.start for step in chosen], np.int64)
    ends = np.array([step.end for step in chosen], np.int64)
    return Chosen(union(starts, ends), chosen, left_out)


def whole(classified: Classified) -> Intervals:
    """From the beginning of the first to the end of the last of what took time."""
    if not len(classified.start):
        return nothing()
    return window(int(classified.start.min()), int(classified.end.max()))
