"""What ran when on each rank, on one clock, for drawing and for export: the ledger's timeline, made of what was recorded.

A profile has more spans than a picture has points. Spans of one stream and category that are closer to each other than a point
is wide are joined, so what is drawn stays small and still shows every stretch of work and every gap that could be seen.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shardwise.ledger import Span, Timeline
from shardwise.trace.activity import Activity
from shardwise.trace.classes import COMMUNICATION, COPY
from shardwise.trace.events import Integers
from shardwise.trace.intervals import Intervals
from shardwise.trace.kinds import category_of
from shardwise.trace.sent import Sent

SPANS = 400
"""On one stream of one rank, about, when spans are joined."""


def timeline(
    ranks: Mapping[int, tuple[Activity, Sent, Intervals]], shifts: Mapping[int, int], spans: int = SPANS
) -> Timeline:
    """Every rank's rows in its windows; `shifts` takes its times to nanoseconds from the beginning. `spans` 0 joins nothing."""
    found: list[Span] = []
    length = 0
    for rank, (activity, sent, windows) in ranks.items():
        if not len(windows.start):
            continue
        first, last = int(windows.start[0]), int(windows.end[-1])
        rows = np.flatnonzero((activity.end > first) & (activity.start < last))
        start = np.maximum(activity.start[rows], first) + shifts[rank]
        end = np.minimum(activity.end[rows], last) + shifts[rank]
        category, stream = _categories(activity, sent)
        grain = (last - first) // spans if spans else -1
        found += _joined(rank, activity, rows, start, end, category, stream, grain)
        length = max(length, last + shifts[rank])
    return Timeline(tuple(found), length / 1e9)


def _categories(activity: Activity, sent: Sent) -> tuple[list[str], list[str]]:
    """Category and stream of each row, in the ledger's words."""
    by_name = [category_of(name) for name in activity.profile.events.names]
    category = [by_name[name] for name in activity.name.tolist()]
    stream = ["compute"] * len(activity)
    for row in np.flatnonzero(activity.kind == COPY).tolist():
        category[row], stream[row] = "memory", "copy"
    for row in np.flatnonzero(activity.kind == COMMUNICATION).tolist():
        category[row], stream[row] = "other", "communication"
    for at, row in enumerate(sent.row.tolist()):
        if row >= 0:
            axis = sent.described[sent.what[at]].axis
            category[row], stream[row] = axis, axis
    return category, stream


def _joined(
    rank: int,
    activity: Activity,
    rows: Integers,
    start: Integers,
    end: Integers,
    category: list[str],
    stream: list[str],
    grain: int,
) -> list[Span]:
    names = activity.profile.events.names
    open_spans: dict[str, list] = {}
    found: list[Span] = []

    def close(one: list) -> None:
        name = names[one[3]] if one[5] == 1 else f"{one[5]} kernels" if not activity.on_host else f"{one[5]} operators"
        found.append(Span(rank, one[4], name, one[0], one[1] / 1e9, (one[2] - one[1]) / 1e9))

    for at, row in enumerate(rows.tolist()):
        lane = stream[row]
        current = open_spans.get(lane)
        begin, finish = int(start[at]), int(end[at])
        if finish <= begin:
            continue
        short = finish - begin < grain
        if current is not None and short and current[6] and current[0] == category[row] and begin - current[2] < grain:
            current[2] = max(current[2], finish)
            current[5] += 1
            continue
        if current is not None:
            close(current)
        open_spans[lane] = [category[row], begin, finish, int(activity.name[row]), lane, 1, short]
    for one in open_spans.values():
        close(one)
    return sorted(found, key=lambda span: span.start)
