"""An engine's state: its answers, and the steps it has launched."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwise.schedules.serving import Chunk, Sequence, Step
from shardwise.serve.request import Logprob, Request
from shardwise.serve.runner import Launched

LATER = 2**60
"""More than any sequence length."""


@dataclass(eq=False)
class Answer:
    """One of the answers to a request."""

    request: Request
    index: int
    sequence: Sequence
    told: bool = False
    """Whether any output was made yet."""
    unwanted: bool = False
    prompt_logprobs: list[Logprob | None] = field(default_factory=list)


@dataclass
class LaunchedStep:
    """A step that was launched."""

    step: Step
    order: list[int]
    """The index of each row's chunk, in the runner's order."""
    launched: Launched


def order_of(chunks: list[Chunk]) -> list[int]:
    """The order of chunks in the runner: single tokens and drafts first, then prompts. Within each kind the longest come first, so
    that no SM of a GPU is left with a long one at the end."""
    ranks = [(chunk.count > max(1, chunk.samples)) * LATER - chunk.start - chunk.count for chunk in chunks]
    return sorted(range(len(chunks)), key=ranks.__getitem__)
