"""The page's static charts, as inline SVG. For a plan: stacked bars of memory and time, and the Pareto front. For a profile: a bar
for each rank, memory curves, and the order of a pipeline's actions. For anything: lines over two axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from shardwise.ledger import Memory
from shardwise.report import colors, pick, words

WIDE = 1024
TOP = 26
"""Space above charts with two axes."""
MOST_BARS = 64


def swatch(color: str) -> str:
    """A small coloured square."""
    return f'<svg class="swatch"><rect width="11" height="11" fill="{color}"/></svg>'


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Names with their colours, in one line."""
    keys = "".join(f"<span>{swatch(color)}{escape(name)}</span>" for name, color in entries)
    return f'<div class="legend">{keys}</div>'


def memory_chart(memory: Memory) -> str:
    """A stacked bar of owners for each pipeline rank, and a line at the capacity of a device."""
    bars, owners = pick.memory_bars(memory, MOST_BARS), pick.owners_of(memory)
    high = 24 if len(bars) <= 16 else 16 if len(bars) <= 32 else 11
    gap = high // 4
    over = bool(memory.capacity) and memory.peak > memory.capacity
    left, right, top = (150 if bars[-1].note else 56), (206 if over else 150), 22
    scale = max(memory.capacity, memory.peak) or 1.0
    across = (WIDE - left - right) / scale
    bottom = top + len(bars) * (high + gap)
    marks = round_marks(0.0, scale, 2.0**30)
    drawn = [_grid_line(left + mark * across, top - 4, bottom, words.size(mark)) for mark in marks]
    for at, bar in enumerate(bars):
        drawn.append(_memory_bar(bar, owners, left, top + at * (high + gap), high, across))
        drawn.append(
            _how_full(bar, memory.capacity, top + at * (high + gap) + high / 2 + 4.5, WIDE - (136 if over else 80))
        )
    if memory.capacity:
        x = left + memory.capacity * across
        drawn.append(f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 8}" y2="{bottom}"/>')
        drawn.append(f'<text x="{x:.1f}" y="{top - 11}" text-anchor="middle">{words.size(memory.capacity)}</text>')
    return _svg(bottom + 20, "Memory of each pipeline rank by owner", drawn)


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
            drawn.append(_rect(x, y, wide, high, colors.of_owner(owner), tip))
        x += wide
    return "".join(drawn)


def _how_full(bar: pick.MemoryBar, capacity: float, y: float, x: float) -> str:
    kind, share = "quiet", words.percent(bar.total / capacity) if capacity else ""
    if capacity and bar.total > capacity:
        kind, share = "alarm", f"over by {words.size(bar.total - capacity)}"
    total = f'<text x="{x}" y="{y:.1f}" text-anchor="end">{words.size(bar.total)}</text>'
    return f'{total}<text class="{kind}" x="{WIDE}" y="{y:.1f}" text-anchor="end">{share}</text>'


def stacked_bar(parts: Sequence[tuple[str, float, str]]) -> str:
    """One bar over the full width: name, amount and colour of each part."""
    total = sum(amount for _, amount, _ in parts) or 1.0
    drawn, x = [], 0.0
    for name, amount, color in parts:
        wide = amount / total * WIDE
        drawn.append(_rect(x, 0, wide, 34, color, f"{name}: {words.seconds(amount)}, {words.percent(amount / total)}"))
        if wide > 9 * len(name) + 8:
            ink = colors.ink_on(color)
            drawn.append(f'<text x="{x + 8:.1f}" y="22" style="fill:{ink};pointer-events:none">{escape(name)}</text>')
        x += wide
    return _svg(34, "Where the time goes", drawn)


def small_bar(share: float, color: str) -> str:
    """A bar in a table cell that fills this share of its width."""
    return f'<svg><rect width="{100 * share:.2f}%" height="13" fill="{color}"/></svg>'


def scatter_chart(
    rows: Sequence[Mapping[str, Any]],
    x: pick.Column,
    y: pick.Column,
    size: pick.Column | None,
    label: pick.Column | None,
    limit: float | None,
    numbers: Sequence[int | None] | None = None,
) -> str:
    """A point for each row; those on the Pareto front are filled and numbered, the others are rings."""
    numbers = numbers or range(1, len(rows) + 1)
    best = pick.pareto_front(rows, [column for column in (x, y, size) if column])
    xs, ys = [float(row[x.key]) for row in rows], [float(row[y.key]) for row in rows]
    high = 380
    drawn, place_x, place_y = _axes(xs, ys, x, y, limit, high)
    # The front is drawn last, so that no other point hides it.
    for place in sorted(range(len(rows)), key=lambda at: (best[at], -at)):
        row = rows[place]
        color = ramp_of(rows, size, row)
        shown = [column for column in (label, x, y, size) if column]
        lines = [f"{column.title}: {column.text(row)}" for column in shown]
        number = numbers[place]
        tip = escape("\n".join([f"number {number}" if number else "not in the ranking", *lines]))
        a, b = place_x(xs[place]), place_y(ys[place])
        look = (
            f'fill="{color}"'
            if best[place]
            else f'fill="{color}" fill-opacity="0.12" stroke="{color}" stroke-width="1.5"'
        )
        drawn.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="{7 if best[place] else 4.5}" {look} data-tip="{tip}"/>')
        if best[place] and number:
            drawn.append(f'<text x="{a + 10:.1f}" y="{b + 4:.1f}" font-size="12">{number}</text>')
    return _svg(TOP + high + 46, f"{y.title} against {x.title}", drawn)


def ramp_of(rows: Sequence[Mapping[str, Any]], size: pick.Column | None, row: Mapping[str, Any]) -> str:
    """The colour of a row by the third column: its position among the distinct values."""
    if size is None:
        return colors.ramp(0.6)
    values = sorted({each[size.key] for each in rows})
    return colors.ramp(values.index(row[size.key]) / (len(values) - 1) if len(values) > 1 else 0.5)


def rank_bars(ranks: Mapping[int, Mapping[str, float]], palette: Mapping[str, str]) -> str:
    """A stacked bar for each rank, all on one scale, from nanoseconds a step."""
    high, gap = (22, 6) if len(ranks) <= 12 else (13, 3) if len(ranks) <= 32 else (7, 2)
    left, right, top = 66, 78, 4
    longest = max((sum(parts.values()) for parts in ranks.values()), default=0) / 1e9 or 1.0
    across = (WIDE - left - right) / longest
    bottom = top + len(ranks) * (high + gap)
    drawn = [
        _grid_line(left + mark * across, top, bottom, words.seconds(mark)) for mark in round_marks(0.0, longest, 1e-3)
    ]
    free = -99.0
    for at, (rank, parts) in enumerate(ranks.items()):
        y, x, whole = top + at * (high + gap), float(left), sum(parts.values()) or 1
        if y - free >= 13:
            drawn.append(f'<text class="quiet" x="0" y="{y + high / 2 + 4.5:.1f}">rank {rank}</text>')
            total = words.seconds(sum(parts.values()) / 1e9)
            drawn.append(f'<text x="{WIDE}" y="{y + high / 2 + 4.5:.1f}" text-anchor="end">{total}</text>')
            free = y
        for name, took in parts.items():
            wide = took / 1e9 * across
            if wide > 0.05:
                tip = f"rank {rank}, {name}: {words.seconds(took / 1e9)} a step, {words.percent(took / whole)}"
                drawn.append(_rect(x, y, wide, high, palette.get(name, colors.UNKNOWN), tip))
            x += wide
    return _svg(bottom + 20, "Time of each rank by category", drawn)


def memory_lines(curves: Sequence[tuple[int, Mapping[str, Any]]]) -> tuple[str, list[tuple[str, str]]]:
    """Bytes allocated over time, a line for each rank; returns the chart and its legend."""
    left, right, top, high = 78, 12, 10, 220
    end = max((curve["times"][-1] for _, curve in curves if curve["times"]), default=0) or 1
    most = max(curve["peak"] for _, curve in curves) or 1
    unit = 2.0 ** (10 * min(4, max(0, (int(most).bit_length() - 1) // 10)))

    def place(time: float, size: float) -> tuple[float, float]:
        return left + time / end * (WIDE - left - right), top + high - size / most * high

    drawn = [
        _grid_line(place(mark * 1e9, 0)[0], top, top + high, words.seconds(mark))
        for mark in round_marks(0.0, end / 1e9, 1e-3)
    ]
    for mark in round_marks(0.0, most, unit):
        drawn.append(_level_line(left, WIDE - right, place(0, mark)[1], words.size(mark)))
    key = []
    for at, (rank, curve) in enumerate(curves):
        color = colors.ramp(at / (len(curves) - 1) if len(curves) > 1 else 1.0)
        points = " ".join(
            "{:.1f},{:.1f}".format(*place(t, b)) for t, b in zip(curve["times"], curve["allocated"], strict=True)
        )
        tip = escape(f"rank {rank}: peak {words.size(curve['peak'])}, {words.size(curve['reserved'])} reserved")
        drawn.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.6" data-tip="{tip}"/>')
        key.append((f"rank {rank}, peak {words.size(curve['peak'])}", color))
    return _svg(top + high + 22, "Memory over time", drawn), key


def _axes(
    xs: Sequence[float], ys: Sequence[float], x: pick.Column, y: pick.Column, limit: float | None, high: float
) -> tuple[list[str], Callable[[float], float], Callable[[float], float]]:
    """Both axes of a chart with grid and titles, and the functions from value to pixel; `limit` is a line across `x`."""
    left, right = 78, WIDE - 20
    place_x, marks_x = _scale([*xs, limit] if limit else xs, x.unit, left, right)
    place_y, marks_y = _scale(ys, y.unit, TOP + high, TOP)
    drawn = [_grid_line(place_x(mark), TOP, TOP + high, x.words(mark)) for mark in marks_x]
    drawn += [_level_line(left, right, place_y(mark), y.words(mark)) for mark in marks_y]
    drawn.append(f'<text class="quiet" x="0" y="12">{escape(y.title)}</text>')
    drawn.append(f'<text class="quiet" x="{right}" y="{TOP + high + 38}" text-anchor="end">{escape(x.title)}</text>')
    if limit:
        at = place_x(limit)
        drawn.append(f'<line class="limit" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{TOP + high}"/>')
    return drawn, place_x, place_y


def line_chart(
    lines: Sequence[tuple[str, str, Sequence[tuple[float, float]]]],
    x: pick.Column,
    y: pick.Column,
    limit: float | None = None,
) -> str:
    """Lines through points: name, colour and points of each, all on the same axes; `limit` is a line across `x`."""
    points = [point for _, _, line in lines for point in line]
    high = 260
    drawn, place_x, place_y = _axes([a for a, _ in points], [0.0, *(b for _, b in points)], x, y, limit, high)
    for name, color, line in lines:
        path = " ".join(f"{place_x(a):.1f},{place_y(b):.1f}" for a, b in line)
        look = f'fill="none" stroke="{color}" stroke-width="1.8"'
        drawn.append(f'<polyline points="{path}" {look} data-tip="{escape(name)}"/>')
    return _svg(TOP + high + 46, f"{y.title} against {x.title}", drawn)


def action_order(step: Mapping[str, Any]) -> str:
    """A row for each rank of a pipeline: its actions at their execution times, coloured by pass; the gaps are its bubble."""
    left, high, gap, right = 66, 24, 5, 92
    rows = list(step["ranks"].items())
    room, length = WIDE - left - right, max(1, step["window"])
    drawn = []
    for at, (rank, row) in enumerate(rows):
        y = at * (high + gap)
        drawn.append(f'<text class="quiet" x="0" y="{y + 16}">rank {rank}</text>')
        drawn.append(
            f'<rect class="idle" x="{left}" y="{y + high - 1}" width="{room}" height="1" fill="{colors.UNKNOWN}"/>'
        )
        # Actions too short to see are left out, so that a page of many microbatches stays small.
        seen = 0.0
        for action, (start, end) in zip(row["actions"], row["times"], strict=False):
            x, wide = left + start / length * room, (end - start) / length * room
            if x + wide < seen + 0.4:
                continue
            seen = x + wide
            color = colors.PASS.get(pick.pass_of_action(action), colors.UNKNOWN)
            # A hairline between neighbours, at most a fifth of an action; anything wider is a gap.
            width = max(0.4, wide - min(1, wide / 5))
            drawn.append(
                _rect(x, y, width, high, color, f"rank {rank}: {action}, {words.seconds((end - start) / 1e9)}")
            )
            text = action if wide > 34 else action[1:].partition(".")[2] if wide > 15 else ""
            if text:
                ink = colors.ink_on(color)
                style = f"fill:{ink};pointer-events:none;font-size:11px"
                drawn.append(
                    f'<text x="{x + wide / 2:.1f}" y="{y + 16}" text-anchor="middle" style="{style}">{escape(text)}</text>'
                )
        bubble = words.percent(row["bubble"] / step["window"]) if step["window"] else words.DASH
        drawn.append(f'<text x="{WIDE}" y="{y + 16}" text-anchor="end">{bubble} bubble</text>')
    return _svg(len(rows) * (high + gap), "Actions of each pipeline rank over time", drawn)


def _scale(values: Sequence[float], unit: float, start: float, end: float) -> tuple[Any, list[float]]:
    """A function from value to pixel, and the tick marks; logarithmic for a wide range of values."""
    low, high = min(values), max(values)
    if low > 0 and 6 < high / low < 1e9:  # beyond that, tick marks would be illegible
        span = math.log(high * 1.1) - math.log(low / 1.1)
        powers = range(math.floor(math.log10(low / unit)) - 1, math.ceil(math.log10(high / unit)) + 1)
        marks = [m * 10.0**p * unit for p in powers for m in (1, 2, 5)]
        inside = [mark for mark in marks if low / 1.1 <= mark <= high * 1.1]
        return lambda value: start + (math.log(value) - math.log(low / 1.1)) / span * (end - start), inside
    room = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    low, high = (0.0 if 0 <= low <= high * 0.5 else low - room), high + room
    return lambda value: start + (value - low) / (high - low) * (end - start), round_marks(low, high, unit)


def round_marks(low: float, high: float, unit: float, most: int = 6) -> list[float]:
    """Tick marks between two values: a step of 1, 2 or 5 times a power of ten of the unit, at most `most` steps."""
    raw = (high - low) / unit / most
    if not raw > 0 or not math.isfinite(raw):
        return []
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999) * unit
    return [at * step for at in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _grid_line(x: float, top: float, bottom: float, text: str) -> str:
    """A vertical grid line with its label below."""
    line = f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>'
    return f'{line}<text class="quiet" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{escape(text)}</text>'


def _level_line(left: float, right: float, y: float, text: str) -> str:
    """A horizontal grid line with its label before it."""
    line = f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return f'{line}<text class="quiet" x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(text)}</text>'


def _rect(x: float, y: float, wide: float, high: float, color: str, tip: str) -> str:
    """A coloured box with a tooltip."""
    place = f'x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{high}"'
    return f'<rect {place} fill="{color}" data-tip="{escape(tip)}"/>'


def _svg(high: float, label: str, drawn: Sequence[str]) -> str:
    """A chart as wide as the page; it scrolls if that is too narrow for its text. `label` is for screen readers."""
    head = (
        f'<div class="scroll"><svg class="chart" viewBox="0 0 {WIDE} {high}" role="img" aria-label="{escape(label)}">'
    )
    return f"{head}{''.join(drawn)}</svg></div>"
