"""A load, measured or simulated, on the terminal."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from shardwise.report import load_view
from shardwise.report.terminal import Console, key_figures, plain_table
from shardwise.schedules.serving.figures import SHARES


def print_load(console: Console, figures: dict[str, Any], more: list[tuple[str, str, str]] | None = None) -> None:
    """Print the figures and the table of latencies, with the `more` figures first."""
    console.print(key_figures([*(more or []), *load_view.key_figures(figures)]))
    console.print()
    table = plain_table("", "mean", *(f"{share}%" for share in SHARES))
    for name, values in load_view.cells(figures):
        table.add_row(name, *map(Text, values))
    console.print(table)
    for error, count in figures["errors"].items():
        console.print(f"{count} failed: {error}", markup=False, soft_wrap=True)
