"""Text from an engine without a server: continues several prompts together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shardwise.data.tokenizer import Tokenizer
from shardwise.run import UserError
from shardwise.serve.request import Request, Sampling
from shardwise.serve.service import Engine


@dataclass
class Continued:
    """The continuation of one prompt."""

    tokens: list[int]
    text: str = ""
    ended_by: Literal["end", "stop", "length"] = "length"


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a prompt, with the tokenizer's prefix before them, unless the text already begins with it, as that of a chat
    template does."""
    tokens, prefix = tokenizer.encode(text), tokenizer.prefix
    return tokens if tokens[: len(prefix)] == prefix else prefix + tokens


def continue_prompts(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    sampling: Sampling,
    tokenizer: Tokenizer,
    stop: Sequence[str] = (),
    ends: frozenset[int] = frozenset(),
) -> list[Continued]:
    """Continue each prompt by at most `max_tokens`, up to the tokenizer's end token, to one of `ends`, or to one of the stop
    strings in `stop`, all of which are left out. The random draws of a prompt do not depend on the other prompts."""
    ends = ends | {tokenizer.end}
    found = [Continued([]) for _ in prompts]
    for n, prompt in enumerate(prompts):
        # Each prompt has its own seed, so the same prompt twice gets two different answers.
        own = sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + (n << 32))
        engine.add(Request(str(n), tuple(prompt), max_tokens, own, stop_tokens=ends))
    while not engine.idle:
        for output in engine.step():
            made = found[int(output.request)]
            if output.finish == "abort":
                raise UserError(
                    "the model's scores are not finite numbers, so no token can be drawn from them; are its weights?"
                )
            made.tokens += output.tokens
            text = (
                tokenizer.decode([token for token in made.tokens if token not in ends]) if stop or output.finish else ""
            )
            cuts = [text.index(each) for each in stop if each in text]
            if cuts:
                made.text, made.ended_by = text[: min(cuts)], "stop"
                engine.finish(output.request, 0)
            elif output.finish:
                made.text, made.ended_by = text, "end" if output.finish == "stop" else "length"
    return found
