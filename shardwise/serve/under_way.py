"""What an engine remembers of its answers and of the steps that it has launched."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwise.schedules.serving import Chunk, Sequence, Step
from shardwise.serve.request import Logprob, Request
from shardwise.serve.runner import Launched

LATER = 2**60
"""More than a sequence has tokens."""


@dataclass(eq=False)
class Answer:
    """One of the answers to a request."""

    request: Request
    index: int
    sequence: Sequence
    told: bool = False
    """Whether anything was output yet."""
    unwanted: bool = False
    prompt_logprobs: list[Logprob | None] = field(default_factory=list)


@dataclass
class LaunchedStep:
    """A step that was launched."""

    step: Step
    order: list[int]
    """The chunk of each row, as the runner has them."""
    launched: Launched


def order_of(chunks: list[Chunk]) -> list[int]:
    """Single tokens first, and those with guesses, as the runner wants them; of each kind those that take longest first, so that no
    processor of a GPU is left with one at the end."""
    ranks = [(chunk.count > max(1, chunk.samples)) * LATER - chunk.start - chunk.count for chunk in chunks]
    return sorted(range(len(chunks)), key=ranks.__getitem__)
