"""The timeline of a step on the page: a row for each stream of each pipeline rank, as arrays small enough for the file.

A profile can hold millions of spans and a page cannot. Beyond a limit, spans shorter than a slice of the step are joined
with their neighbours in that slice; the joined one lasts as long as they did together, so time still adds up.
"""

from __future__ import annotations

import json
import sys
from array import array
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from shardwise.ledger import Span, Timeline
from shardwise.report import colors, pick

MOST_SPANS = 120_000
MOST_RANKS = 128


@dataclass(frozen=True)
class Row:
    """Spans of one stream of one rank that do not overlap. The first row of a rank has its label."""

    label: str
    stream: str
    spans: Sequence[Span]


def timeline_rows(timeline: Timeline, most_spans: int = MOST_SPANS) -> list[Row]:
    """The rows from top to bottom, thinned to about `most_spans`."""
    ranks = evenly(sorted({span.rank for span in timeline.spans}), MOST_RANKS)
    kept: dict[int, dict[str, list[Span]]] = {rank: {} for rank in ranks}
    for span in timeline.spans:
        if span.rank in kept and span.category != "bubble":
            kept[span.rank].setdefault(span.stream, []).append(span)
    rows = []
    for rank, streams in kept.items():
        label = f"rank {rank}"
        for stream in pick.ordered(streams, ("compute", *colors.AXIS)):
            for lane in pick.lanes(streams[stream]):
                rows.append(Row(label, stream, lane))
                label = ""
    if sum(len(row.spans) for row in rows) <= most_spans:
        return rows
    end = max(span.start + span.seconds for row in rows for span in row.spans)
    # A slice of a row leaves at most one joined span and one long one, so this many slices are sure to be few enough. Often
    # twice as many are, too.
    slices = max(1, most_spans // (2 * len(rows)))
    best = [replace(row, spans=thinned(row.spans, end / slices)) for row in rows]
    for _ in range(4):
        slices *= 2
        finer = [replace(row, spans=thinned(row.spans, end / slices)) for row in rows]
        if sum(len(row.spans) for row in finer) > most_spans:
            break
        best = finer
    return best


def evenly(ranks: Sequence[int], most: int) -> list[int]:
    """All ranks, or `most` of them evenly spaced, the first and the last included."""
    if len(ranks) <= most:
        return list(ranks)
    return [ranks[round(at * (len(ranks) - 1) / (most - 1))] for at in range(most)]


def thinned(spans: Iterable[Span], slice_seconds: float) -> list[Span]:
    """Spans of a lane, short ones that start in the same slice joined; the longest gives the joined one its name and kind."""
    result: list[Span] = []
    group: list[Span] = []
    for span in spans:
        if group and (
            span.seconds >= slice_seconds or int(span.start / slice_seconds) != int(group[0].start / slice_seconds)
        ):
            result.append(_joined(group))
            group = []
        if span.seconds >= slice_seconds:
            result.append(span)
        else:
            group.append(span)
    return [*result, _joined(group)] if group else result


def _joined(group: Sequence[Span]) -> Span:
    if len(group) == 1:
        return group[0]
    longest = max(group, key=lambda span: span.seconds)
    # The longest's name comes first, because the pass is read from it.
    name = f"{longest.name} and {len(group) - 1} more"
    total = sum(span.seconds for span in group)
    return Span(longest.rank, longest.stream, name, longest.category, group[0].start, total)


def timeline_data(timeline: Timeline, rows: Sequence[Row]) -> dict[str, Any]:
    """What page.js draws. The spans of a row are columns of binary numbers (`packed`): start relative to the span before,
    duration, both in `unit` nanoseconds, kind and name in one number and, where known, microbatch and stage."""
    kinds: dict[str, tuple[int, str]] = {}
    names: dict[str, int] = {}
    drawn_rows = []
    ranks = sum(bool(row.label) for row in rows)
    high, low, gap = (20, 7, 7) if ranks <= 20 else (13, 5, 4) if ranks <= 48 else (8, 3, 2)
    last_end = max((pick.nanoseconds(span)[1] for row in rows for span in row.spans), default=1)
    unit = max(1, -(-last_end // (2**32 - 1)))  # more than one nanosecond when the timeline is longer than four seconds
    for row in rows:
        starts, lengths, kinds_and_names, places = array("I"), array("I"), array("I"), array("h")
        last = 0
        for span in row.spans:
            start, end = (time // unit for time in pick.nanoseconds(span))
            kind = kinds.setdefault(pick.kind_of(span), (len(kinds), colors.of_span(span)))[0]
            name = names.setdefault(span.name.replace("_", " "), len(names))
            starts.append(start - last)
            lengths.append(end - start)
            kinds_and_names.append(kind << 24 | name)
            last = start
        if any(span.microbatch >= 0 or span.stage >= 0 for span in row.spans):
            places = array(
                "h", [min(span.microbatch, 32767) for span in row.spans] + [span.stage for span in row.spans]
            )
        drawn_row = {"label": row.label, "stream": row.stream, "high": high if row.stream == "compute" else low}
        drawn_rows.append(
            drawn_row | {"d": packed(starts + lengths + kinds_and_names)} | ({"m": packed(places)} if places else {})
        )
    return {
        "end": max(1, round(timeline.seconds * 1e9), last_end),
        "unit": unit,
        "gap": gap,
        "kinds": [
            [kind.replace("_", " "), color, colors.shade(color, 0.22), colors.ink_on(color)]
            for kind, (_, color) in kinds.items()
        ],
        "names": list(names),
        "rows": drawn_rows,
    }


def packed(numbers: array[int]) -> str:
    """Numbers as little-endian bytes in base64, a third of the size of their digits."""
    if sys.byteorder == "big":
        numbers = array(numbers.typecode, numbers)
        numbers.byteswap()
    return b64encode(numbers.tobytes()).decode("ascii")


def timeline_body(data: dict[str, Any], legend: str) -> str:
    """The canvas, its buttons, its legend and its data."""
    # Inside a script element only "<" could end it early.
    numbers = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    height = sum(row["high"] + 1 for row in data["rows"]) + 40
    label = escape(f"Timeline, {sum(bool(row['label']) for row in data['rows'])} ranks")
    return (
        '<div class="timeline"><div class="tools"><button value="0.5">+</button><button value="2">−</button>'
        '<button value="all">whole</button>'
        "<span>drag to move, double-click or Ctrl + wheel to zoom, point to read</span></div>"
        f'<canvas tabindex="0" role="img" aria-label="{label}" style="height:{height}px"></canvas>{legend}'
        "<noscript><p>The timeline needs JavaScript, which this page contains.</p></noscript>"
        f'<script type="application/json">{numbers}</script></div>'
    )
