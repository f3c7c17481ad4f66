"""What kept a rank's device busy, one row a kernel, copy or set, joined with the call that launched it. On a profile without
a device the host's threads stand in its place: rows are the pieces of operators' own time, and messages as they were carried.

This is the table that most questions are asked of; it is made once for each rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwise.trace.reading.events import Events, Integers, Profile
from shardwise.trace.spans.classes import Classified, classify
from shardwise.trace.spans.nesting import Nest, nest

_LAUNCH = re.compile(r"^(?:cuda|hip|cu)(?:Ext)?(?:Module|Graph|Launch)*Launch(?:Cooperative)?(?:Kernel\w*)?$")


@dataclass(frozen=True)
class Spans:
    """Some spans of the host's threads, to ask which of them encloses a moment."""

    event: Integers
    """Into the events."""
    nest: Nest

    def innermost(self, lane: NDArray[np.integer], time: Integers) -> Integers:
        """The event of these that is innermost at each moment, or -1."""
        found = self.nest.innermost(lane, time)
        return np.where(found >= 0, self.event[found] if len(self.event) else -1, -1)

    @cached_property
    def outer(self) -> dict[int, int]:
        """Each event to the one of these that encloses it, -1 for none."""
        parent = np.where(self.nest.parent >= 0, self.event[self.nest.parent], -1) if len(self.event) else self.event
        return dict(zip(self.event.tolist(), parent.tolist(), strict=True))


def spans_of(events: Events, wanted: NDArray[np.bool_]) -> Spans:
    """The spans that `wanted` says yes to, which stand on threads."""
    event = np.flatnonzero(wanted & (events.stream < 0))
    return Spans(event, nest(events.lane[event], events.start[event], events.end[event]))


@dataclass(frozen=True)
class Activity:
    """Rows by start. Times are those of the profile."""

    profile: Profile
    on_host: bool
    """No device in this profile: rows are pieces of operators on threads."""
    event: Integers
    start: Integers
    end: Integers
    kind: NDArray[np.int8]
    """`COMPUTE`, `COMMUNICATION` or `COPY` of the classes."""
    launch: Integers
    """Event of the runtime call that launched it, -1 when none is known; on a host-only profile always -1."""

    def __len__(self) -> int:
        return len(self.start)

    @cached_property
    def lane(self) -> NDArray[np.int32]:
        """Stream, or thread, of each row, as a lane of the events."""
        return self.profile.events.lane[self.event]

    @cached_property
    def name(self) -> NDArray[np.int32]:
        """Name of each row, into the events' names."""
        return self.profile.events.name[self.event]

    def rows_of(self, event: Integers) -> Integers:
        """A row of each event, the first where it has several; -1 where it has none."""
        if not len(self):
            return np.full(len(event), -1, np.int64)
        order = np.argsort(self.event, kind="stable")
        at = np.minimum(np.searchsorted(self.event[order], event), len(self) - 1)
        return np.where(self.event[order][at] == event, order[at], -1)


def activity(profile: Profile, classified: Classified | None = None) -> Activity:
    """The table of one rank, from its busy time where that is already known."""
    found = classified or classify(profile)
    order = np.argsort(found.start, kind="stable")
    event = found.event[order]
    launch = launches(profile.events, event) if found.on_device else np.full(len(event), -1, np.int64)
    return Activity(
        profile, not found.on_device, event, found.start[order], found.end[order], found.kind[order], launch
    )


def lost_launches(activity: Activity) -> Integers:
    """Calls that launched something of which the profile shows nothing: graphs whose kernels were not recorded, events that
    were dropped."""
    events = activity.profile.events
    launching = [_LAUNCH.search(name) is not None for name in events.names] or [False]
    calls = np.flatnonzero(events.named(np.array(launching)) & events.of_kind("runtime") & (events.correlation >= 0))
    return calls[~np.isin(calls, activity.launch)]


def launches(events: Events, event: Integers) -> Integers:
    """The runtime call that launched each of these, by the number both carry; -1 for none."""
    calls = np.flatnonzero(events.of_kind("runtime") & (events.correlation >= 0))
    if not len(calls):
        return np.full(len(event), -1, np.int64)
    order = np.argsort(events.correlation[calls], kind="stable")
    numbers = events.correlation[calls][order]
    at = np.minimum(np.searchsorted(numbers, events.correlation[event]), len(calls) - 1)
    return np.where(numbers[at] == events.correlation[event], calls[order[at]], -1)
