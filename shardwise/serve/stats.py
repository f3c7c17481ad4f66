"""An engine's statistics: its current state, and totals since it started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import Any, Self


@dataclass(frozen=True)
class Stats:
    """A snapshot of an engine. `prefix_…`, `preemptions`, `…_tokens` and `…_at` only grow."""

    running: int = 0
    """Sequences that hold pages."""
    waiting: int = 0
    """Sequences that hold no pages yet."""
    pages_used: int = 0
    pages: int = 0
    prefix_queries: int = 0
    """Prompt tokens that were looked up in the prefix cache."""
    prefix_hits: int = 0
    """Prompt tokens that were found there."""
    preemptions: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    drafted_at: tuple[int, ...] = ()
    """Verified draft tokens, by their position after the last token."""
    accepted_at: tuple[int, ...] = ()
    """Accepted draft tokens, by the same position: they and all before them were right."""

    @classmethod
    def together(cls, each: Sequence[Self]) -> Self:
        """The summed statistics of several engines."""
        return cls(*(_sum([getattr(one, field.name) for one in each]) for field in fields(cls)))


def _sum(values: Sequence[Any]) -> Any:
    if isinstance(values[0], tuple):
        return tuple(sum(place) for place in zip_longest(*values, fillvalue=0))
    return sum(values)
