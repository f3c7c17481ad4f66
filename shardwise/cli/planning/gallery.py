"""`shardwise gallery`: shows tables and figures of papers, as published and as planned."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from shardwise.run import Problem, UserError
from shardwise.run.problems import nearest

if TYPE_CHECKING:
    from shardwise.plan.published.exhibit import Exhibit

HELP = """Show tables and figures of papers as published and as planned, side by side. Measured rows are predicted with constants
fitted without their source. Without a NAME, all of them."""

INTRODUCTION = """# The gallery

Tables and figures of papers, as published and as planned, side by side. `shardwise gallery --markdown` makes this page from the
rows that come with the package. No planned figure was fitted to the one beside it: each source is predicted with constants fitted
without it, and what follows from a formula alone is computed as every plan computes it. Intervals are those that hold 8 of 10.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="tables to show; --list prints their names")
    parser.add_argument("--list", action="store_true", help="print the names of the tables")
    parser.add_argument("--markdown", action="store_true", help="print Markdown, as in docs/gallery.md")
    parser.add_argument("--json", action="store_true", help="print JSON")


def execute(args: argparse.Namespace) -> int:
    """Build the exhibits and print them."""
    from shardwise.plan.published.gallery import EXHIBITS

    unknown = [name for name in args.names if name not in EXHIBITS]
    if unknown:
        known = ", ".join(EXHIBITS)
        raise UserError(*(Problem(f"is no exhibit{nearest(name, EXHIBITS)}: {known}", name) for name in unknown))
    if args.list:
        print("\n".join(EXHIBITS))
        return 0
    chosen = {name: EXHIBITS[name]() for name in args.names or EXHIBITS}
    if args.json:
        print(json.dumps({name: exhibit.as_dict() for name, exhibit in chosen.items()}))
    elif args.markdown:
        print("\n".join([INTRODUCTION, *map(_markdown, chosen.values())]), end="")
    else:
        _print(list(chosen.values()))
    return 0


def _cells(exhibit: Exhibit) -> list[tuple[str, str, str, str, str]]:
    from shardwise.report import words

    rows = []
    for line in exhibit.lines:
        between = (
            f"{_figure(line.low)} to {_figure(line.high)}" if line.low is not None and line.high is not None else ""
        )
        rows.append((line.label, _figure(line.published), _figure(line.planned), between, words.change(line.error)))
    return rows


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if abs(value) < 1000 or abs(value) >= 1e6 else f"{value:,.0f}"


def _markdown(exhibit: Exhibit) -> str:
    lines = [f"## {exhibit.title}", "", f"{exhibit.source}; {exhibit.unit}. {exhibit.said}".rstrip(), ""]
    lines += ["| | published | planned | interval | error |", "|---|---|---|---|---|"]
    lines += [f"| {' | '.join(cells)} |" for cells in _cells(exhibit)]
    return "\n".join([*lines, ""]) + "\n"


def _print(exhibits: list[Exhibit]) -> None:
    from rich.table import Table

    from shardwise.report import words
    from shardwise.report.terminal import Console

    console = Console()
    for exhibit in exhibits:
        console.print(f"[bold]{exhibit.title}[/bold]", highlight=False)
        console.print(f"{exhibit.source}; {exhibit.unit}. {exhibit.said}".rstrip(), style="dim", highlight=False)
        table = Table(box=None, padding=(0, 1), header_style="dim")
        table.add_column("")
        for name in ("published", "planned", "80% interval", "error"):
            table.add_column(name, justify="right")
        for cells in _cells(exhibit):
            table.add_row(*cells)
        console.print(table)
        console.print(f"median error {words.percent(exhibit.median)}\n", style="dim", highlight=False)
