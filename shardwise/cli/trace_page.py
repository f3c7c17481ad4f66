"""`shardwise trace --html`: the page of an explained profile, with a close-up of one step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.ledger import Timeline, as_dict

if TYPE_CHECKING:
    from shardwise.cli.trace_against import Beside
    from shardwise.cli.trace_read import Read

SPANS = 90_000
"""Spans of the timeline of all ranks, about."""
CLOSE_UP = 60_000
"""Kernels of a close-up, about: what a page can carry."""


def write_page(read: Read, found: Beside | None, path: str, within: float) -> None:
    """One file that works offline."""
    from shardwise.report import html, html_trace
    from shardwise.trace.export import whole_timeline

    answers = read.answers
    points = min(max(SPANS // (3 * max(1, len(answers.seen))), 100), 1500)
    drawn = whole_timeline(read.profiles, read.chosen, read.classified, answers.clocks, points)
    sections = html_trace.sections(as_dict(answers), drawn, close_up(read), read.problems)
    if found is not None:
        sections.insert(2, html.comparison_table(found.differences, within / 100, found.names))
    first = Path(read.profiles[0].path)
    name = first.parent.parent.name if first.parent.name == "ranks" else first.parent.name or first.stem
    devices = sorted({device for device in answers.devices.values() if device})
    remark = f"{len(answers.seen)} of {answers.world} ranks" + (f" on {', '.join(devices)}" if devices else "")
    Path(path).write_bytes(html.page(f"Profile of {name}", sections, remark).encode())


def close_up(read: Read) -> Timeline | None:
    """Every kernel of one step: of the slowest rank, then of the fastest and of others as long as there is room."""
    from shardwise.trace.export import whole_timeline
    from shardwise.trace.spans.intervals import window
    from shardwise.trace.spans.steps import Chosen

    spans = {rank: row["span"] for rank, row in read.answers.ranks.items()}
    order = sorted(spans, key=lambda rank: (-spans[rank], rank))
    order = list(dict.fromkeys([*order[:1], *order[-1:], *order]))
    steps = read.chosen[order[0]].steps if order else ()
    if not steps:
        return None
    number = max(steps, key=lambda step: step.end - step.start).number
    chosen: dict[int, Chosen] = {}
    room = CLOSE_UP
    for rank in order:
        step = next((step for step in read.chosen[rank].steps if step.number == number), None)
        if step is None:
            continue
        busy = read.classified[rank]
        room -= int(((busy.start < step.end) & (busy.end > step.start)).sum())
        if room < 0 and chosen:
            break
        chosen[rank] = Chosen(window(step.start, step.end), (step,))
    profiles = [profile for profile in read.profiles if profile.rank in chosen]
    return whole_timeline(profiles, chosen, read.classified, read.answers.clocks)
