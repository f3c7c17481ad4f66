"""Memory over time, from what the allocator said when it gave out and took back: the peak, when it was, and a curve short enough
to draw, which keeps every piece's highest point.
"""

from __future__ import annotations

import numpy as np

from shardwise.trace.answers import MemoryCurve
from shardwise.trace.reading.events import Profile

POINTS = 400
"""Of a curve that is drawn."""

_TYPES = {0: "cpu", 1: "gpu", 12: "xpu"}


def memory(profile: Profile, start: int, end: int) -> tuple[MemoryCurve, ...]:
    """A curve for each device that memory was given out on in a window; times count from the window's start. Where the
    allocator does not say how much is in use, changes are added up from nothing at the beginning of the profile."""
    found = profile.allocations
    curves = []
    for kind, device in sorted(set(zip(found.device_type.tolist(), found.device.tolist(), strict=True))):
        mine = (found.device_type == kind) & (found.device == device)
        added = np.cumsum(found.bytes[mine])
        known = found.allocated[mine]
        allocated = known if np.all(known >= 0) else added - min(0, int(added.min()))
        time, reserved = found.time[mine], found.reserved[mine]
        inside = (time >= start) & (time < end)
        if not inside.any():
            continue
        time, allocated, reserved = time[inside] - start, allocated[inside], reserved[inside]
        at = int(allocated.argmax())
        # The highest point of each piece of the curve, so that thinning never hides a peak.
        pieces = np.unique(np.linspace(0, len(time), min(POINTS, len(time)) + 1).astype(np.int64))[:-1]
        highest = np.maximum.reduceat(allocated, pieces)
        name = f"{_TYPES.get(kind, f'device type {kind}')} {device}" if kind else "cpu"
        curves.append(
            MemoryCurve(
                name,
                int(allocated[at]),
                int(time[at]),
                max(int(reserved.max()), 0),
                tuple(time[pieces].tolist()),
                tuple(highest.tolist()),
            )
        )
    return tuple(curves)
