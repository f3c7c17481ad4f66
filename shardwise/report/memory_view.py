"""A device's memory over time: key figures, owners at the peak compared with the plan, allocation sites, and the curve; on a
terminal and as sections of a page."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from shardwise.report import colors, html, html_charts, plot, words

History = Mapping[str, Any]
SHOWN = 12


def figures(history: History) -> list[tuple[str, str, str]]:
    """The key numbers: label, value and remark."""
    wasted = history["reserved"] - history["peak"]
    found = [
        ("device", f"rank {history['rank']}" if history["rank"] else f"device {history['device']}", history["path"]),
        ("peak", words.size(history["peak"]), f"in use, {words.seconds(history['peak_at'] / 1e6)} after the first event"),
        ("reserved", words.size(history["reserved"]), f"at the peak; {words.size(history['reserved_peak'])} at the most"),
        ("fragmented", words.size(max(wasted, 0)), f"{words.percent(max(history['fragmentation'], 0.0))} of the reserved, then"),
        ("history", words.seconds(history["seconds"]), f"{history['allocations']:,} allocations"),
    ]  # fmt: skip
    if history["retries"]:
        found.append(
            ("ran out", f"{history['retries']} times", "the allocator gave back what it had cached, and tried again")
        )
    return found


def owner_rows(history: History, planned: Mapping[str, float] | None) -> tuple[list[str], list[list[str]]]:
    """Owners at the peak, with the plan's values if there is a plan."""
    names = dict.fromkeys([*history["owners"], *(planned or {})])
    rows = []
    for name in names:
        here, there = history["owners"].get(name, 0), (planned or {}).get(name, 0.0)
        row = [name, words.size(here), words.percent(here / history["peak"] if history["peak"] else 0.0)]
        rows.append([*row, words.size(there), _off(there, here)] if planned is not None else row)
    if planned is not None:
        there = sum(planned.values())
        rows.append(["all", words.size(history["peak"]), "", words.size(there), _off(there, history["peak"])])
    return ["at the peak", "in use", "share", *(["plan", "off by"] if planned is not None else [])], rows


def _off(planned: float, held: float) -> str:
    return words.change(held / planned - 1) if planned else words.DASH


def place_rows(history: History) -> list[list[str]]:
    """The largest allocation sites at the peak."""
    return [[place, owner, words.size(size), f"{count:,}"] for owner, place, size, count in history["places"][:SHOWN]]


def curve(history: History) -> list[str]:
    """Memory over time as a text plot: in use by all owners together, and reserved."""
    seconds = [when / 1e6 for when in history["times"]]
    lines = list(history["curve"].values())
    total = [float(sum(values)) for values in zip(*lines, strict=True)] if lines else []
    series = [plot.Series("in use", list(zip(seconds, total, strict=True)))]
    reserved = [float(value) for value in history["reserved_curve"]]
    series.append(plot.Series("reserved", list(zip(seconds, reserved, strict=True)), colors.of_owner("workspace")))
    drawn = plot.Plot("Memory", "seconds", "bytes", series, log_x=False, words_x=words.seconds, words_y=words.size)
    return plot.letters(drawn)


def sections(history: History, planned: Mapping[str, float] | None) -> list[html.Section]:
    """The sections of a page."""
    heads, rows = owner_rows(history, planned)
    table = html.table_of(
        heads, [[html.cell(c, "n" if at else "") for at, c in enumerate(row)] for row in rows], numbers_from=1
    )
    heads = ["place", "owner", "in use", "allocations"]
    places = [[html.cell(c, "n" if at > 1 else "") for at, c in enumerate(row)] for row in place_rows(history)]
    return [
        html.key_figures(figures(history)),
        html.Section("Memory over time", "Bytes in use by owner; the line: reserved by the allocator.", areas(history, planned)),
        html.Section("At the peak", "Whose the memory is.", table),
        html.Section("The largest at the peak", "", html.table_of(heads, places, numbers_from=2, wide=True)),
    ]  # fmt: skip


WIDE, HIGH, LEFT, TOP = 900, 260, 70, 10


def areas(history: History, planned: Mapping[str, float] | None) -> str:
    """Owners stacked over time, with reserved memory as a line, and the planned peak as another."""
    times = history["times"] or (0,)
    tallest = max(max(history["reserved_curve"], default=1), history["peak"], sum((planned or {}).values()), 1) * 1.05
    span = max(times[-1], 1)

    def x(when: float) -> float:
        return LEFT + (WIDE - LEFT - 10) * when / span

    def y(size: float) -> float:
        return TOP + HIGH * (1 - size / tallest)

    drawn, below, key = [], [0.0] * len(times), []
    for owner, values in history["curve"].items():
        if not any(values):
            continue
        above = [low + value for low, value in zip(below, values, strict=True)]
        edge = [f"{x(t):.1f},{y(v):.1f}" for t, v in zip(times, above, strict=True)]
        back = [f"{x(t):.1f},{y(v):.1f}" for t, v in zip(reversed(times), reversed(below), strict=True)]
        color = colors.of_owner({"temporary": "buffers", "unknown": "workspace"}.get(owner, owner))
        drawn.append(f'<polygon points="{" ".join(edge + back)}" fill="{color}" data-tip="{escape(owner)}"/>')
        key.append((owner, color))
        below = above
    line = " ".join(f"{x(t):.1f},{y(v):.1f}" for t, v in zip(times, history["reserved_curve"], strict=True))
    drawn.append(f'<polyline points="{line}" fill="none" stroke="#6c7680" stroke-width="1.4" data-tip="reserved"/>')
    if planned is not None:
        at = y(sum(planned.values()))
        drawn.append(
            f'<line class="limit" x1="{LEFT}" x2="{WIDE - 10}" y1="{at:.1f}" y2="{at:.1f}" data-tip="planned peak"/>'
        )
    for mark in (0.0, 0.25, 0.5, 0.75, 1.0):
        size = mark * tallest / 1.05
        drawn.append(
            f'<text class="quiet" x="{LEFT - 6}" y="{y(size) + 4:.1f}" text-anchor="end">{escape(words.size(size))}</text>'
        )
    ends = f'<text class="quiet" x="{WIDE - 10}" y="{TOP + HIGH + 18}" text-anchor="end">{escape(words.seconds(span / 1e6))}</text>'
    size = f'viewBox="0 0 {WIDE} {TOP + HIGH + 24}"'
    return f'<svg {size} role="img" aria-label="Memory over time">{"".join(drawn)}{ends}</svg>' + html_charts.legend(
        key
    )
