"""What an engine says of itself: what it holds now, and what it has done since it began."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stats:
    """One moment of an engine. `prefix_…`, `preemptions` and `…_tokens` only grow."""

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
