"""One rank of a job, and what is worked out of its profile once and used by many answers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwise.trace.places import Finder, Places
from shardwise.trace.reading.events import Integers, Profile
from shardwise.trace.sending.messages import sent
from shardwise.trace.sending.sent import Sent
from shardwise.trace.spans.activity import Activity, activity, spans_of
from shardwise.trace.spans.classes import COMPUTE, Classified
from shardwise.trace.spans.intervals import Intervals, difference, intersect
from shardwise.trace.spans.steps import Chosen
from shardwise.trace.spans.working import working


@dataclass(frozen=True)
class Rank:
    """One rank, and what is worked out of it once."""

    profile: Profile
    chosen: Chosen
    classified: Classified

    @cached_property
    def activity(self) -> Activity:
        """What kept it busy."""
        return activity(self.profile, self.classified)

    @cached_property
    def sent(self) -> Sent:
        """Its messages."""
        return sent(self.activity)

    @cached_property
    def finder(self) -> Finder:
        """Where its work belongs."""
        return Finder(self.profile)

    @cached_property
    def steps(self) -> tuple[tuple[int, int, int], ...]:
        """Number, start and end of each step; the window as step 0 when there are none."""
        if self.chosen.steps:
            return tuple((step.number, step.start, step.end) for step in self.chosen.steps)
        return tuple((0, int(start), int(end)) for start, end in zip(*self.chosen.windows, strict=True))

    def step_of(self, time: Integers) -> Integers:
        """The step each moment lies in, -1 for none."""
        out = np.full(len(time), -1, np.int64)
        for number, start, end in self.steps:
            out[(time >= start) & (time < end)] = number
        return out

    def on_host(self, event: Integers) -> NDArray[np.bool_]:
        """Which of these events on the host are looked at: those in the steps, or all where there are none, since the window is
        then that of the device."""
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
        found = working(self.activity, self.sent, self.activity.kind == COMPUTE)
        return intersect(found, self.chosen.windows)

    @cached_property
    def idle(self) -> Intervals:
        """When it did nothing, within the windows."""
        return difference(self.chosen.windows, self.classified.intervals())

    @cached_property
    def places(self) -> Places:
        """Module and pass of each row of the activity, by its launch."""
        events, rows = self.profile.events, self.activity
        if rows.on_host:
            # What a backend's thread does belongs where it was asked for.
            carried = (self.sent.carrier >= 0) & (events.lane[self.sent.carrier] != events.lane[self.sent.call])
            call = np.full(len(events) + 1, -1, np.int64)
            call[self.sent.carrier[carried]] = self.sent.call[carried]
            asked = np.zeros(len(events), np.bool_)
            asked[self.sent.carrier[carried]] = True
            by = call[spans_of(events, asked).innermost(rows.lane, rows.start)]
            lane, time = np.where(by >= 0, events.lane[by], rows.lane), np.where(by >= 0, events.start[by], rows.start)
            return self.finder.find(lane, time)
        known = rows.launch >= 0
        lane = np.where(known, events.lane[rows.launch], -1)
        return self.finder.find(lane, np.where(known, events.start[rows.launch], 0))
