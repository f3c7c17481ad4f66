"""An explained profile in a terminal: key numbers, where each rank's time went and why, what to change.

`trace_view` selects what is shown; `--json` has the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwise.report import colors, pick, terminal, trace_view, words
from shardwise.report.cells import rows_shown
from shardwise.report.trace_view import AxisRow, Explained, ModuleRow

MOST_RANKS = 16
MOST_ROWS = 10
MOST_AXES = 20


def sections(explained: Explained, problems: Sequence[str] = ()) -> Iterator[RenderableType]:
    """The report, section by section; empty ones are left out."""
    yield terminal.key_figures(trace_view.figures(explained))
    yield breakdown(explained)
    if axes := trace_view.axis_rows(explained):
        yield communication(axes)
    if causes := trace_view.idle_by_cause(explained):
        yield idle(causes)
    if step := trace_view.pipeline_of(explained):
        yield pipeline(explained, step)
    if rows := trace_view.module_rows(explained):
        yield modules(rows)
    if explained["kernels"]:
        yield kernels(explained)
    yield findings(explained)
    remarks = [*problems, *trace_view.remarks(explained)]
    if remarks:
        yield terminal.notes(remarks)


def breakdown(explained: Explained) -> RenderableType:
    """A row for each rank: its step, and the share of each activity."""
    heads = ("rank", "step", "compute", "communication", "of it exposed", "copy", "idle")
    table = terminal.plain_table(*heads, names=0)
    ranks = explained["ranks"]
    for rank in rows_shown(list(ranks), MOST_RANKS):
        if rank is None:
            table.add_row("…", *[""] * 6, style="dim")
            continue
        row = ranks[rank]
        span = max(row["span"], 1)
        shares = [row[name] / span for name in ("compute", "communication", "exposed_communication", "copy", "idle")]
        length = words.seconds(row["span"] / trace_view.steps_of(explained, [rank]) / 1e9)
        table.add_row(str(rank), length, *map(words.percent, shares))
    return Group(terminal.title("Time", "of each rank; communication may overlap with compute"), table)


def communication(rows: Sequence[AxisRow]) -> RenderableType:
    """Communication by axis and collective."""
    table = _narrow("axis", "collective", "calls", "sent", "time", "exposed", "waiting", "speed", names=2)
    shown = trace_view.most_exposed(rows, MOST_AXES)
    for axis, row in zip(pick.unrepeated(row.axis for row in shown), shown, strict=True):
        table.add_row(
            terminal.Name(terminal.named(axis, colors.of_category(axis))) if axis else "",
            terminal.Name(terminal.safe(row.collective.replace("_", " "))),
            words.count(round(row.messages)),
            words.size(row.bytes) if row.bytes else words.DASH,
            words.seconds(row.seconds),
            Text(words.seconds(row.exposed), style="bold"),
            words.percent(row.waiting),
            words.rate(row.bandwidth, "B") if row.bandwidth else words.DASH,
        )
    head = terminal.title("Communication", "per rank and step; exposed: not overlapped by compute")
    more = len(rows) - MOST_AXES
    return Group(head, table, Text(f"{more} more are in --json", style="dim")) if more > 0 else Group(head, table)


def idle(causes: Mapping[str, float]) -> RenderableType:
    """Idle time of the devices by cause."""
    parts = [f"{name} {words.seconds(took)}" for name, took in causes.items()]
    return Group(terminal.title("Idle", "per rank and step, by cause"), terminal.safe("   ".join(parts)))


def pipeline(explained: Explained, step: Mapping[str, Any]) -> RenderableType:
    """The executed schedule and the range of its bubble over pipelines and steps."""
    name, bubble = trace_view.executed(explained, step)
    return Group(terminal.title("Pipeline", "as executed"), terminal.safe(f"{name}: bubble {bubble}"))


def modules(rows: Sequence[ModuleRow]) -> RenderableType:
    """The modules that took longest."""
    table = _narrow("module", "forward", "recompute", "backward", "time", "share")
    for row in rows[:MOST_ROWS]:
        took = [row.passes.get(name, 0.0) for name in ("forward", "recompute", "backward")]
        table.add_row(
            terminal.Name(terminal.safe(row.name + (f" ×{row.layers}" if row.layers > 1 else ""))),
            *(words.seconds(value) if value else words.DASH for value in took),
            words.seconds(row.seconds),
            words.percent(row.share),
        )
    return Group(terminal.title("Modules", "device time of kernels each launched itself, per rank and step"), table)


def kernels(explained: Explained) -> RenderableType:
    """The kernels that took longest."""
    divisor = trace_view.steps_of(explained, explained["seen"])
    table = _narrow("kernel", "calls", "each", "time", "share")
    rows = explained["kernels"][:MOST_ROWS]
    for row, name in zip(rows, trace_view.short_kernels([row["name"] for row in rows], 44), strict=True):
        table.add_row(
            terminal.Name(terminal.safe(name)),
            words.count(round(row["count"] / divisor)),
            words.seconds(row["total"] / max(1, row["count"]) / 1e9),
            words.seconds(row["total"] / divisor / 1e9),
            words.percent(row["share"]),
        )
    return Group(terminal.title("Kernels", "per rank and step"), table)


def findings(explained: Explained) -> RenderableType:
    """Suggested changes, largest gain first."""
    if not explained["findings"]:
        return Group(terminal.title("What to change"), Text("the profile shows nothing worth changing", style="dim"))
    lines: list[RenderableType] = [terminal.title("What to change first")]
    for at, each in enumerate(explained["findings"], 1):
        gain = f"up to {words.seconds(each['gain'] / 1e9)} a step, {words.percent(each['share'])}"
        cost = f"{words.digits(each['gpu_hours_per_day'])} device-hours a day"
        lines.append(terminal.safe(f"{at}. {each['title']}: {gain}, {cost}", "bold"))
        below = [terminal.safe(each["advice"]), *(terminal.safe(f"- {line}", "dim") for line in each["evidence"])]
        lines += [Padding(text, (0, 0, 0, 3), expand=False) for text in below]
    return Group(*lines)


def _narrow(*heads: str, names: int = 1) -> Table:
    """A table of many columns, with less padding."""
    table = terminal.plain_table(*heads, names=names)
    table.padding = (0, 1, 0, 0)
    return table
