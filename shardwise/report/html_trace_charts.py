"""Pictures of an explained profile that stand still, as inline SVG: a bar for each rank, curves of memory, and the order of a
pipeline's actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from shardwise.report import colors, words
from shardwise.report.html_charts import WIDE, grid_line, rect, round_marks, svg
from shardwise.report.pick import pass_of_action

MOST_ACTIONS = 96


def rank_bars(ranks: Mapping[int, Mapping[str, float]], palette: Mapping[str, str], steps: int) -> str:
    """A bar for each rank on one scale of seconds of a step: its parts one after the other."""
    high, gap = (22, 6) if len(ranks) <= 12 else (13, 3) if len(ranks) <= 32 else (7, 2)
    left, right, top = 66, 78, 4
    longest = max((sum(parts.values()) for parts in ranks.values()), default=0) / steps / 1e9 or 1.0
    across = (WIDE - left - right) / longest
    bottom = top + len(ranks) * (high + gap)
    drawn = [grid_line(left + mark * across, top, bottom, words.seconds(mark)) for mark in round_marks(longest, 1e-3)]
    free = -99.0
    for at, (rank, parts) in enumerate(ranks.items()):
        y, x, whole = top + at * (high + gap), float(left), sum(parts.values()) or 1
        if y - free >= 13:
            drawn.append(f'<text class="quiet" x="0" y="{y + high / 2 + 4.5:.1f}">rank {rank}</text>')
            total = words.seconds(sum(parts.values()) / steps / 1e9)
            drawn.append(f'<text x="{WIDE}" y="{y + high / 2 + 4.5:.1f}" text-anchor="end">{total}</text>')
            free = y
        for name, took in parts.items():
            wide = took / steps / 1e9 * across
            if wide > 0.05:
                tip = f"rank {rank}, {name}: {words.seconds(took / steps / 1e9)} a step, {words.percent(took / whole)}"
                drawn.append(rect(x, y, wide, high, palette.get(name, colors.UNKNOWN), tip))
            x += wide
    return svg(bottom + 20, "Time of each rank by what it did", drawn)


def memory_lines(curves: Sequence[tuple[int, Mapping[str, Any]]]) -> tuple[str, list[tuple[str, str]]]:
    """Bytes allocated over time, a line for each rank; and the legend."""
    left, right, top, high = 78, 12, 10, 220
    end = max((curve["times"][-1] for _, curve in curves if curve["times"]), default=0) or 1
    most = max(curve["peak"] for _, curve in curves) or 1
    unit = 2.0 ** (10 * min(4, max(0, (int(most).bit_length() - 1) // 10)))

    def place(time: float, size: float) -> tuple[float, float]:
        return left + time / end * (WIDE - left - right), top + high - size / most * high

    drawn = [
        grid_line(place(mark * 1e9, 0)[0], top, top + high, words.seconds(mark))
        for mark in round_marks(end / 1e9, 1e-3)
    ]
    for mark in round_marks(most, unit):
        y = place(0, mark)[1]
        drawn.append(f'<line class="grid" x1="{left}" x2="{WIDE - right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        drawn.append(f'<text class="quiet" x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{words.size(mark)}</text>')
    key = []
    for at, (rank, curve) in enumerate(curves):
        color = colors.ramp(at / (len(curves) - 1) if len(curves) > 1 else 1.0)
        points = " ".join(
            "{:.1f},{:.1f}".format(*place(t, b)) for t, b in zip(curve["times"], curve["allocated"], strict=True)
        )
        tip = escape(f"rank {rank}: {words.size(curve['peak'])} at the most, {words.size(curve['reserved'])} reserved")
        drawn.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.6" data-tip="{tip}"/>')
        key.append((f"rank {rank}, peak {words.size(curve['peak'])}", color))
    return svg(top + high + 22, "Memory over time", drawn), key


def action_order(step: Mapping[str, Any]) -> str:
    """A row for each rank of a pipeline: its actions in the order in which it did them, coloured by pass."""
    left, high, gap, right = 66, 24, 5, 92
    rows = list(step["ranks"].items())
    most = max((len(rank["actions"]) for _, rank in rows), default=0)
    shown = min(most, MOST_ACTIONS)
    wide = (WIDE - left - right) / max(1, shown)
    drawn = []
    for at, (rank, row) in enumerate(rows):
        y = at * (high + gap)
        drawn.append(f'<text class="quiet" x="0" y="{y + 16}">rank {rank}</text>')
        for place, action in enumerate(row["actions"][:shown]):
            color = colors.PASS.get(pass_of_action(action), colors.UNKNOWN)
            x = left + place * wide
            drawn.append(rect(x, y, max(0.5, wide - 1), high, color, f"rank {rank}: {action}"))
            text = action if wide > 34 else action[1:].partition(".")[2] if wide > 15 else ""
            if text:
                ink = colors.ink_on(color)
                centre = x + wide / 2
                style = f"fill:{ink};pointer-events:none;font-size:11px"
                drawn.append(
                    f'<text x="{centre:.1f}" y="{y + 16}" text-anchor="middle" style="{style}">{escape(text)}</text>'
                )
        bubble = words.percent(row["bubble"] / step["window"]) if step["window"] else words.DASH
        drawn.append(f'<text x="{WIDE}" y="{y + 16}" text-anchor="end">{bubble} bubble</text>')
    return svg(len(rows) * (high + gap), "Actions of each pipeline rank in order", drawn)
