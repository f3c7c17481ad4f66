"""Spans of all ranks on one clock, as the ledger's timeline; and memory over time.

A profile has more spans than a picture has pixels. Short spans of one stream that begin in the same pixel are merged, so a timeline
stays small and still shows all work and every visible gap. A memory curve is downsampled to the maximum of each bin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

import numpy as np

from shardwise.ledger import Span, Timeline
from shardwise.trace.answers import Clock, MemoryCurve
from shardwise.trace.comms.overlap import row_axes
from shardwise.trace.kernel_names import CATEGORIES_BY_NAME
from shardwise.trace.rank import Rank
from shardwise.trace.reading.integers import Integers
from shardwise.trace.reading.profile import Profile
from shardwise.trace.spans.activity import COMMUNICATION, COPY
from shardwise.trace.spans.intervals import parts

SPANS = 24_000
"""Approximate number of spans of all ranks together, after merging."""
MIN_PIXELS, MAX_PIXELS = 60, 600
"""Limits of the resolution of one stream of one rank."""
STREAMS = 3
"""Typical number of streams of a rank."""
POINTS = 400
"""Maximum number of points of a memory curve."""

_DEVICE_TYPES = {0: "cpu", 1: "gpu", 12: "xpu"}


def timeline(ranks: Mapping[int, Rank], clocks: Mapping[int, Clock], points: int | None = 0) -> Timeline:
    """Every rank's rows in its windows, in seconds from the first window, on one clock. `points` is the number of pixels of a
    stream (0: by the number of ranks); with None no rows are merged, as for an export."""
    ranks = {rank: r for rank, r in ranks.items() if rank in clocks and len(r.windows.start)}
    absolute = {rank: r.profile.base + clocks[rank].offset for rank, r in ranks.items()}
    origin = min((int(r.windows.start[0]) + absolute[rank] for rank, r in ranks.items()), default=0)
    found: list[Span] = []
    length = 0
    pixels = points or min(max(SPANS // max(STREAMS * len(ranks), 1), MIN_PIXELS), MAX_PIXELS)
    for rank, r in ranks.items():
        first, last = int(r.windows.start[0]), int(r.windows.end[-1])
        pixel = max((last - first) // pixels, 1) if points is not None else 0
        found += _spans(r, (first, last), absolute[rank] - origin, pixel)
        length = max(length, last + absolute[rank] - origin)
    return Timeline(tuple(found), length / 1e9)


def _spans(rank: Rank, window: tuple[int, int], shift: int, pixel: int) -> list[Span]:
    activity, names = rank.activity, rank.profile.events.names
    category, stream, words = _categories(rank)
    plural = "operators" if activity.on_host else "kernels"
    rows = np.flatnonzero((activity.end > window[0]) & (activity.start < window[1]) & (activity.end > activity.start))
    start, end = np.maximum(activity.start[rows], window[0]), np.minimum(activity.end[rows], window[1])
    length = end - start
    found = []
    for number, mine in parts(stream[rows]):
        for group in _groups(start[mine], end[mine], pixel, window[0]):
            these = mine[group]
            begin, finish = int(start[these[0]]) + shift, int(end[these].max()) + shift
            if len(these) == 1:
                row = int(rows[these[0]])
                name, kind = names[activity.name[row]], int(category[row])
            else:
                weight = np.bincount(category[rows[these]], length[these])
                name, kind = f"{len(these)} {plural}", int(weight.argmax())
            found.append(Span(rank.profile.rank, words[number], name, words[kind], begin / 1e9, (finish - begin) / 1e9))
    return sorted(found, key=lambda span: span.start)


def _groups(start: Integers, end: Integers, pixel: int, begin: int) -> Iterator[slice]:
    """Rows of one stream that are merged: neighbours shorter than a pixel that begin in the same one."""
    if not len(start):
        return
    long = (end - start) >= pixel
    point = (start - begin) // max(pixel, 1)
    apart = np.ones(len(start), np.bool_)
    apart[1:] = long[1:] | long[:-1] | (point[1:] != point[:-1])
    edges = np.append(np.flatnonzero(apart), len(start)).tolist()
    for low, high in pairwise(edges):
        yield slice(low, high)


def _categories(rank: Rank) -> tuple[Integers, Integers, list[str]]:
    """Category and stream of each row, as indices into a list of names: the ledger's categories, `compute`, `copy`, and axes."""
    activity = rank.activity
    words = [*CATEGORIES_BY_NAME, "compute", "copy", "communication", "other"]
    number = {word: at for at, word in enumerate(words)}
    category = activity.category.copy()
    stream = np.full(len(activity), number["compute"], np.int64)
    copying, communicating = activity.kind == COPY, activity.kind == COMMUNICATION
    category[copying], stream[copying] = number["memory"], number["copy"]
    category[communicating] = stream[communicating] = number["communication"]
    axis, axes = row_axes(activity, rank.comms)
    at = np.array([number.setdefault(word, len(number)) for word in axes] or [0], np.int64)
    words = list(number)
    known = axis >= 0
    category[known] = stream[known] = at[axis[known]]
    return category, stream, words


def memory(profile: Profile, start: int, end: int) -> tuple[MemoryCurve, ...]:
    """A curve for each device with allocations in a window; times count from the window's start. If the profile has no totals,
    they are cumulative sums from the start of the profile."""
    found = profile.allocations
    curves = []
    places, which = np.unique(np.stack((found.device_type, found.device), 1), axis=0, return_inverse=True)
    for at, mine in parts(which.reshape(-1)):
        kind, device = places[at].tolist()
        added = np.cumsum(found.bytes[mine])
        known = found.allocated[mine]
        allocated = known if np.all(known >= 0) else added - min(0, int(added.min()))
        time, reserved = found.time[mine], found.reserved[mine]
        inside = (time >= start) & (time < end)
        if not inside.any():
            continue
        time, allocated, reserved = time[inside] - start, allocated[inside], reserved[inside]
        top = int(allocated.argmax())
        # The maximum of each bin, so that downsampling never hides a peak.
        bins = np.unique(np.linspace(0, len(time), min(POINTS, len(time)) + 1).astype(np.int64))[:-1]
        highest = np.maximum.reduceat(allocated, bins)
        name = f"{_DEVICE_TYPES.get(kind, f'device type {kind}')} {device}" if kind else "cpu"
        curves.append(MemoryCurve(
            name, int(allocated[top]), int(time[top]), max(int(reserved.max()), 0), tuple(time[bins].tolist()),
            tuple(highest.tolist()),
        ))  # fmt: skip
    return tuple(curves)
