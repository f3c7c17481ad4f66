"""An engine's state: its answers, and the steps it has launched."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

from shardwise.schedules.serving import Chunk, Sequence, Step
from shardwise.serve.prompts import Wanted
from shardwise.serve.request import Logprob, Request
from shardwise.serve.runner import Launched
from shardwise.serve.sampler import read_logprobs

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
    prompt_asked: int = 0
    """Tokens of the prompt whose logprobs some step was asked for; it is not asked again where the prompt is computed again."""

    def wants(self, chunk: Chunk) -> Wanted | None:
        """What a step that computes this chunk is asked of the prompt; called once for each chunk, in order."""
        sequence, most = self.sequence, self.request.sampling.prompt_logprobs
        first, last = max(chunk.start, self.prompt_asked), min(chunk.start + chunk.count, sequence.prompt - 1)
        if most is None or self.index or first >= last:
            return None
        self.prompt_asked = last
        return Wanted(first - chunk.start, sequence.tokens[first + 1 : last + 1], most)


@dataclass
class LaunchedStep:
    """A step that was launched."""

    step: Step
    order: list[int]
    """The index of each row's chunk, in the runner's order."""
    launched: Launched
    prompts: list[tuple[Answer, Wanted]]
    """What the step was asked of prompts, in the runner's order."""

    def read_prompts(self) -> None:
        """Give the answers the logprobs of their prompts, once the step is done."""
        kept = self.launched.logits
        if kept is None or kept.logprobs is None or kept.top is None:
            return
        tokens = [token for _, wanted in self.prompts for token in wanted.tokens]
        asked: list[int | None] = [wanted.top for _, wanted in self.prompts for _ in wanted.tokens]
        found = iter(read_logprobs(tokens, kept.logprobs, kept.top, asked))
        for answer, wanted in self.prompts:
            answer.prompt_logprobs = answer.prompt_logprobs or [None]
            answer.prompt_logprobs += islice(found, len(wanted.tokens))


def order_of(chunks: list[Chunk]) -> list[int]:
    """The order of chunks in the runner: single tokens and drafts first, then prompts. Within each kind the longest come first, so
    that no SM of a GPU is left with a long one at the end."""
    ranks = [(chunk.count > max(1, chunk.samples)) * LATER - chunk.start - chunk.count for chunk in chunks]
    return sorted(range(len(chunks)), key=ranks.__getitem__)
