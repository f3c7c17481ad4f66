"""One rank of a job: the selected part of its profile, and intermediate results that several answers need, each computed once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwise.trace.attribution import Attribution, ModuleFinder
from shardwise.trace.comms.events import CollectiveEvents, collective_events
from shardwise.trace.comms.overlap import busy_intervals
from shardwise.trace.reading.integers import Integers
from shardwise.trace.reading.profile import Profile
from shardwise.trace.spans.activity import COMPUTE, Activity, spans_of
from shardwise.trace.spans.intervals import Intervals, difference, intersect, self_time_segments
from shardwise.trace.spans.steps import Selection


@dataclass(frozen=True)
class Rank:
    """One rank, and intermediate results from its profile."""

    activity: Activity
    selection: Selection

    def over(self, selection: Selection) -> Rank:
        """The same rank over other steps, with its collective events if they are known."""
        found = replace(self, selection=selection)
        if "comms" in vars(self):
            vars(found)["comms"] = self.comms
        return found

    @property
    def profile(self) -> Profile:
        """The parsed profile."""
        return self.activity.profile

    @property
    def windows(self) -> Intervals:
        """The selected time."""
        return self.selection.windows

    @cached_property
    def comms(self) -> CollectiveEvents:
        """Its collective events."""
        return collective_events(self.activity)

    @cached_property
    def finder(self) -> ModuleFinder:
        """Attributes moments to modules."""
        return ModuleFinder(self.profile)

    @cached_property
    def steps(self) -> tuple[tuple[int, int, int], ...]:
        """Number, start and end of each step; without steps, the window as step 0."""
        if self.selection.steps:
            return tuple((step.number, step.start, step.end) for step in self.selection.steps)
        return tuple((0, int(start), int(end)) for start, end in zip(*self.windows, strict=True))

    def step_of(self, time: Integers) -> Integers:
        """The step of each time, -1 for none; where steps overlap, the last of them."""
        number, start, end = self._segments
        if not len(number):
            return np.full(len(time), -1, np.int64)
        at = np.searchsorted(start, time, side="right") - 1
        return np.where((at >= 0) & (time < end[at]), number[at], -1)

    @cached_property
    def _segments(self) -> tuple[Integers, Integers, Integers]:
        """Number, start and end of disjoint parts of the steps, by start."""
        number, start, end = np.array(self.steps, np.int64).reshape(-1, 3).T
        which, start, end = self_time_segments(np.zeros(len(number), np.int32), start, end)
        order = np.argsort(start, kind="stable")
        return number[which[order]], start[order], end[order]

    def on_host(self, event: Integers) -> NDArray[np.bool_]:
        """Mask of these host events that are in the selected steps. Without steps all are, since the window is then that of the
        device."""
        if not self.selection.steps:
            return np.ones(len(event), np.bool_)
        return self.step_of(self.profile.events.start[event]) >= 0

    @cached_property
    def rows(self) -> NDArray[np.bool_]:
        """Mask of the rows of the activity that begin in the windows."""
        return self.step_of(self.activity.start) >= 0

    @cached_property
    def computing(self) -> Intervals:
        """Compute within the windows, without time in which a thread was blocked in a collective."""
        found = busy_intervals(self.activity, self.comms, self.activity.kind == COMPUTE)
        return intersect(found, self.windows)

    @cached_property
    def idle(self) -> Intervals:
        """Idle time within the windows."""
        return difference(self.windows, self.activity.intervals())

    @cached_property
    def attribution(self) -> Attribution:
        """Module and pass of each row of the activity, at its launch."""
        events, rows, comms = self.profile.events, self.activity, self.comms
        if rows.on_host:
            # Work of a backend's thread is attributed to the call that issued it.
            remote = (comms.execution >= 0) & (events.track[comms.execution] != events.track[comms.call])
            call = np.full(len(events) + 1, -1, np.int64)
            call[comms.execution[remote]] = comms.call[remote]
            by = call[spans_of(events, call[:-1] >= 0).innermost(rows.track, rows.start)]
            track = np.where(by >= 0, events.track[by], rows.track)
            return self.finder.find(track, np.where(by >= 0, events.start[by], rows.start))
        return self.finder.find(*rows.issued)
