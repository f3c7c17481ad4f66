"""What a client asks of the engine, and what it gets: token sequences in, tokens out. Text is the server's business."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

Finish = Literal["stop", "length", "abort"]
"""Why a sequence ended: at a stop token or by whoever reads the text, at its limit, or because its client went away."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is picked. Temperature 0 takes the likeliest; the others cut the tail first, in this order: top_k, top_p,
    min_p. Penalties as OpenAI's (presence, frequency: of generated tokens) and CTRL's (repetition: of the prompt's too)."""

    temperature: float = 1.0
    top_k: int = 0
    """0: all."""
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    """The draws are a function of this, the answer's index and the token's position; None: of the engine's seed and the request."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    """How many of the likeliest tokens to give beside the one picked, with logarithms of their probabilities; None: no logprobs."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    drawn_logprobs: bool = False
    """Give logprobs of the scores divided by the temperature, which tokens are drawn by; else those of the model itself."""


class Grammar(Protocol):
    """What restricts the next token; kept by one sequence."""

    def allowed(self) -> object:
        """A bit for each token of the vocabulary: int32 words, NumPy."""

    def accept(self, token: int) -> None:
        """Go on after this token."""

    def copy(self) -> Grammar:
        """Another that goes on from here, for tokens that are only guessed."""


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt to continue, `n` times."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    n: int = 1
    stop_tokens: frozenset[int] = frozenset()
    """Tokens that end a sequence, and belong to it."""
    ignore_end: bool = False
    """Go on to the limit whatever comes."""
    priority: int = 0
    """Lower goes first."""
    user: str = ""
    """Requests of one priority share the engine evenly among users."""
    grammars: tuple[Grammar, ...] = ()
    """One for each of the `n` answers, or none."""


class Logprob(NamedTuple):
    """A token's logarithm of probability, that of its likeliest alternatives, most likely first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Output:
    """What is new of one answer. One is made for every token, so it is not frozen: that would take five times as long."""

    request: str
    index: int
    """Which of the `n` answers."""
    tokens: tuple[int, ...]
    logprobs: tuple[Logprob, ...] = ()
    """Of `tokens`, where asked for."""
    finish: Finish | None = None
    prompt_logprobs: tuple[Logprob | None, ...] = ()
    """With the first output, where asked for; the first token has none."""
    cached_tokens: int = 0
    """With the first output: tokens of the prompt that were found in the prefix cache."""
