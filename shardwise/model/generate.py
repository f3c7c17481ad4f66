"""Continuing token sequences: greedy or sampled, with or without the key/value cache, several prompts at once.

Prompts of different lengths are padded on the left; the padding is a document of its own, so no token sees it and
positions count from each prompt's first token. Every row draws from a generator of its own, a function of (seed, row).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.model.cache import ContiguousCache
from shardwise.model.transformer import Transformer
from shardwise.run import UserError


@dataclass(frozen=True)
class Sampling:
    """How the next token is picked: temperature 0 takes the likeliest; top_k and top_p cut the tail first."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def generator(seed: int, name: str) -> torch.Generator:
    """A generator on the CPU, so that the values are the same for every device."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def pick(logits: Tensor, sampling: Sampling, source: torch.Generator) -> int:
    """The next token from one row of scores."""
    if not logits.isfinite().any() or logits.isnan().any() or logits.isposinf().any():
        raise UserError(
            "the model's scores are not finite numbers, so no token can be drawn from them; are its weights?"
        )
    if sampling.temperature == 0:
        return int(logits.argmax())
    # Below the highest, so that a temperature near 0 leaves that one at 0 and drives the others away, not all to infinity.
    scores = logits.double() - logits.max()
    scores, tokens = (scores / sampling.temperature).sort(descending=True, stable=True)
    if sampling.top_k:
        scores, tokens = scores[: sampling.top_k], tokens[: sampling.top_k]
    probabilities = scores.softmax(dim=-1)
    if sampling.top_p < 1:
        # Keep the fewest tokens that reach top_p together: those before which less than top_p has been gathered.
        keep = probabilities.cumsum(0) - probabilities < sampling.top_p
        probabilities, tokens = probabilities[keep], tokens[keep]
    return int(tokens[torch.multinomial(probabilities, 1, generator=source)])


@torch.inference_mode()
def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    sampling: Sampling,
    finished: Callable[[list[int]], bool] = lambda tokens: False,
    use_cache: bool = True,
) -> list[list[int]]:
    """New tokens for each prompt, at most `max_tokens`; `finished` is asked after each token of a row."""
    longest = max(len(p) for p in prompts)
    if min(len(p) for p in prompts) == 0:
        raise UserError("an empty prompt has no last token to continue; give at least one character")
    if model.config.position == "learned" and longest + max_tokens > model.config.max_positions:
        raise UserError(
            f"a prompt of {longest} tokens and {max_tokens} new ones exceed the model's {model.config.max_positions} "
            f"learned positions; ask for at most {max(0, model.config.max_positions - longest)}"
        )
    device = next(model.parameters()).device
    pad = torch.tensor([longest - len(p) for p in prompts])
    tokens = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
    uneven = bool(pad.any())
    sources = [generator(sampling.seed, f"row {row}") for row in range(len(prompts))]
    cache = ContiguousCache(model.config.layers, len(prompts), longest + max_tokens, device) if use_cache else None
    made: list[list[int]] = [[] for _ in prompts]
    done = [False] * len(prompts)
    for _ in range(max_tokens):
        start = cache.used if cache is not None else 0
        slots = torch.arange(start, tokens.shape[1])[None]
        logits = model(
            tokens[:, start:].to(device),
            positions=(slots - pad[:, None]).clamp(min=0).to(device),
            documents=(slots >= pad[:, None]).int().to(device) if uneven else None,
            cache=cache,
        ).result[:, -1]
        logits = logits.float().cpu()
        following = [pick(logits[row], sampling, sources[row]) for row in range(len(prompts))]
        for row, token in enumerate(following):
            if not done[row]:
                made[row].append(token)
                done[row] = finished(made[row])
        if all(done):
            break
        tokens = torch.cat((tokens, torch.tensor(following)[:, None]), dim=1)
    return made
