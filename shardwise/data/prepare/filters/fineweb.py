"""FineWeb's own filters (Penedo et al. 2024, section 3.6): lines that end like sentences, few short, few repeated, no lists."""

from __future__ import annotations

from shardwise.data.prepare.filters.repetition import repetitions
from shardwise.data.prepare.words import TERMINAL, Document


def fineweb_quality(
    document: Document,
    *,
    punctuated: float = 0.12,
    short: float = 0.67,
    short_length: int = 30,
    repeated: float = 0.01,
    new_lines: float = 0.3,
) -> str:
    """Penedo et al. 2024, section 3.6: limits on the share of lines that end with punctuation, the share of short lines, the share
    of characters in repeated lines, and the ratio of line ends to words."""
    lines = [line for line in document.text.split("\n") if line and not line.isspace()]
    if not lines:
        return "empty"
    if sum(line[-1] in TERMINAL for line in lines) / len(lines) < punctuated:
        return "too few lines end with punctuation"
    if sum(len(line) <= short_length for line in lines) / len(lines) > short:
        return "too many short lines"
    ends = document.text.count("\n")
    if repetitions(lines)[1] / (len(document.text) - ends) > repeated:
        return "characters in repeated lines"
    if ends / max(len(document.ids), 1) > new_lines:
        return "too many line ends for its words"
    return ""
