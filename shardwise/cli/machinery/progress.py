"""What a command is doing while it takes long: one line that is written over on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
