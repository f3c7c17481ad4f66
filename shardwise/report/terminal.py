"""The ledger in a terminal. Each function returns a rich renderable; the caller owns the console and its width.

Without colour (a pipe, a log, NO_COLOR) the same charts are drawn with letters, which the legend explains.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, Group, JustifyMethod, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from shardwise.ledger import Account, Difference, Memory, Span, Timeline, Traffic
from shardwise.report import cells, colors, pick, words

WIDEST_BAR = 100
MOST_ROWS = 24
"""Most pipeline ranks in a timeline; a longer pipeline shows its first and last."""

COLUMN_GAP = 3
"""Cells between two columns of a frameless table."""
SHORTEST_NAME = 8

EIGHTHS = " ▏▎▍▌▋▊▉"
WARNING = "bold red"


class Console(RichConsole):
    """Rich's console, except that a closed pipe raises an error for `main` to handle, where rich would exit."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def key_figures(figures: Iterable[tuple[str, str, str]]) -> RenderableType:
    """The key numbers: label, value and remark."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(style="dim", overflow="fold")
    for label, value, note in figures:
        table.add_row(safe(label), safe(value), safe(note))
    return table


def memory_bars(memory: Memory) -> RenderableType:
    """Peak memory of each pipeline rank by owner against a device's capacity, then the numbers, which also serve as the legend."""
    bars, owners = pick.memory_bars(memory), pick.owners_of(memory)
    if not bars:
        return Group(title("Memory"), Text("not known", style="dim"))
    scale = max(memory.capacity, memory.peak)
    chart = plain_table(show_header=False)
    chart.add_column(justify="right", no_wrap=True)
    chart.add_column()
    chart.add_column(justify="right", no_wrap=True)
    for bar in bars:
        parts = [_Part(cells.OWNER_LETTERS.get(o, "?"), colors.of_owner(o), bar.owners.get(o, 0.0)) for o in owners]
        chart.add_row(_rank_label(bar), _Bar(parts, scale, memory.capacity), _fill(bar.total, memory.capacity))
    size = f"; a device holds {words.size(memory.capacity)}, marked |" if memory.capacity else ""
    head = title("Memory", f"peak of each pipeline rank{size}")
    return Group(head, chart, "", _memory_numbers(bars, owners))


def breakdown_bar(account: Account) -> RenderableType:
    """Where the step's time goes, longest first."""
    parts = pick.breakdown(account)
    if not parts:
        return Group(title("Time"), Text("not known", style="dim"))
    table = plain_table(show_header=False)
    table.add_column(no_wrap=True)
    for _ in range(2):
        table.add_column(justify="right", no_wrap=True)
    table.add_column()
    longest = parts[0][1]
    for name, taken in parts:
        bar = _Bar([_Part("#", colors.of_category(name), taken)], longest)
        share = taken / account.step_seconds if account.step_seconds else float("nan")
        table.add_row(safe(name), Text(words.seconds(taken)), Text(words.percent(share), style="dim"), bar)
    return Group(title("Time", f"of {words.seconds(account.step_seconds)} a step, on the slowest rank"), table)


def traffic_table(traffic: Traffic) -> RenderableType:
    """Wire bytes and messages of one rank in a step, by axis and collective."""
    rows, total = pick.traffic_rows(traffic), traffic.total
    if not rows:
        return Group(title("Traffic"), Text("none", style="dim"))
    table = plain_table("axis", "collective", "sent", "share", "messages", "each", names=2)
    for axis, row in zip(pick.unrepeated(row.axis for row in rows), rows, strict=True):
        table.add_row(
            Name(named(axis, colors.of_category(axis))) if axis else "",
            Name(safe(row.collective.replace("_", " "))),
            Text(words.size(row.bytes)),
            Text(words.percent(row.bytes / total if total else 0.0), style="dim"),
            Text(words.count(row.messages) if row.messages else words.DASH),
            Text(words.size(row.bytes / row.messages) if row.messages else words.DASH, style="dim"),
        )
    table.add_section()
    messages = sum(row.messages for row in rows)
    table.add_row("all", "", words.size(total), "", words.count(messages) if messages else words.DASH, "", style="bold")
    return Group(title("Traffic", "what one rank sends in a step"), table)


def timeline(timeline: Timeline, width: int | None = None) -> RenderableType:
    """One step: a row for each pipeline rank, coloured by pass, with the microbatch's number where it fits."""
    if not timeline.spans:
        return Group(title("One step"), Text("not known", style="dim"))
    remark = "each row a pipeline rank, numbers (where they fit) are microbatches" + pick.left_out(timeline)
    return Group(title("One step", remark), _Timeline(timeline, width))


def ranking_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[pick.Column]) -> RenderableType:
    """Candidates, best first, numbered. Essential columns are kept; others that do not fit are listed or named below the table."""
    return _Ranking(rows, columns)


def comparison_table(
    differences: Sequence[Difference],
    tolerance: float | Mapping[str, float],
    names: tuple[str, str] = ("plan", "run"),
    only_beyond: bool = False,
) -> RenderableType:
    """Two accounts side by side; differences beyond the tolerance are marked. `only_beyond` leaves out the rest."""
    head = title("Comparison", pick.agreement(differences, tolerance))
    rows = [each for each in differences if not only_beyond or pick.beyond(each, tolerance)]
    if not rows:
        return head
    table = plain_table("account")
    table.add_column("quantity", overflow="fold")
    for name in (*names, "difference", ""):
        table.add_column(safe(name), justify="right", no_wrap=True)
    for account, each in zip(pick.unrepeated(each.account for each in rows), rows, strict=True):
        apart = pick.beyond(each, tolerance)
        table.add_row(
            safe(account, "dim"),
            safe(each.name.replace("_", " ")),
            Text(words.quantity(each.account, each.name, each.first)),
            Text(words.quantity(each.account, each.name, each.second)),
            Text(words.change(each.relative), style=WARNING if apart else "dim"),
            Text("!" if apart else "", style=WARNING),
        )
    return Group(head, table)


def notes(sentences: Iterable[str]) -> RenderableType:
    """Remarks, one below the other."""
    table = Table.grid(padding=(0, 1))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for sentence in sentences:
        table.add_row("-", safe(sentence))
    return table


@dataclass(frozen=True)
class _Part:
    letter: str
    color: str
    value: float


@dataclass(frozen=True)
class _Bar:
    """A bar of coloured parts, as wide as its column, with a mark at `limit`."""

    parts: Sequence[_Part]
    scale: float
    limit: float = 0.0

    def __rich_measure__(self, console: RichConsole, options: ConsoleOptions) -> Measurement:
        return Measurement(min(8, options.max_width), min(options.max_width, WIDEST_BAR))

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        room = min(options.max_width, WIDEST_BAR) - bool(self.limit)
        mark = round(self.limit / self.scale * room) if self.limit and self.scale > 0 else None
        plain = _plain(console)
        drawn = self._cells(room, plain)
        if mark is not None:
            drawn.insert(mark, ("|" if plain else "│", Style(bold=True)))
        yield from (Segment(text, style) for text, style in drawn)

    def _cells(self, room: int, plain: bool) -> list[tuple[str, Style]]:
        drawn: list[tuple[str, Style]] = []
        for part, width in zip(self.parts, cells.stacked([p.value for p in self.parts], self.scale, room), strict=True):
            drawn += [(part.letter if plain else "█", Style() if plain else Style(color=part.color))] * width
        # A bar of one part may end within a cell, to show small differences.
        if not plain and len(self.parts) == 1 and self.scale > 0:
            eighths = round(min(1.0, self.parts[0].value / self.scale) * room * 8)
            style = Style(color=self.parts[0].color)
            drawn = [("█", style)] * (eighths // 8) + [(EIGHTHS[eighths % 8], style)] * bool(eighths % 8)
        return drawn + [(" ", Style())] * (room - len(drawn))


@dataclass(frozen=True)
class Name:
    """A name on one line. In a table that is too wide, names are shortened in the middle; numbers are never cut."""

    text: Text

    def __rich_measure__(self, console: RichConsole, options: ConsoleOptions) -> Measurement:
        length = self.text.cell_len
        return Measurement(min(length, SHORTEST_NAME, options.max_width), min(length, options.max_width))

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        fits = self.text.cell_len <= options.max_width
        yield self.text if fits else Text(words.shortened(self.text.plain, options.max_width), style=self.text.style)


@dataclass(frozen=True)
class _Swatch:
    """A coloured square, or its letter without colour."""

    letter: str
    color: str

    def __rich_measure__(self, console: RichConsole, options: ConsoleOptions) -> Measurement:
        return Measurement(1, 1)

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        yield Segment(self.letter) if _plain(console) else Segment("■", Style(color=self.color))


@dataclass(frozen=True)
class _Timeline:
    timeline: Timeline
    width: int | None

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        spans, step = self.timeline.spans, self.timeline.seconds
        step = max(step, max(span.start + span.seconds for span in spans))
        by_rank: dict[int, list[Span]] = {rank: [] for rank in sorted({span.rank for span in spans})}
        for span in spans:
            by_rank[span.rank].append(span)
        shown = cells.rows_shown(list(by_rank), MOST_ROWS)
        gutter = max(len(str(rank)) for rank in by_rank) + 1
        width = max(10, min(self.width or options.max_width, options.max_width) - gutter)
        plain = _plain(console)
        drawn: list[Span] = []
        for rank in shown:
            if rank is None:
                yield Text(f"{'':{gutter}}({len(by_rank) - len(shown) + 1} more ranks between)", style="dim")
            else:
                row = Text(f"{rank:>{gutter - 1}} ", style="dim", no_wrap=True, end="\n")
                for part in cells.paint(by_rank[rank], step, width):
                    row.append_text(_drawn(part, plain))
                    drawn += [part.span] if part.span else []
                yield row
        end = words.seconds(step)
        yield Text(f"{'':{gutter}}0{end:>{width - 1}}", style="dim", no_wrap=True)
        yield _legend(drawn, plain)


@dataclass(frozen=True)
class _Ranking:
    rows: Sequence[Mapping[str, Any]]
    columns: Sequence[pick.Column]

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        shown, hidden = self._fitting(options.max_width)
        longest = max(shown, key=self._width, default=None)
        table = plain_table()
        table.add_column("", justify="right", style="dim", no_wrap=True)
        for column in shown:
            side: JustifyMethod = "right" if self._numeric(column) else "left"
            table.add_column(safe(column.title), justify=side, overflow="fold", no_wrap=column is not longest)
        for place, row in enumerate(self.rows, 1):
            table.add_row(str(place), *(safe(column.text(row)) for column in shown), style="bold" if place == 1 else "")
        yield table
        for column in (each for each in hidden if each.below):
            yield Text(f"\n{column.title} of each:", style="dim")
            listed = Table.grid(padding=(0, 1))
            listed.add_column(justify="right", style="dim", no_wrap=True)
            listed.add_column(overflow="fold")
            for place, row in enumerate(self.rows, 1):
                listed.add_row(str(place), safe(column.text(row)), style="bold" if place == 1 else "")
            yield listed
        lost = ", ".join(column.title for column in hidden if not column.below)
        if lost:
            yield safe(f"not shown, the terminal is too narrow: {lost}", "dim")

    def _numeric(self, column: pick.Column) -> bool:
        return all(isinstance(row.get(column.key), int | float | None) for row in self.rows)

    def _width(self, column: pick.Column) -> int:
        return max(cell_len(text) for text in (column.title, *(column.text(row) for row in self.rows)))

    def _fitting(self, width: int) -> tuple[list[pick.Column], list[pick.Column]]:
        """The columns that fit, and the others: non-essential columns are dropped first, from the last on. If the essential ones
        are still too wide, the longest of them is folded."""
        shown = list(self.columns)
        room = width - len(str(len(self.rows)))
        for column in reversed(self.columns):
            if sum(self._width(each) + COLUMN_GAP for each in shown) <= room or len(shown) == 1:
                break
            if not column.essential:
                shown.remove(column)
        return shown, [column for column in self.columns if column not in shown]


def _plain(console: RichConsole) -> bool:
    return console.color_system is None or console.no_color


def safe(text: str, style: str | Style = "") -> Text:
    """Untrusted text, without markup and without control characters, which a terminal would execute."""
    return Text("".join(letter if letter.isprintable() else " " for letter in text), style=style)


def title(title: str, remark: str = "") -> Text:
    """A heading with a remark beside it."""
    text = Text(title, style="bold")
    return text.append(f"  {remark}", style="not bold dim") if remark else text


def plain_table(*heads: str, names: int = 1, show_header: bool = True) -> Table:
    """A table without a frame. Its columns after the first `names` are of numbers: to the right, and on one line."""
    table = Table(
        *heads[:names],
        box=box.SIMPLE_HEAD if show_header else None,
        show_edge=False,
        show_header=show_header,
        header_style="dim",
        pad_edge=False,
    )
    for head in heads[names:]:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def named(name: str, color: str) -> Text:
    """A name in its colour."""
    return safe(name, Style(color=color, bold=True))


def _rank_label(bar: pick.MemoryBar) -> Text:
    return Text(f"{bar.label} ({bar.note})" if bar.note else bar.label, style="dim")


def _fill(total: float, capacity: float) -> Text:
    """The total, and its share of the capacity or its excess."""
    text = Text(words.size(total), style="bold")
    if not capacity:
        return text
    if total > capacity:
        return text.append(f"  over by {words.size(total - capacity)}", style=WARNING)
    return text.append(f"  {words.percent(total / capacity):>6}", style="not bold dim")


def _memory_numbers(bars: Sequence[pick.MemoryBar], owners: Sequence[str]) -> Table:
    table = plain_table()
    table.add_column("")
    table.add_column("GiB on rank")
    for bar in bars:
        table.add_column(Text(bar.label), justify="right", no_wrap=True)
    for owner in owners:
        key = _Swatch(cells.OWNER_LETTERS.get(owner, "?"), colors.of_owner(owner))
        table.add_row(key, safe(owner), *(words.gib(bar.owners.get(owner, 0.0)) for bar in bars))
    table.add_section()
    table.add_row("", "all", *(words.gib(bar.total) for bar in bars), style="bold")
    return table


def _drawn(part: cells.CellRange, plain: bool) -> Text:
    span = part.span
    if span is None:
        return Text((cells.IDLE if plain else " ") * part.cells, style="" if plain else "on default")
    if plain:
        # The letter shows the pass, so it comes before the number.
        letter = cells.KIND_LETTERS.get(pick.kind_of(span), "?")
        return Text(f"{cells.caption(span, part.cells - 1):{letter}>{part.cells}}")
    color = colors.of_span(span)
    if span.microbatch > 0 and span.microbatch % 2:
        color = colors.shade(color, 0.25)
    return Text(
        f"{cells.caption(span, part.cells):<{part.cells}}", style=Style(color=colors.ink_on(color), bgcolor=color)
    )


def _legend(spans: Sequence[Span], plain: bool) -> Text:
    examples = {pick.kind_of(span): span for span in reversed(spans)}
    legend = Text()
    for kind in pick.ordered(examples, tuple(cells.KIND_LETTERS)):
        key = cells.KIND_LETTERS.get(kind, "?") if plain else "■"
        legend.append(key, style="" if plain else Style(color=colors.of_span(examples[kind])))
        legend.append_text(safe(f" {kind.replace('_', ' ')}   "))
    return legend.append(f"{cells.IDLE if plain else '□'} idle")
