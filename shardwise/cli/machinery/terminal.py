"""Terminal output of a command: characters that the terminal can show (without UTF-8, × becomes x and not a question mark), and
progress of long work: one line that is overwritten on a terminal, a line every few seconds elsewhere; parts of a result, and a plan
beside what was measured."""

from __future__ import annotations

import codecs
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shardwise.cli.machinery.options import write_file

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from shardwise.ledger import Difference

NAME = "shardwise-plain"
PLAIN = {
    "×": "x",
    "–": "-",
    "−": "-",
    "→": "->",
    "…": "...",
    "µ": "u",
    "·": ".",
    "€": "EUR",
    "ᵀ": "T",
    "─": "-",
    "━": "-",
    "│": "|",
    "■": "#",
    "□": ".",
    "•": "*",
}


def plain(error: UnicodeError) -> tuple[str, int]:
    """An error handler of a stream: replaces each character by one or more that every terminal has. Bars keep their length."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end]
    return "".join(PLAIN.get(c, "#" if "▀" <= c <= "▟" else "?") for c in letters), error.end


def register() -> None:
    """Register the handler under its name."""
    codecs.register_error(NAME, plain)


PAUSE = 5.0
"""Seconds between lines without a terminal; work that ends sooner prints nothing."""


@contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """Yields a function that shows progress on stderr."""
    terminal = sys.stderr.isatty()
    last = time.monotonic()

    def say(text: str) -> None:
        nonlocal last
        if not terminal and time.monotonic() - last < PAUSE:
            return
        last = time.monotonic()
        print(f"\r\033[K{text}" if terminal else text, end="" if terminal else "\n", file=sys.stderr, flush=True)

    try:
        yield say
    finally:
        if terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def print_parts(console: Console, parts: Iterable[RenderableType]) -> None:
    """Print parts with an empty line between them."""
    for at, part in enumerate(parts):
        if at:
            console.print()
        console.print(part)


def show_comparison(
    what: str,
    differences: Sequence[Difference],
    tolerance: Mapping[str, float],
    notes: Sequence[str],
    found: dict[str, Any] | None,
    page: str | None,
) -> None:
    """Print the plan beside what was measured, a "run", "rehearsal" or "load"; or only `found` as JSON. `page` is a file for the
    same as a page."""
    if page:
        from shardwise.report import html

        sections = [html.comparison_table(differences, tolerance, ("plan", what)), html.notes(notes)]
        write_file(page, html.page(f"Plan against {what}", sections).encode())
    if found is not None:
        print(json.dumps(found))
        return
    from shardwise.report import terminal

    table = terminal.comparison_table(differences, tolerance, ("plan", what))
    print_parts(terminal.Console(), (table, terminal.notes(notes)))
