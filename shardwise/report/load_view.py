"""A load, measured or simulated: its figures as text, and as a page with the distribution of latencies over requests and their
course over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.report import colors, html, html_charts, words
from shardwise.report.pick import Column
from shardwise.schedules.serving.figures import SHARES, LoadFigures, RequestTimes, percentile

ROWS = (
    ("ttft_ms", "time to first token"),
    ("tpot_ms", "time per output token"),
    ("itl_ms", "between two events"),
    ("e2e_ms", "whole request"),
)
_POINTS = 200
_MILLISECONDS = Column("", "", lambda value: words.seconds(value / 1e3))
_SHARE = Column("", "share of requests", lambda value: words.percent(value))


def load_page(title: str, load: LoadFigures) -> str:
    """The page."""
    made, figures = load.made, load.as_dict()
    sections = [html.key_figures(key_figures(figures)), _table(figures)]
    if made:
        sections.append(_distribution("Time to first token", [each.ttft for each in made], load.limits.ttft))
        if times := [each.tpot for each in made if each.tpot is not None]:
            sections.append(_distribution("Time per output token", times, load.limits.tpot))
        sections.append(_over_time(made))
    return html.page(title, sections)


def key_figures(figures: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The first numbers to look at: label, value and remark."""
    failed = f"{figures['failed']:,} failed" if figures["failed"] else "none failed"
    found = [
        ("requests", words.count(figures["requests"]), f"{failed}, in {words.seconds(figures['seconds'])}"),
        ("throughput", words.rate(figures["output_tokens_per_s"], "tokens"), "of answers"),
        ("with prompts", words.rate(figures["total_tokens_per_s"], "tokens"), "of prompts and answers"),
        ("answered", words.rate(figures["requests_per_s"], "requests"), ""),
    ]
    limits = {name: value for name, value in figures["limits_ms"].items() if value is not None}
    if limits:
        kept = " and ".join(f"{name} ≤ {value:g} ms" for name, value in limits.items())
        share = words.percent(figures["goodput_share"])
        found.append(("goodput", words.rate(figures["goodput_per_s"], "requests"), f"{share} kept {kept}"))
    return found


def cells(figures: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """The table of latencies: name, mean and percentiles."""
    found = []
    for key, name in ROWS:
        if figures[key]["mean"] is None and key == "itl_ms":
            continue  # a simulated load has no events between tokens
        values = [figures[key][column] for column in ("mean", *(f"p{share}" for share in SHARES))]
        found.append((name, [words.DASH if value is None else words.seconds(value / 1e3) for value in values]))
    return found


def _table(figures: dict[str, Any]) -> html.Section:
    rows = [[html.cell(name), *(html.cell(value, "n") for value in values)] for name, values in cells(figures)]
    heads = ["", "mean", *(f"{share}%" for share in SHARES)]
    return html.Section("Times", "Of this share of requests no more.", html.table_of(heads, rows, numbers_from=1))


def _distribution(title: str, values: Sequence[float], limit: float) -> html.Section:
    ordered = sorted(values)
    line = [(percentile(ordered, 100 * at / _POINTS), at / _POINTS) for at in range(_POINTS + 1)]
    marked = limit if limit < float("inf") else None
    chart = html_charts.line_chart([(title, colors.CATEGORY["matmul"], line)], _MILLISECONDS, _SHARE, marked)
    return html.Section(title, "The share of requests that took at most so long.", f'<div class="keep">{chart}</div>')


def _over_time(made: Sequence[RequestTimes]) -> html.Section:
    """Median and 90th percentile of the time to first token, by the time slice in which requests were due."""
    end = max(each.due for each in made) or 1.0
    slices: dict[int, list[RequestTimes]] = {}
    for each in made:
        slices.setdefault(int(each.due / end * 40), []).append(each)
    lines = []
    for name, color, share in (("half", colors.CATEGORY["matmul"], 50), ("a tenth", colors.CATEGORY["tensor"], 90)):
        points = [
            (at * end / 40, percentile(sorted(each.ttft for each in found), share))
            for at, found in sorted(slices.items())
        ]
        lines.append((f"{name} of the requests waited longer", color, points))
    x = Column("", "when the request was due", words.seconds)
    chart = html_charts.line_chart(lines, x, Column("", "time to first token", _MILLISECONDS.words))
    key = html_charts.legend([(name, color) for name, color, _ in lines])
    return html.Section("Over time", "Whether the server kept up.", f'<div class="keep">{chart}{key}</div>')
