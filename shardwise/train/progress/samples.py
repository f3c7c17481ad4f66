"""Text samples at an evaluation: the current network continues the first tokens of some validation sequences.

Each token costs a forward pass over a microbatch with training's shape: nothing is recompiled, and it needs no more memory than a
training step. All ranks take part and do the same, because shards and experts are spread over them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.data.batches import Samples
from shardwise.data.order import key_of
from shardwise.data.tokenizer import Tokenizer
from shardwise.parallel.shard import end_forward_passes
from shardwise.run.rules.objective import prompt_tokens
from shardwise.train.step import TrainState

_DRAWS = 6
"""Separates this use of the seed from others."""


def sample_texts(
    state: TrainState, validation: Samples, chosen: np.ndarray, tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """Texts that continue the chosen samples, as `prompt` and `text`, sampled at temperature 1; the seed and the step determine
    them."""
    train, length = state.run.train, prompt_tokens(state.run)
    found: list[dict[str, Any]] = []
    for first in range(0, len(chosen), train.microbatch):
        own = chosen[first : first + train.microbatch]
        rows = validation.take(np.concatenate((own, np.full(train.microbatch - len(own), own[0])))).tokens
        made = continued(state, torch.from_numpy(rows[:, :length]), train.sample_tokens, first)
        for row in made[: len(own)].tolist():
            text = row[length:]
            text = text[: text.index(tokenizer.end)] if tokenizer.end in text else text
            found.append(dict(prompt=tokenizer.decode(row[:length]), text=tokenizer.decode(text)))
    return found


@torch.no_grad()
def continued(state: TrainState, prompts: Tensor, tokens: int, place: int) -> Tensor:
    """The prompts, each continued by `tokens` sampled tokens. Each row has its own random generator, keyed by its index (`place` is
    the first row's), so that the microbatch size does not change the samples."""
    run = state.run
    state.refresh()
    (model,) = state.parallel.models
    model.eval()
    start = prompts.shape[1]
    rows = torch.zeros((len(prompts), run.train.seq_len), dtype=torch.int64, device=state.device)
    rows[:, :start] = prompts.to(state.device)
    keys = key_of(run.train.seed, _DRAWS, state.step, np.arange(place, place + len(prompts)))
    draws = [torch.Generator().manual_seed(int(key >> np.uint64(1))) for key in keys]
    for at in range(start, start + tokens):

        def scores(hidden: Tensor, unembedding: Tensor, at: int = at) -> Tensor:
            return hidden[:, at - 1] @ unembedding.to(hidden.dtype).T

        logits = model(rows, finish=scores).result.float().cpu()
        chances = torch.softmax(torch.nan_to_num(logits, nan=0.0, posinf=0.0, neginf=-1e30), -1)
        drawn = [torch.multinomial(each, 1, generator=draw) for each, draw in zip(chances, draws, strict=True)]
        rows[:, at] = torch.cat(drawn).to(rows.device)
    end_forward_passes(model, state.mesh)
    return rows[:, : start + tokens].cpu()
