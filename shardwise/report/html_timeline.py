"""One step on the page: every pipeline rank with a row for each stream, as arrays small enough to travel in the file.

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
    """A strip of the picture: spans of one stream of one rank that do not overlap. The first of a rank has its label."""

    label: str
    stream: str
    spans: Sequence[Span]


def timeline_rows(timeline: Timeline, most_spans: int = MOST_SPANS) -> list[Row]:
    """The strips from top to bottom, thinned to about `most_spans`."""
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
    # In a row each slice leaves at most a joined span and a long one, so this many slices are sure to be few enough;
    # twice as many often are, too.
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
    """All of them, or `most` spread evenly with the first and the last."""
    if len(ranks) <= most:
        return list(ranks)
    return [ranks[round(at * (len(ranks) - 1) / (most - 1))] for at in range(most)]


def thinned(spans: Iterable[Span], piece: float) -> list[Span]:
    """Spans of a lane with the short ones that start in one slice of the step joined; the longest gives kind and place."""
    result: list[Span] = []
    group: list[Span] = []
    for span in spans:
        if group and (span.seconds >= piece or int(span.start / piece) != int(group[0].start / piece)):
            result.append(_joined(group))
            group = []
        if span.seconds >= piece:
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
    """What the script draws. A row's spans are columns of binary numbers (`packed`): time since the start of the one before,
    time it takes, both in units of nanoseconds, and kind and name in one; where it has them, microbatches and stages."""
    kinds: dict[str, tuple[int, str]] = {}
    names: dict[str, int] = {}
    strips = []
    ranks = sum(bool(row.label) for row in rows)
    high, low, gap = (20, 7, 7) if ranks <= 20 else (13, 5, 4) if ranks <= 48 else (8, 3, 2)
    last_end = max((pick.nanoseconds(span)[1] for row in rows for span in row.spans), default=1)
    unit = max(1, -(-last_end // (2**32 - 1)))  # of a picture of over four seconds, some nanoseconds
    for row in rows:
        starts, lengths, whats, places = array("I"), array("I"), array("I"), array("h")
        last = 0
        for span in row.spans:
            start, end = (time // unit for time in pick.nanoseconds(span))
            kind = kinds.setdefault(pick.kind_of(span), (len(kinds), colors.of_span(span)))[0]
            name = names.setdefault(span.name.replace("_", " "), len(names))
            starts.append(start - last)
            lengths.append(end - start)
            whats.append(kind << 24 | name)
            last = start
        if any(span.microbatch >= 0 or span.stage >= 0 for span in row.spans):
            places = array(
                "h", [min(span.microbatch, 32767) for span in row.spans] + [span.stage for span in row.spans]
            )
        strip = {"label": row.label, "stream": row.stream, "high": high if row.stream == "compute" else low}
        strips.append(strip | {"d": packed(starts + lengths + whats)} | ({"m": packed(places)} if places else {}))
    return {
        "end": max(1, round(timeline.seconds * 1e9), last_end),
        "unit": unit,
        "gap": gap,
        "kinds": [
            [kind.replace("_", " "), color, colors.shade(color, 0.22), colors.ink_on(color)]
            for kind, (_, color) in kinds.items()
        ],
        "names": list(names),
        "rows": strips,
    }


def packed(numbers: array[int]) -> str:
    """Numbers as little-endian bytes in base64: a third of their digits."""
    if sys.byteorder == "big":
        numbers = array(numbers.typecode, numbers)
        numbers.byteswap()
    return b64encode(numbers.tobytes()).decode("ascii")


def timeline_body(data: dict[str, Any], legend: str) -> str:
    """The picture's place on the page, its tools and its numbers."""
    # Inside a script element only "<" could end it early.
    numbers = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    height = sum(row["high"] + 1 for row in data["rows"]) + 40
    said = escape(f"Timeline, {sum(bool(row['label']) for row in data['rows'])} ranks")
    return (
        '<div class="timeline"><div class="tools"><button value="0.5">+</button><button value="2">−</button>'
        '<button value="all">whole</button>'
        "<span>drag to move, double-click or Ctrl + wheel to zoom, point to read</span></div>"
        f'<canvas tabindex="0" role="img" aria-label="{said}" style="height:{height}px"></canvas>{legend}'
        "<noscript><p>The picture needs JavaScript, which this page carries within it.</p></noscript>"
        f'<script type="application/json">{numbers}</script></div>'
    )
