"""The ledger as one self-contained HTML file that opens offline and prints. The functions mirror those of `terminal`; each returns
a section, and `page` assembles sections.

Every text is escaped where it enters the page.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any
from zlib import crc32

from shardwise.ledger import Account, Difference, Memory, Timeline, Traffic
from shardwise.report import colors, html_charts, html_timeline, pick, words


@dataclass(frozen=True)
class Section:
    """A heading, a sentence below it, and the body as HTML."""

    title: str
    remark: str
    body: str


def page(title: str, sections: Iterable[Section], remark: str = "") -> str:
    """The complete file."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>\n{_inlined('page.css')}</style></head><body>"
        f'<header><h1>{escape(title)}</h1><p class="remark">{escape(remark)}</p></header>\n'
        + "\n".join(_section(section) for section in sections)
        + f'\n<div id="tip"></div><script>\n{_inlined("page.js")}</script></body></html>\n'
    )


@dataclass(frozen=True)
class Quantity:
    """A number shown on a page, with its path and value in `plan --json`, for programs that read the page."""

    path: str
    value: Any

    @property
    def attributes(self) -> str:
        """The HTML attributes of an element that shows it."""
        return f' data-quantity="{escape(self.path)}" data-value="{escape(json.dumps(self.value))}"'


def key_figures(figures: Iterable[tuple[str, str, str]], quantities: Mapping[str, Quantity] | None = None) -> Section:
    """The key numbers: label, value and remark. `quantities` maps a label to its number."""
    known = quantities or {}
    cells = "".join(
        f"<div><dt>{escape(label)}</dt><dd{known[label].attributes if label in known else ''}>{escape(value)}</dd>"
        f'<dd class="note">{escape(note)}</dd></div>'
        for label, value, note in figures
    )
    return Section("", "", f'<dl class="figures">{cells}</dl>')


def memory_bars(memory: Memory) -> Section:
    """Peak memory of each pipeline rank by owner against a device's capacity, then the numbers."""
    if not memory.ranks:
        return Section("Memory", "Not known.", "")
    bars, owners = pick.memory_bars(memory), pick.owners_of(memory)
    rows = [[cell(owner, color=colors.of_owner(owner)), *(_held(bar, owner) for bar in bars)] for owner in owners]
    total = [cell("all"), *(cell(words.gib(bar.total), "n") for bar in bars)]
    heads = ["GiB", *(f"{b.label} ({b.note})" if b.note else f"rank {b.label}" for b in bars)]
    table = table_of(heads, rows, total, numbers_from=1)
    remark = "Peak of each pipeline rank by owner"
    remark += (
        f"; the dashed line is the capacity of a device, {words.size(memory.capacity)}." if memory.capacity else "."
    )
    key = html_charts.legend([(owner, colors.of_owner(owner)) for owner in owners])
    return Section("Memory", remark, f'<div class="keep">{html_charts.memory_chart(memory)}{key}</div>{table}')


def breakdown_bar(account: Account) -> Section:
    """Where the step's time goes, longest first."""
    parts = pick.breakdown(account)
    if not parts:
        return Section("Time", "Not known.", "")
    longest, total = parts[0][1], account.step_seconds or sum(taken for _, taken in parts)
    rows = []
    for name, taken in parts:
        color = colors.of_category(name)
        known = Quantity(f"breakdown.{name}", taken) if name in account.breakdown else None
        numbers = [cell(words.seconds(taken), "n", quantity=known), cell(words.percent(taken / total), "n quiet")]
        bar = f'<td class="bar">{html_charts.small_bar(taken / longest, color)}</td>'
        rows.append([cell(name, color=color), *numbers, bar])
    bar = html_charts.stacked_bar([(name, taken, colors.of_category(name)) for name, taken in parts])
    table = table_of(["", "time", "share", ""], rows, numbers_from=1, wide=True)
    return Section(
        "Time", f"Of {words.seconds(total)} a step, on the slowest rank.", f'<div class="keep">{bar}</div>{table}'
    )


def traffic_table(traffic: Traffic) -> Section:
    """Wire bytes and messages of one rank in a step, by axis and collective."""
    found, total = pick.traffic_rows(traffic), traffic.total
    if not found:
        return Section("Traffic", "None.", "")
    most, rows = max(row.bytes for row in found) or 1.0, []
    for axis, row in zip(pick.unrepeated(row.axis for row in found), found, strict=True):
        color = colors.of_category(row.axis)
        rows.append([
            cell(axis, color=axis and color),
            cell(row.collective.replace("_", " ")),
            cell(words.size(row.bytes), "n", quantity=Quantity(f"traffic.{row.axis}.{row.collective}", row.bytes)),
            cell(words.percent(row.bytes / total if total else 0.0), "n quiet"),
            cell(words.count(row.messages) if row.messages else words.DASH, "n"),
            cell(words.size(row.bytes / row.messages) if row.messages else words.DASH, "n quiet"),
            f'<td class="bar" style="width:32%">{html_charts.small_bar(row.bytes / most, color)}</td>',
        ])  # fmt: skip
    messages = sum(row.messages for row in found)
    sums = ["all", "", words.size(total), "", words.count(messages) if messages else words.DASH, "", ""]
    heads = ["axis", "collective", "sent", "share", "messages", "each", ""]
    total_row = [cell(text, "n" if at > 1 else "") for at, text in enumerate(sums)]
    return Section(
        "Traffic", "What one rank sends in a step.", table_of(heads, rows, total_row, numbers_from=2, wide=True)
    )


STEP = "Compute of each pipeline rank by pass, numbered by microbatch; the thin rows are communication by axis."


def timeline(timeline: Timeline, title: str = "One step", remark: str = STEP) -> Section:
    """Streams of each rank; can be zoomed."""
    if not timeline.spans:
        return Section(title, "Not known.", "")
    rows = html_timeline.timeline_rows(timeline)
    data = html_timeline.timeline_data(timeline, rows)
    ranks, shown = len({span.rank for span in timeline.spans}), sum(bool(row.label) for row in rows)
    if timeline.left_out:
        remark = remark.removesuffix(".") + pick.left_out(timeline) + "."
    if shown < ranks:
        remark += f" {shown} of {ranks} ranks are shown, evenly spaced."
    if (
        sum(len(row.spans) for row in rows) < sum(span.category != "bubble" for span in timeline.spans)
        and shown == ranks
    ):
        remark += " Adjacent spans too short to see are merged."
    kinds = {kind[0]: kind[1] for kind in data["kinds"]}
    known = [name.replace("_", " ") for name in (*colors.PASS, *colors.CATEGORY)]
    key = html_charts.legend([(kind, kinds[kind]) for kind in pick.ordered(kinds, known)])
    return Section(title, remark, html_timeline.timeline_body(data, key))


def ranking_table(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[pick.Column], title: str = "Candidates"
) -> Section:
    """Candidates, best first, numbered; a click on a column sorts by it."""
    numeric = [all(isinstance(row.get(column.key), int | float | None) for row in rows) for column in columns]
    heads = "".join(
        f'<th{_class("n" if number else "")}><button type="button">{escape(name)}</button></th>'
        for name, number in [("#", True), *((c.title, n) for c, n in zip(columns, numeric, strict=True))]
    )
    lines = []
    for place, row in enumerate(rows, 1):
        cells = [f'<td class="n quiet" data-v="{place}">{place}</td>']
        for column, number in zip(columns, numeric, strict=True):
            value = row.get(column.key)
            raw = escape("" if value is None else str(value))
            cells.append(f'<td{_class("n" if number else "")} data-v="{raw}">{escape(column.text(row))}</td>')
        lines.append(f"<tr{_class('first' if place == 1 else '')}>{''.join(cells)}</tr>")
    head = f'<table class="wide sortable"><thead><tr>{heads}</tr></thead>'
    body = f'<div class="scroll">{head}<tbody>{"".join(lines)}</tbody></table></div>'
    return Section(title, "Best first; click a column's name to sort by it.", body)


def scatter(
    rows: Sequence[Mapping[str, Any]],
    x: pick.Column,
    y: pick.Column,
    size: pick.Column | None = None,
    label: pick.Column | None = None,
    limit: float | None = None,
    title: str = "Pareto front",
    numbers: Sequence[int | None] | None = None,
) -> Section:
    """Candidates as points; those on the Pareto front of the columns are filled. `size` is a third column, shown by colour, and
    `limit` a line across `x`. `numbers` are the rows' numbers in a ranking, None for a row that is not in it; by default 1, 2, 3,
    ..."""
    if not rows:
        return Section(title, "No candidates.", "")
    sides = " and ".join(column.title for column in (x, y, size) if column and column.better)
    remark = f"Filled points are on the Pareto front of {sides}, rings are dominated. Point at one to read its layout."
    key = ""
    if size:
        values = {row[size.key]: row for row in sorted(rows, key=lambda row: row[size.key])}
        chosen = html_timeline.evenly(range(len(values)), 6)
        shown = [(size.words(value), row) for at, (value, row) in enumerate(values.items()) if at in chosen]
        key = html_charts.legend([(f"{t} {size.title}", html_charts.ramp_of(rows, size, row)) for t, row in shown])
    return Section(
        title,
        remark,
        f'<div class="keep">{html_charts.scatter_chart(rows, x, y, size, label, limit, numbers)}{key}</div>',
    )


def comparison_table(
    differences: Sequence[Difference],
    tolerance: float | Mapping[str, float],
    names: tuple[str, str] = ("plan", "run"),
) -> Section:
    """Two accounts side by side; differences beyond the tolerance are marked, and the others can be hidden."""
    remark = pick.agreement(differences, tolerance)
    if not differences:
        return Section("Comparison", remark, "")
    rows, classes = [], []
    for account, each in zip(pick.unrepeated(each.account for each in differences), differences, strict=True):
        apart = pick.beyond(each, tolerance)
        rows.append([
            cell(account, "quiet"),
            cell(each.name.replace("_", " ")),
            cell(words.quantity(each.account, each.name, each.first), "n"),
            cell(words.quantity(each.account, each.name, each.second), "n"),
            cell(words.change(each.relative) + (" !" if apart else ""), "n change"),
        ])  # fmt: skip
        classes.append("beyond" if apart else "")
    table = table_of(["account", "quantity", *names, "difference"], rows, numbers_from=2, classes=classes)
    name = f"only-{crc32(table.encode())}"  # a page may hold several comparisons
    box = f'<input type="checkbox" class="only" id="{name}"><label for="{name}"> only those that differ</label>'
    return Section("Comparison", remark, (box if any(classes) else "") + table)


def notes(sentences: Iterable[str]) -> Section:
    """Remarks, one below the other."""
    return Section("Notes", "", f'<ul class="notes">{"".join(f"<li>{escape(each)}</li>" for each in sentences)}</ul>')


def _inlined(name: str) -> str:
    return files("shardwise.report").joinpath(name).read_text("utf-8")


def _section(section: Section) -> str:
    title = f"<h2>{escape(section.title)}</h2>" if section.title else ""
    remark = f'<p class="remark">{escape(section.remark)}</p>' if section.remark else ""
    return f"<section>{title}{remark}{section.body}</section>"


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


def cell(text: str, kind: str = "", color: str = "", quantity: Quantity | None = None) -> str:
    """A cell of a table; with a colour, a swatch before the text."""
    if color:
        return f'<td class="name">{html_charts.swatch(color)}{escape(text)}</td>'
    return f"<td{_class(kind)}{quantity.attributes if quantity else ''}>{escape(text)}</td>"


def _held(bar: pick.MemoryBar, owner: str) -> str:
    """The bytes an owner holds on a rank. Only ranks have a path in the plan, a mean of ranks has none."""
    held = bar.owners.get(owner, 0.0)
    known = bar.label.isdigit() and owner in bar.owners
    return cell(words.gib(held), "n", quantity=Quantity(f"memory.stages[{bar.label}].{owner}", held) if known else None)


def table_of(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    total: Sequence[str] = (),
    numbers_from: int = 99,
    wide: bool = False,
    classes: Sequence[str] = (),
) -> str:
    """A table of HTML cells; heads from `numbers_from` on are right-aligned, `total` is a separate last row."""
    head = "".join(
        f"<th{_class('n' if at >= numbers_from else '')}>{escape(name)}</th>" for at, name in enumerate(heads)
    )
    kinds = classes or [""] * len(rows)
    body = "".join(f"<tr{_class(kind)}>{''.join(row)}</tr>" for kind, row in zip(kinds, rows, strict=True))
    if total:
        body += f'<tr class="all">{"".join(total)}</tr>'
    start = f'<div class="scroll"><table{_class("wide" if wide else "")}><thead><tr>{head}</tr></thead>'
    return f"{start}<tbody>{body}</tbody></table></div>"
