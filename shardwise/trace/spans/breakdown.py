"""Where a rank's time went: computing, communicating, copying, idle. Exact: busy and idle add up to the span to the nanosecond.

Each class counts the moments at which at least one of its kind was under way on any stream, so classes overlap, and communication
that computing does not cover is exposed.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.trace.spans.classes import COMMUNICATION, COMPUTE, COPY, Classified
from shardwise.trace.spans.intervals import Intervals, difference, intersect, join, total


@dataclass(frozen=True)
class Breakdown:
    """Nanoseconds of one rank within its windows."""

    span: int
    """Length of the windows."""
    compute: int
    """While a kernel computed; on a profile without a device, while a thread was in an operator of its own."""
    communication: int
    """While a collective or message was under way, waiting for others included."""
    copy: int
    """While memory was copied or set."""
    idle: int
    """While nothing of these was."""
    exposed_communication: int
    """Communication while nothing computed. Copies do not hide it."""


def break_down(classified: Classified, windows: Intervals) -> Breakdown:
    """Account for the windows."""
    compute, communication, copy = (
        intersect(classified.intervals(kind), windows) for kind in (COMPUTE, COMMUNICATION, COPY)
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
