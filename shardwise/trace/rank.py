"""One rank of a job: the part of its profile that is looked at, and what many answers need of it, each worked out once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwise.trace.attribution import Attribution, ModuleFinder
from shardwise.trace.comms.events import CollectiveEvents, collective_events
from shardwise.trace.comms.overlap import busy_intervals
from shardwise.trace.reading.profile import Integers, Profile
from shardwise.trace.spans.activity import COMPUTE, Activity, spans_of
from shardwise.trace.spans.intervals import Intervals, difference, intersect
from shardwise.trace.spans.steps import Chosen


@dataclass(frozen=True)
class Rank:
    """One rank, and what is worked out of its profile."""

    activity: Activity
    chosen: Chosen

    @property
    def profile(self) -> Profile:
        """What was read of it."""
        return self.activity.profile

    @property
    def windows(self) -> Intervals:
        """The time that is looked at."""
        return self.chosen.windows

    @cached_property
    def comms(self) -> CollectiveEvents:
        """Its collective events."""
        return collective_events(self.activity)

    @cached_property
    def finder(self) -> ModuleFinder:
        """Finds the module of a moment."""
        return ModuleFinder(self.profile)

    @cached_property
    def steps(self) -> tuple[tuple[int, int, int], ...]:
        """Number, start and end of each step; the window as step 0 when there are no steps."""
        if self.chosen.steps:
            return tuple((step.number, step.start, step.end) for step in self.chosen.steps)
        return tuple((0, int(start), int(end)) for start, end in zip(*self.windows, strict=True))

    def step_of(self, time: Integers) -> Integers:
        """The step of each moment, -1 for none."""
        out = np.full(len(time), -1, np.int64)
        for number, start, end in self.steps:
            out[(time >= start) & (time < end)] = number
        return out

    def on_host(self, event: Integers) -> NDArray[np.bool_]:
        """Which of these events on the host are looked at: those in the steps. Without steps all are, since the window is then
        that of the device."""
        if not self.chosen.steps:
            return np.ones(len(event), np.bool_)
        return self.step_of(self.profile.events.start[event]) >= 0

    @cached_property
    def rows(self) -> NDArray[np.bool_]:
        """Rows of the activity that begin in the windows."""
        return self.step_of(self.activity.start) >= 0

    @cached_property
    def computing(self) -> Intervals:
        """When it computed, within the windows; a thread that waits for a collective does not."""
        found = busy_intervals(self.activity, self.comms, self.activity.kind == COMPUTE)
        return intersect(found, self.windows)

    @cached_property
    def idle(self) -> Intervals:
        """When it did nothing, within the windows."""
        return difference(self.windows, self.activity.intervals())

    @cached_property
    def attribution(self) -> Attribution:
        """Module and pass of each row of the activity, by its launch."""
        events, rows, comms = self.profile.events, self.activity, self.comms
        if rows.on_host:
            # What a thread of the backend does belongs where it was asked for.
            carried = (comms.carrier >= 0) & (events.lane[comms.carrier] != events.lane[comms.call])
            call = np.full(len(events) + 1, -1, np.int64)
            call[comms.carrier[carried]] = comms.call[carried]
            by = call[spans_of(events, call[:-1] >= 0).innermost(rows.lane, rows.start)]
            lane, time = np.where(by >= 0, events.lane[by], rows.lane), np.where(by >= 0, events.start[by], rows.start)
            return self.finder.find(lane, time)
        known = rows.launch >= 0
        lane = np.where(known, events.lane[rows.launch], -1)
        return self.finder.find(lane, np.where(known, events.start[rows.launch], 0))
