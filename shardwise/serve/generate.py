"""Text from an engine without a server: continues several prompts together. The server, the evaluations and `shardwise generate`
end an answer at the same tokens, those that a model's publisher names in the generation_config.json of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from shardwise.data.tokenizer import Tokenizer
from shardwise.run import UserError
from shardwise.serve.request import Request, Sampling
from shardwise.serve.service import Engine
from shardwise.serve.text import Reader

GENERATION = "generation_config.json"


@dataclass
class Continued:
    """The continuation of one prompt."""

    tokens: list[int]
    text: str = ""
    ended_by: Literal["end", "stop", "length"] = "length"


def read_generation(folder: Path) -> dict[str, Any]:
    """The values of the file; empty if there is none, or none that can be read."""
    try:
        values = json.loads((folder / GENERATION).read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def ends_of(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end an answer: the tokenizer's end token and those of the file, of which chat models have several."""
    ends = read_generation(folder).get("eos_token_id")
    ids = [token for token in (ends if isinstance(ends, list) else [ends]) if type(token) is int and token >= 0]
    return frozenset([tokenizer.end, *ids])


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
    readers = [Reader(tokenizer, stop, prompt, ends) for prompt in prompts]
    texts: list[list[str]] = [[] for _ in prompts]
    for n, prompt in enumerate(prompts):
        # Each prompt has its own seed, so the same prompt twice gets two different answers.
        own = sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + (n << 32))
        engine.add(Request(str(n), tuple(prompt), max_tokens, own, stop_tokens=ends))
    while not engine.idle:
        for output in engine.step():
            number = int(output.request)
            made, reader = found[number], readers[number]
            if output.finish == "abort":
                raise UserError(
                    "the model's scores are not finite numbers, so no token can be drawn from them; are its weights?"
                )
            for token in output.tokens:
                if not reader.stopped:
                    made.tokens.append(token)
                    texts[number].append(reader.add(token)[0])
            if output.finish:
                texts[number].append(reader.end())
                made.ended_by = "end" if output.finish == "stop" else "length"
            if reader.stopped:
                made.ended_by = "stop"
                engine.finish(output.request, 0)
    for made, text in zip(found, texts, strict=True):
        made.text = "".join(text)
    return found
