"""What ran when on each rank, on one clock, for drawing and for export: the ledger's timeline, made of what was recorded.

A profile has more spans than a picture has points. Spans of one stream that are shorter than a point is wide, and begin in the same
point, are drawn as one; so what is drawn stays small and still shows every stretch of work and every gap that could be seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shardwise.ledger import Span, Timeline
from shardwise.trace.reading.events import Integers
from shardwise.trace.sending.sent import Sent
from shardwise.trace.spans.activity import Activity
from shardwise.trace.spans.classes import COMMUNICATION, COPY
from shardwise.trace.spans.intervals import Intervals
from shardwise.trace.spans.kinds import category_of
from shardwise.trace.spans.working import row_axes

SPANS = 24_000
"""Of all ranks together, about, when spans are joined."""
FEWEST, MOST = 60, 600
"""Points across one stream of one rank."""
STREAMS = 3
"""That a rank usually has."""


def timeline(
    ranks: Mapping[int, tuple[Activity, Sent, Intervals]],
    shifts: Mapping[int, int],
    joined: bool = True,
    points: int = 0,
) -> Timeline:
    """Every rank's rows in its windows; `shifts` takes its times to nanoseconds from the beginning. Not `joined`, every row is
    a span of its own, as an export wants it; `points` is how many a stream is drawn with (0: by the number of ranks)."""
    found: list[Span] = []
    length = 0
    points = points or min(max(SPANS // max(STREAMS * len(ranks), 1), FEWEST), MOST)
    for rank, (activity, sent, windows) in ranks.items():
        if not len(windows.start):
            continue
        first, last = int(windows.start[0]), int(windows.end[-1])
        grain = max((last - first) // points, 1) if joined else 0
        found += _spans(rank, activity, sent, (first, last), shifts[rank], grain)
        length = max(length, last + shifts[rank])
    return Timeline(tuple(found), length / 1e9)


def _spans(rank: int, activity: Activity, sent: Sent, window: tuple[int, int], shift: int, grain: int) -> list[Span]:
    category, stream, words = _categories(activity, sent)
    names = activity.profile.events.names
    plural = "operators" if activity.on_host else "kernels"
    rows = np.flatnonzero((activity.end > window[0]) & (activity.start < window[1]) & (activity.end > activity.start))
    start, end = np.maximum(activity.start[rows], window[0]), np.minimum(activity.end[rows], window[1])
    length = end - start
    found = []
    for lane in np.unique(stream[rows]).tolist():
        mine = np.flatnonzero(stream[rows] == lane)
        for group in _groups(start[mine], end[mine], grain, window[0]):
            these = mine[group]
            begin, finish = int(start[these[0]]) + shift, int(end[these].max()) + shift
            if len(these) == 1:
                row = int(rows[these[0]])
                name, kind = names[activity.name[row]], int(category[row])
            else:
                weight = np.bincount(category[rows[these]], length[these])
                name, kind = f"{len(these)} {plural}", int(weight.argmax())
            found.append(Span(rank, words[lane], name, words[kind], begin / 1e9, (finish - begin) / 1e9))
    return sorted(found, key=lambda span: span.start)


def _groups(start: Integers, end: Integers, grain: int, begin: int) -> Iterator[slice]:
    """Which of the rows of one stream are drawn as one: neighbours that are short and begin in the same point."""
    if not len(start):
        return
    long = (end - start) >= grain
    point = (start - begin) // max(grain, 1)
    apart = np.ones(len(start), np.bool_)
    apart[1:] = long[1:] | long[:-1] | (point[1:] != point[:-1])
    edges = np.append(np.flatnonzero(apart), len(start)).tolist()
    for low, high in pairwise(edges):
        yield slice(low, high)


def _categories(activity: Activity, sent: Sent) -> tuple[NDArray[np.int64], NDArray[np.int64], list[str]]:
    """Category and stream of each row, as numbers of words: the ledger's categories, `compute`, `copy`, and axes."""
    words = ["matmul", "attention", "memory", "compute", "copy", "communication", "other"]
    number = {word: at for at, word in enumerate(words)}
    by_name = np.array([number[category_of(name)] for name in activity.profile.events.names] or [0], np.int64)
    category = by_name[activity.name]
    stream = np.full(len(activity), number["compute"], np.int64)
    copying, communicating = activity.kind == COPY, activity.kind == COMMUNICATION
    category[copying], stream[copying] = number["memory"], number["copy"]
    category[communicating], stream[communicating] = number["other"], number["communication"]
    axis, axes = row_axes(activity, sent)
    at = np.array([number.setdefault(word, len(number)) for word in axes] or [0], np.int64)
    words = list(number)
    known = axis >= 0
    category[known] = stream[known] = at[axis[known]]
    return category, stream, words
