"""Names that the trainer gives its spans in a profile and that the trace reader understands, said once, here.

A label is one line of text, `shardwise:KIND WORD WORD ...`, because a profiler keeps nothing else of a span that is sure to
survive every version of its format:
- `action F2.5`: the pipeline's action of that name (`schedules.Action`), with all that it waits for;
- `phase optimizer`: a part of a step outside the pipeline: data, gradients, clip, optimizer, evaluate, checkpoint;
- `module layers.3.attention`: the forward pass of a module, by its name in the whole model;
- `message tensor all_gather 4096`: a collective of an axis, and the bytes this rank sends for it, by the convention of the
  ledger's traffic.
"""

from __future__ import annotations

from typing import NamedTuple

PREFIX = "shardwise:"
KINDS = ("action", "phase", "module", "message")
PHASES = ("data", "gradients", "clip", "optimizer", "evaluate", "checkpoint")


class Label(NamedTuple):
    """A label taken apart."""

    kind: str
    words: tuple[str, ...]


def label(kind: str, *words: object) -> str:
    """The text of a label."""
    return f"{PREFIX}{kind} {' '.join(map(str, words))}"


def read_label(name: str) -> Label | None:
    """The label that a span's name is, or None for any other name."""
    kind, *words = name.removeprefix(PREFIX).split(" ")
    return Label(kind, tuple(words)) if name.startswith(PREFIX) and kind in KINDS and words else None
