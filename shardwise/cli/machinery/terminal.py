"""What a command writes to a terminal: letters that it can show (without UTF-8, × is x and not a question mark), and what is being
done while it takes long, one line that is written over on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import codecs
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
    """An error handler of a stream: each letter by one or more that every terminal has. Bars keep their length."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end]
    return "".join(PLAIN.get(c, "#" if "▀" <= c <= "▟" else "?") for c in letters), error.end


def register() -> None:
    """Make the handler known by its name."""
    codecs.register_error(NAME, plain)


PAUSE = 5.0
"""Seconds between lines where there is no terminal; work that is over sooner says nothing."""


@contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """A function to tell stderr what is being done."""
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
