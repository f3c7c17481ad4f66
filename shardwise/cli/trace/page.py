"""The page of `shardwise trace --html`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.cli.machinery.options import write_file
from shardwise.ledger import Timeline, as_dict

if TYPE_CHECKING:
    from shardwise.cli.trace.against import Comparison
    from shardwise.cli.trace.read import Explained
    from shardwise.trace.rank import Rank

SPANS = 90_000
"""Approximate number of spans in the timeline of all ranks."""
CLOSE_UP = 60_000
"""Approximate number of kernels in a close-up, so that a page stays usable."""


def write_page(explained: Explained, comparison: Comparison | None, path: str, within: float) -> None:
    """Write the page as one file that works offline."""
    write_file(path, trace_page(explained, comparison, within).encode())


def trace_page(explained: Explained, comparison: Comparison | None, within: float) -> str:
    """The page; differences from the comparison above `within` percent are marked."""
    from shardwise.report import html, html_trace
    from shardwise.trace.timeline import timeline

    answers = explained.answers
    points = min(max(SPANS // (3 * max(1, len(answers.seen))), 100), 1500)
    drawn = timeline({r.profile.rank: r for r in explained.ranks}, answers.clocks, points)
    sections = html_trace.sections(as_dict(answers), drawn, close_up(explained), explained.problems)
    if comparison is not None:
        sections.insert(2, html.comparison_table(comparison.differences, within / 100, comparison.names))
    first = Path(explained.ranks[0].profile.path)
    name = first.parent.parent.name if first.parent.name == "ranks" else first.parent.name or first.stem
    devices = sorted({device for device in answers.devices.values() if device})
    remark = f"{len(answers.seen)} of {answers.world} ranks" + (f" on {', '.join(devices)}" if devices else "")
    return html.page(f"Profile of {name}", sections, remark)


def close_up(explained: Explained) -> Timeline | None:
    """Every kernel of one step: of the slowest rank, then the fastest, then others as far as they fit."""
    from shardwise.trace.spans.intervals import window
    from shardwise.trace.spans.steps import Selection
    from shardwise.trace.timeline import timeline

    ranks = {r.profile.rank: r for r in explained.ranks}
    spans = {rank: row["span"] for rank, row in explained.answers.ranks.items()}
    order = sorted(spans, key=lambda rank: (-spans[rank], rank))
    order = list(dict.fromkeys([*order[:1], *order[-1:], *order]))
    steps = ranks[order[0]].selection.steps if order else ()
    if not steps:
        return None
    number = max(steps, key=lambda step: step.end - step.start).number
    drawn: dict[int, Rank] = {}
    left = CLOSE_UP
    for rank in order:
        step = next((step for step in ranks[rank].selection.steps if step.number == number), None)
        if step is None:
            continue
        busy = ranks[rank].activity
        left -= int(((busy.start < step.end) & (busy.end > step.start)).sum())
        if left < 0 and drawn:
            break
        drawn[rank] = ranks[rank].over(Selection(window(step.start, step.end), (step,)))
    return timeline(dict(sorted(drawn.items())), explained.answers.clocks, None)
