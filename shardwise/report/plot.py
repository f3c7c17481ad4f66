"""Points, lines and bands over two axes, logarithmic or not: as SVG, alone or in a page, and as text plots on a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

from shardwise.report import colors, words
from shardwise.report.html_charts import round_marks

Place = tuple[float, float]
WIDE, HIGH = 720, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 16, 34, 48
_INK, _QUIET, _PAPER = "#333a42", "#6c7680", "#ffffff"


@dataclass(frozen=True)
class Series:
    """Points that belong together: joined by a line, or separate; `band` is a low and a high line with the same x."""

    name: str
    places: Sequence[Place]
    color: str = colors.CATEGORY["matmul"]
    joined: bool = True
    band: Sequence[tuple[float, float, float]] = ()
    """x, low, high."""
    tips: Sequence[str] = ()


@dataclass(frozen=True)
class Plot:
    """A chart with its axes."""

    title: str
    x: str
    y: str
    series: Sequence[Series]
    log_x: bool = True
    log_y: bool = False
    words_x: Callable[[float], str] = words.count
    words_y: Callable[[float], str] = field(default=lambda value: f"{value:.3g}")

    def bounds(self) -> tuple[float, float, float, float]:
        """Left, right, low, high, with a small margin, in drawn units: logarithms on a logarithmic axis."""
        xs = [_unit(x, self.log_x) for s in self.series for x, *_ in (*s.places, *s.band)]
        ys = [_unit(y, self.log_y) for s in self.series for _, *values in (*s.places, *s.band) for y in values]
        xs, ys = [x for x in xs if math.isfinite(x)] or [0.0], [y for y in ys if math.isfinite(y)] or [0.0]
        # Where all values are equal, 0.5 would be lost in the rounding of a large one.
        rooms = [0.04 * (max(values) - min(values)) or max(0.5, 0.04 * abs(values[0])) for values in (xs, ys)]
        return min(xs) - rooms[0], max(xs) + rooms[0], min(ys) - rooms[1], max(ys) + rooms[1]


def _unit(value: float, log: bool) -> float:
    return (math.log10(value) if value > 0 else math.nan) if log else value


def svg(plots: Sequence[Plot]) -> str:
    """A standalone SVG file with the charts below each other."""
    body = "".join(f'<g transform="translate(0 {at * HIGH})">{_drawn(plot)}</g>' for at, plot in enumerate(plots))
    size = f'width="{WIDE}" height="{HIGH * len(plots)}" viewBox="0 0 {WIDE} {HIGH * len(plots)}"'
    font = "font-family:ui-sans-serif,system-ui,sans-serif;font-size:12px"
    paper = f'<rect width="100%" height="100%" fill="{_PAPER}"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="{font}" role="img">{paper}{body}</svg>\n'


def _drawn(plot: Plot) -> str:
    left, right, low, high = plot.bounds()

    def place(x: float, y: float) -> Place | None:
        a, b = _unit(x, plot.log_x), _unit(y, plot.log_y)
        if not (math.isfinite(a) and math.isfinite(b)):
            return None
        across = _LEFT + (a - left) / (right - left) * (WIDE - _LEFT - _RIGHT)
        return across, HIGH - _BOTTOM - (b - low) / (high - low) * (HIGH - _TOP - _BOTTOM)

    drawn = [f'<text x="{_LEFT}" y="16" fill="{_INK}" font-weight="600">{escape(plot.title)}</text>']
    for mark in marks(left, right, plot.log_x):
        at = _LEFT + (_unit(mark, plot.log_x) - left) / (right - left) * (WIDE - _LEFT - _RIGHT)
        drawn.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{HIGH - _BOTTOM}" stroke="{_QUIET}" stroke-opacity="0.2"/>'
        )
        drawn.append(_text(at, HIGH - _BOTTOM + 16, plot.words_x(mark), "middle"))
    for mark in marks(low, high, plot.log_y):
        at = HIGH - _BOTTOM - (_unit(mark, plot.log_y) - low) / (high - low) * (HIGH - _TOP - _BOTTOM)
        drawn.append(
            f'<line x1="{_LEFT}" x2="{WIDE - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="{_QUIET}" stroke-opacity="0.2"/>'
        )
        drawn.append(_text(_LEFT - 6, at + 4, plot.words_y(mark), "end"))
    drawn += [_text(WIDE - _RIGHT, HIGH - 12, plot.x, "end"), _text(WIDE - _RIGHT, 16, plot.y, "end")]
    alone: dict[str, Place] = {}
    for one in plot.series:
        edges = [place(x, y) for x, y, _ in one.band] + [place(x, y) for x, _, y in reversed(one.band)]
        if one.band:
            drawn.append(f'<polygon points="{_points(edges)}" fill="{one.color}" fill-opacity="0.15"/>')
        places = [place(x, y) for x, y in one.places]
        if one.joined and one.places:
            tip = f"<title>{escape(one.name)}</title>"
            drawn.append(
                f'<polyline points="{_points(places)}" fill="none" stroke="{one.color}" stroke-width="1.7">{tip}</polyline>'
            )
        elif not one.joined:
            tips = one.tips or [one.name] * len(places)
            for point, tip in zip(places, tips, strict=True):
                if point is not None:
                    ring = f'cx="{point[0]:.1f}" cy="{point[1]:.1f}" r="3.4" fill="{one.color}" fill-opacity="0.65"'
                    drawn.append(f"<circle {ring}><title>{escape(tip)}</title></circle>")
            if len(places) == 1 and places[0] is not None:
                alone[one.name] = places[0]
    return "".join(drawn) + _names(alone)


def _names(alone: dict[str, Place]) -> str:
    """The names of single-point series: to the right of the point, or to the left if there is no room."""
    drawn = []
    for name, (x, y) in alone.items():
        crowded = any(0 < other - x < 60 and abs(beside - y) < 14 for other, beside in alone.values())
        left = crowded or x > 0.8 * WIDE
        drawn.append(_text(x + (-8 if left else 8), y + 4, name, "end" if left else "start"))
    return "".join(drawn)


def _points(places: Sequence[Place | None]) -> str:
    return " ".join(f"{at[0]:.1f},{at[1]:.1f}" for at in places if at is not None)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{_QUIET}" text-anchor="{anchor}">{escape(text)}</text>'


def marks(low: float, high: float, log: bool, most: int = 7) -> list[float]:
    """Tick values on an axis from `low` to `high`, which are logarithms on a logarithmic axis."""
    if log and high - low > 1.2:
        step = max(1, math.ceil((high - low) / most))
        return [10.0**power for power in range(math.ceil(low), math.floor(high) + 1, step)]
    if log:
        found = [m * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for m in (1, 2, 3, 5, 7)]
        return [value for value in found if low <= math.log10(value) <= high]
    return round_marks(low, high, 1.0, most)


def letters(plot: Plot, wide: int = 76, high: int = 18) -> list[str]:
    """The chart as text: lines as dots, points as the letters a, b, … of their series, whose names follow."""
    left, right, low, top = plot.bounds()
    grid = [[" "] * wide for _ in range(high)]

    def put(x: float, y: float, letter: str) -> None:
        a, b = _unit(x, plot.log_x), _unit(y, plot.log_y)
        if math.isfinite(a) and math.isfinite(b):
            column, row = round((a - left) / (right - left) * (wide - 1)), round((top - b) / (top - low) * (high - 1))
            grid[row][column] = letter

    named, points = [], 0
    for one in plot.series:
        if one.joined:
            for x, y in one.places:
                put(x, y, "·")
    for one in plot.series:
        if not one.joined:
            letter = chr(ord("a") + points % 26)
            points += 1
            named.append(f"{letter} {one.name}")
            for x, y in one.places:
                put(x, y, letter)
    ends = plot.words_y(_value(top, plot.log_y)), plot.words_y(_value(low, plot.log_y))
    width = max(map(len, ends))
    lines = [f"{plot.title} ({plot.y})"]
    for row, cells in enumerate(grid):
        label = ends[0] if row == 0 else ends[1] if row == high - 1 else ""
        lines.append(f"{label:>{width}} │{''.join(cells).rstrip()}")
    first, last = plot.words_x(_value(left, plot.log_x)), plot.words_x(_value(right, plot.log_x))
    lines.append(" " * width + " └" + "─" * wide)
    lines.append(" " * (width + 2) + first + f"{plot.x:^{max(0, wide - len(first) - len(last))}}" + last)
    return lines + ([f"{' ' * (width + 2)}{', '.join(named)}"] if named else [])


def _value(unit: float, log: bool) -> float:
    return 10.0**unit if log else unit
