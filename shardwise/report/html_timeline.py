"""The timeline of a step on the page: a row for each stream of each pipeline rank, as compact arrays.

A profile can hold millions of spans, a page cannot. Beyond a limit, spans shorter than a time slice are merged with their
neighbours in that slice; the merged span lasts as long as their sum, so total time is preserved.
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
from shardwise.run.problems import counted

MOST_SPANS = 120_000
MOST_RANKS = 128
MOST_KINDS = 255
"""Kinds with a colour and a name of their own; all others are "more". A kind has one byte."""


@dataclass(frozen=True)
class Row:
    """Non-overlapping spans of one stream of one rank. The first row of a rank has its label."""

    label: str
    stream: str
    spans: Sequence[Span]


def timeline_rows(timeline: Timeline, most_spans: int = MOST_SPANS) -> list[Row]:
    """The rows from top to bottom, merged to about `most_spans` spans."""
    ranks = evenly(sorted({span.rank for span in timeline.spans}), MOST_RANKS)
    by_rank: dict[int, dict[str, list[Span]]] = {rank: {} for rank in ranks}
    for span in timeline.spans:
        if span.rank in by_rank and span.category != "bubble":
            by_rank[span.rank].setdefault(span.stream, []).append(span)
    rows = []
    for rank, streams in by_rank.items():
        label = f"rank {rank}"
        for stream in pick.ordered(streams, ("compute", *colors.AXIS)):
            for spans in pick.non_overlapping(streams[stream]):
                rows.append(Row(label, stream, spans))
                label = ""
    if sum(len(row.spans) for row in rows) <= most_spans:
        return rows
    end = max(span.start + span.seconds for row in rows for span in row.spans)
    # A slice of a row yields at most one merged and one long span, so this many slices stay below the limit. Finer
    # slices often do too.
    slices = max(1, most_spans // (2 * len(rows)))
    best = [replace(row, spans=merged(row.spans, end / slices)) for row in rows]
    for _ in range(4):
        slices *= 2
        finer = [replace(row, spans=merged(row.spans, end / slices)) for row in rows]
        if sum(len(row.spans) for row in finer) > most_spans:
            break
        best = finer
    return best


def evenly(ranks: Sequence[int], most: int) -> list[int]:
    """All ranks, or `most` of them evenly spaced, the first and the last included."""
    if len(ranks) <= most:
        return list(ranks)
    return [ranks[round(at * (len(ranks) - 1) / (most - 1))] for at in range(most)]


def merged(spans: Iterable[Span], slice_seconds: float) -> list[Span]:
    """Spans of a row, with short ones that start in the same slice merged; a merged span has name and kind of the longest."""
    result: list[Span] = []
    group: list[Span] = []
    for span in spans:
        if group and (
            span.seconds >= slice_seconds or int(span.start / slice_seconds) != int(group[0].start / slice_seconds)
        ):
            result.append(_merge(group))
            group = []
        if span.seconds >= slice_seconds:
            result.append(span)
        else:
            group.append(span)
    return [*result, _merge(group)] if group else result


def _merge(group: Sequence[Span]) -> Span:
    if len(group) == 1:
        return group[0]
    longest = max(group, key=lambda span: span.seconds)
    # The name begins with the longest's, because the pass is parsed from it.
    name = f"{longest.name} and {len(group) - 1} more"
    total = sum(span.seconds for span in group)
    return Span(longest.rank, longest.stream, name, longest.category, group[0].start, total)


def timeline_data(timeline: Timeline, rows: Sequence[Row]) -> dict[str, Any]:
    """Input of page.js. The spans of a row are binary columns (`packed`): start relative to the previous span and duration, both in
    `unit` nanoseconds; kind and name in one integer; microbatch and stage if known."""
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
            called, color = pick.kind_of(span), colors.of_span(span)
            if called not in kinds and len(kinds) >= MOST_KINDS:
                called, color = "more", colors.UNKNOWN
            kind = kinds.setdefault(called, (len(kinds), color))[0]
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
    """Integers as little-endian bytes in base64, a third of the size of their digits."""
    if sys.byteorder == "big":
        numbers = array(numbers.typecode, numbers)
        numbers.byteswap()
    return b64encode(numbers.tobytes()).decode("ascii")


def timeline_body(data: dict[str, Any], legend: str) -> str:
    """The canvas, its buttons, its legend and its data."""
    # "<" could end the script element.
    numbers = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    height = sum(row["high"] + 1 for row in data["rows"]) + 40
    label = escape(f"Timeline, {counted(sum(bool(row['label']) for row in data['rows']), 'rank')}")
    return (
        '<div class="timeline"><div class="tools"><button value="0.5">+</button><button value="2">−</button>'
        '<button value="all">all</button>'
        "<span>drag to move, double-click or Ctrl + wheel to zoom, point to read</span></div>"
        f'<canvas tabindex="0" role="img" aria-label="{label}" style="height:{height}px"></canvas>{legend}'
        "<noscript><p>The timeline needs JavaScript, which this page contains.</p></noscript>"
        f'<script type="application/json">{numbers}</script></div>'
    )
