"""The page's pictures that stand still, as inline SVG: stacked bars of memory and time, and points nothing beats."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from shardwise.ledger import Memory
from shardwise.report import colors, pick, words

WIDE = 1024
MOST_BARS = 64


def swatch(color: str) -> str:
    """The key of a colour."""
    return f'<svg class="swatch"><rect width="11" height="11" fill="{color}"/></svg>'


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Names with their colours in a line."""
    keys = "".join(f"<span>{swatch(color)}{escape(name)}</span>" for name, color in entries)
    return f'<div class="legend">{keys}</div>'


def memory_chart(memory: Memory) -> str:
    """A bar for each pipeline rank, its owners one after the other, and a line at what a device holds."""
    bars, owners = pick.memory_bars(memory, MOST_BARS), pick.owners_of(memory)
    high = 24 if len(bars) <= 16 else 16 if len(bars) <= 32 else 11
    gap = high // 4
    over = bool(memory.capacity) and memory.peak > memory.capacity
    left, right, top = (150 if bars[-1].note else 56), (206 if over else 150), 22
    scale = max(memory.capacity, memory.peak) or 1.0
    across = (WIDE - left - right) / scale
    bottom = top + len(bars) * (high + gap)
    marks = _marks(0.0, scale, 6, 2.0**30)
    drawn = [grid_line(left + mark * across, top - 4, bottom, words.size(mark)) for mark in marks]
    for at, bar in enumerate(bars):
        drawn.append(_memory_bar(bar, owners, left, top + at * (high + gap), high, across))
        drawn.append(
            _how_full(bar, memory.capacity, top + at * (high + gap) + high / 2 + 4.5, WIDE - (136 if over else 80))
        )
    if memory.capacity:
        x = left + memory.capacity * across
        drawn.append(f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 8}" y2="{bottom}"/>')
        drawn.append(f'<text x="{x:.1f}" y="{top - 11}" text-anchor="middle">{words.size(memory.capacity)}</text>')
    return svg(bottom + 20, "Memory of each pipeline rank by owner", drawn)


def _memory_bar(bar: pick.MemoryBar, owners: Sequence[str], left: float, y: float, high: float, across: float) -> str:
    label = f"{bar.label} ({bar.note})" if bar.note else f"rank {bar.label}"
    middle = y + high / 2 + 4.5
    drawn = [f'<text class="quiet" x="0" y="{middle:.1f}">{escape(label)}</text>']
    x = left
    for owner in owners:
        held = bar.owners.get(owner, 0.0)
        wide = held * across
        if wide > 0:
            tip = f"{label}, {owner}: {words.size(held)}, {words.percent(held / bar.total)} of {words.size(bar.total)}"
            drawn.append(rect(x, y, wide, high, colors.of_owner(owner), tip))
        x += wide
    return "".join(drawn)


def _how_full(bar: pick.MemoryBar, capacity: float, y: float, x: float) -> str:
    kind, share = "quiet", words.percent(bar.total / capacity) if capacity else ""
    if capacity and bar.total > capacity:
        kind, share = "alarm", f"over by {words.size(bar.total - capacity)}"
    total = f'<text x="{x}" y="{y:.1f}" text-anchor="end">{words.size(bar.total)}</text>'
    return f'{total}<text class="{kind}" x="{WIDE}" y="{y:.1f}" text-anchor="end">{share}</text>'


def stacked_bar(parts: Sequence[tuple[str, float, str]]) -> str:
    """One bar over the whole width: name, amount and colour of each part."""
    total = sum(amount for _, amount, _ in parts) or 1.0
    drawn, x = [], 0.0
    for name, amount, color in parts:
        wide = amount / total * WIDE
        drawn.append(rect(x, 0, wide, 34, color, f"{name}: {words.seconds(amount)}, {words.percent(amount / total)}"))
        if wide > 9 * len(name) + 8:
            ink = colors.ink_on(color)
            drawn.append(f'<text x="{x + 8:.1f}" y="22" style="fill:{ink};pointer-events:none">{escape(name)}</text>')
        x += wide
    return svg(34, "Where the time goes", drawn)


def small_bar(share: float, color: str) -> str:
    """A bar in a table's cell, as long as its share of the cell."""
    return f'<svg><rect width="{100 * share:.2f}%" height="13" fill="{color}"/></svg>'


def scatter_chart(
    rows: Sequence[Mapping[str, Any]],
    x: pick.Column,
    y: pick.Column,
    size: pick.Column | None,
    label: pick.Column | None,
    limit: float | None,
) -> str:
    """A point for each row; those that nothing beats are filled and numbered, the others are rings."""
    left, right, top, high = 78, 20, 26, 380
    best = pick.front(rows, [column for column in (x, y, size) if column])
    xs, ys = [float(row[x.key]) for row in rows], [float(row[y.key]) for row in rows]
    place_x, marks_x = _scale([*xs, limit] if limit else xs, x.unit, left, WIDE - right)
    place_y, marks_y = _scale(ys, y.unit, top + high, top)
    drawn = [grid_line(place_x(mark), top, top + high, x.words(mark)) for mark in marks_x]
    for mark in marks_y:
        at = place_y(mark)
        drawn.append(f'<line class="grid" x1="{left}" x2="{WIDE - right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        drawn.append(
            f'<text class="quiet" x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{escape(y.words(mark))}</text>'
        )
    drawn.append(f'<text class="quiet" x="0" y="12">{escape(y.title)}</text>')
    drawn.append(
        f'<text class="quiet" x="{WIDE - right}" y="{top + high + 38}" text-anchor="end">{escape(x.title)}</text>'
    )
    if limit:
        at = place_x(limit)
        drawn.append(f'<line class="limit" x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{top + high}"/>')
    # Those that nothing beats are drawn last, so that none of them is hidden.
    for place in sorted(range(len(rows)), key=lambda at: (best[at], -at)):
        row = rows[place]
        color = ramp_of(rows, size, row)
        shown = [column for column in (label, x, y, size) if column]
        lines = [f"{column.title}: {column.text(row)}" for column in shown]
        tip = escape("\n".join([f"number {place + 1}", *lines]))
        a, b = place_x(xs[place]), place_y(ys[place])
        look = (
            f'fill="{color}"'
            if best[place]
            else f'fill="{color}" fill-opacity="0.12" stroke="{color}" stroke-width="1.5"'
        )
        drawn.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="{7 if best[place] else 4.5}" {look} data-tip="{tip}"/>')
        if best[place]:
            drawn.append(f'<text x="{a + 10:.1f}" y="{b + 4:.1f}" font-size="12">{place + 1}</text>')
    return svg(top + high + 46, f"{y.title} against {x.title}", drawn)


def ramp_of(rows: Sequence[Mapping[str, Any]], size: pick.Column | None, row: Mapping[str, Any]) -> str:
    """The colour of a row by the third column: its place among the values that occur."""
    if size is None:
        return colors.ramp(0.6)
    values = sorted({each[size.key] for each in rows})
    return colors.ramp(values.index(row[size.key]) / (len(values) - 1) if len(values) > 1 else 0.5)


def _scale(values: Sequence[float], unit: float, start: float, end: float) -> tuple[Any, list[float]]:
    """Where a value stands between two pixels, and where the marks are; logarithmic where values spread widely."""
    low, high = min(values), max(values)
    if low > 0 and 6 < high / low < 1e9:  # beyond that no marks could be read
        span = math.log(high * 1.1) - math.log(low / 1.1)
        powers = range(math.floor(math.log10(low / unit)) - 1, math.ceil(math.log10(high / unit)) + 1)
        marks = [m * 10.0**p * unit for p in powers for m in (1, 2, 5)]
        inside = [mark for mark in marks if low / 1.1 <= mark <= high * 1.1]
        return lambda value: start + (math.log(value) - math.log(low / 1.1)) / span * (end - start), inside
    room = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    low, high = (0.0 if 0 <= low <= high * 0.5 else low - room), high + room
    return lambda value: start + (value - low) / (high - low) * (end - start), _marks(low, high, 6, unit)


def round_marks(high: float, unit: float, most: int = 6) -> list[float]:
    """Round numbers from 0 to another, for the marks of an axis."""
    return _marks(0.0, high, most, unit)


def _marks(low: float, high: float, most: int, unit: float) -> list[float]:
    """Round numbers between two: 1, 2 or 5 times a power of ten of the unit apart, at most `most` steps."""
    raw = (high - low) / unit / most
    if not raw > 0 or not math.isfinite(raw):
        return []
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999) * unit
    return [at * step for at in range(math.ceil(low / step), math.floor(high / step) + 1)]


def grid_line(x: float, top: float, bottom: float, text: str) -> str:
    """A line across the picture with its mark below."""
    line = f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>'
    return f'{line}<text class="quiet" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{escape(text)}</text>'


def rect(x: float, y: float, wide: float, high: float, color: str, tip: str) -> str:
    """A coloured box that says what it is when pointed at."""
    place = f'x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{high}"'
    return f'<rect {place} fill="{color}" data-tip="{escape(tip)}"/>'


def svg(high: float, said: str, drawn: Sequence[str]) -> str:
    """A picture as wide as the page."""
    head = f'<svg class="chart" viewBox="0 0 {WIDE} {high}" role="img" aria-label="{escape(said)}">'
    return f"{head}{''.join(drawn)}</svg>"
