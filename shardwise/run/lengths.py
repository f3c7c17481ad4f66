"""Lengths in tokens, of prompts or of answers: a number, "U(100,1024)", or a file with a number on each line.

The planner of a load and its clients draw the same lengths: they depend on the seed alone. Lengths of a file are taken in its
order, starting again at the top when they are used up, so that two files stay side by side.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path

from shardwise.run.problems import Problem, UserError, unreadable

_EVENLY = re.compile(r"U\(\s*(\d+)\s*,\s*(\d+)\s*\)", re.IGNORECASE)
LONGEST_TEXT = 100
"""Characters of a number of tokens, or of two."""
LONGEST = 10**9


@dataclass(frozen=True)
class Lengths:
    """Lengths drawn uniformly between two numbers, both included; or those of a file."""

    low: int
    high: int
    listed: tuple[int, ...] = ()

    @property
    def mean(self) -> float:
        """The mean length."""
        return sum(self.listed) / len(self.listed) if self.listed else (self.low + self.high) / 2

    def draw(self, count: int, seed: int) -> list[int]:
        """The lengths of `count` requests."""
        if self.listed:
            return [self.listed[number % len(self.listed)] for number in range(count)]
        if self.low == self.high:
            return [self.low] * count
        return random.Random(seed).choices(range(self.low, self.high + 1), k=count)

    def __str__(self) -> str:
        if self.listed:
            return f"{len(self.listed):,} of a file, {self.low:,} to {self.high:,}"
        return f"{self.low:,}" if self.low == self.high else f"U({self.low},{self.high})"


def parse_lengths(text: str, key: str = "", where: str = "") -> Lengths:
    """The lengths that a text describes; `key` and `where` are for messages."""
    text = text.strip()
    if len(text) > LONGEST_TEXT and not text.strip("0123456789U(), "):
        raise UserError(Problem(f'"{text[:20]}…" is too long for a number of tokens', key, where))
    if text.isascii() and text.isdigit():
        return _checked(int(text), int(text), (), key, where)
    if found := _EVENLY.fullmatch(text):
        return _checked(int(found[1]), int(found[2]), (), key, where)
    if Path(text).is_file():
        listed = _read(Path(text))
        return _checked(min(listed), max(listed), listed, key, text)
    message = f'"{text}" is neither a number of tokens, nor "U(low,high)", nor a file with a number on each line'
    raise UserError(Problem(message, key, where))


def _checked(low: int, high: int, listed: tuple[int, ...], key: str, where: str) -> Lengths:
    if not 1 <= low <= high <= LONGEST:
        message = f"lengths from {low} to {high} make no sense: at least 1, and the second no smaller than the first"
        raise UserError(Problem(message, key, where))
    return Lengths(low, high, listed)


def _read(path: Path) -> tuple[int, ...]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise unreadable(e, where=path) from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if not (line.strip().isascii() and line.strip().isdigit()):
            raise UserError(Problem(f'line {number} is no number of tokens: "{line.strip()[:50]}"', where=str(path)))
        found.append(int(line))
    if not found:
        raise UserError(Problem("has no number of tokens in it", where=str(path)))
    return tuple(found)
