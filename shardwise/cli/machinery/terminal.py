"""Terminal output of a command: characters that the terminal can show (without UTF-8, × becomes x and not a question mark), and
progress of long work: one line that is overwritten on a terminal, a line every few seconds elsewhere."""

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
