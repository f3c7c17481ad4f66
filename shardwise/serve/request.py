"""Requests to the engine and their outputs: token sequences in, tokens out. The server handles text. And the engine's statistics:
its current state, and totals since it started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any, Literal, NamedTuple, Protocol, Self

Finish = Literal["stop", "length", "abort"]
"""Why a sequence ended: at a stop token or by the reader of its text, at its length limit, or because its client went away."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is sampled. Temperature 0 takes the likeliest; other temperatures first cut the tail, in this order:
    top_k, top_p, min_p. Penalties are OpenAI's (presence, frequency: of generated tokens) and CTRL's (repetition: of prompt
    tokens, too)."""

    temperature: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    """Draws are a function of this seed, the answer's index and the token's position; None: the engine's seed and the request's id
    stand in for the seed."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    """How many of the likeliest tokens to return beside the sampled one, with their logprobs; None: no logprobs."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    drawn_logprobs: bool = False
    """Return logprobs of the logits divided by the temperature, from which tokens are drawn; otherwise those of the model
    itself."""


class Grammar(Protocol):
    """Restricts the next token; each sequence has its own."""

    def allowed(self) -> object:
        """A bit for each token of the vocabulary: int32 words, NumPy."""

    def accept(self, token: int) -> None:
        """Advance by this token."""

    def copy(self) -> Grammar:
        """A copy in the same state, for draft tokens."""


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt to continue, `n` times."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    n: int = 1
    stop_tokens: frozenset[int] = frozenset()
    """Tokens that end a sequence and are part of it."""
    ignore_end: bool = False
    """Ignore stop tokens and go on to the length limit."""
    priority: int = 0
    """Lower values go first."""
    user: str = ""
    """Among requests of one priority, users share the engine evenly."""
    grammars: tuple[Grammar, ...] = ()
    """One for each of the `n` answers, or none."""


class Logprob(NamedTuple):
    """A token's logprob, and those of its likeliest alternatives, most likely first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Output:
    """The new tokens of one answer. One is made for every token, so it is not frozen: that would take five times as long."""

    request: str
    index: int
    """Which of the `n` answers."""
    tokens: tuple[int, ...]
    logprobs: tuple[Logprob, ...] = ()
    """Of `tokens`, if asked for."""
    finish: Finish | None = None
    prompt_logprobs: tuple[Logprob | None, ...] = ()
    """With the first output, if asked for; the first token has none."""
    cached_tokens: int = 0
    """With the first output: prompt tokens that were found in the prefix cache."""


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
