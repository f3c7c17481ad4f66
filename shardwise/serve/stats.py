"""What an engine says of itself: what it holds now, and what it has done since it began."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import Any, Self


@dataclass(frozen=True)
class Stats:
    """One moment of an engine. `prefix_…`, `preemptions`, `…_tokens` and `…_at` only grow."""

    running: int = 0
    """Sequences that hold pages."""
    waiting: int = 0
    """Sequences that do not yet."""
    pages_used: int = 0
    pages: int = 0
    prefix_queries: int = 0
    """Tokens of prompts that were looked for in the prefix cache."""
    prefix_hits: int = 0
    """Those of them that were found."""
    preemptions: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    drafted_at: tuple[int, ...] = ()
    """Guesses that were verified, by their place behind the last token."""
    accepted_at: tuple[int, ...] = ()
    """Those of them that were right, and all before them."""

    @classmethod
    def together(cls, each: Sequence[Self]) -> Self:
        """Figures of several engines."""
        return cls(*(_sum([getattr(one, field.name) for one in each]) for field in fields(cls)))


def _sum(values: Sequence[Any]) -> Any:
    if isinstance(values[0], tuple):
        return tuple(sum(place) for place in zip_longest(*values, fillvalue=0))
    return sum(values)
