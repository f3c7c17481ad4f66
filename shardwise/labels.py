"""Names of the trainer's spans in a profile, for the trace reader.

A label is one line of text, `shardwise:KIND WORD WORD ...`, since only the name survives in every version of the
profiler's format:
- `action F2.5`: the pipeline's action of that name (`schedules.Action`), waiting included;
- `phase optimizer`: a phase of a step outside the pipeline: data, gradients, clip, optimizer, evaluate, checkpoint;
- `module layers.3.attention`: the forward pass of a module, by its name in the full model;
- `message tensor all_gather 4096`: a collective of an axis, and the bytes this rank sends for it, in the ledger's traffic
  convention.
"""

from __future__ import annotations

from typing import NamedTuple

PREFIX = "shardwise:"
KINDS = ("action", "phase", "module", "message")


class Label(NamedTuple):
    """A parsed label."""

    kind: str
    words: tuple[str, ...]


def label(kind: str, *words: object) -> str:
    """The text of a label."""
    return f"{PREFIX}{kind} {' '.join(map(str, words))}"


def read_label(name: str) -> Label | None:
    """The label in a span's name, or None for any other name."""
    if not name.startswith(PREFIX):
        return None
    kind, *words = name.removeprefix(PREFIX).split(" ")
    return Label(kind, tuple(words)) if kind in KINDS and words else None
