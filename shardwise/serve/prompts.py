"""Logprobs of the tokens of prompts. All logits of a long prompt are gigabytes in float32, so the head is applied to some tokens at
a time, and only the logprobs that were asked for are kept. Every rank that holds a part of the head does this in the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardwise.plan.serving.pool import PROMPT_ROWS
from shardwise.serve.sampler import Picked, logprobs_of, send


class Wanted(NamedTuple):
    """Tokens of a prompt whose logprobs a step makes."""

    first: int
    """How many of the sequence's new tokens come before the one that predicts the first of them."""
    tokens: Sequence[int]
    top: int
    """How many of the likeliest tokens are returned beside each."""


def score_prompts(
    hidden: Tensor, asked: Sequence[tuple[int, Wanted]], head: Callable[[Tensor], Tensor], invariant: bool
) -> Picked:
    """The logprobs that are asked of some sequences, one after the other. `hidden`: the last hidden state of each new token of a
    step; with each `Wanted` goes the place of its sequence's first new token there."""
    places = [at + wanted.first + n for at, wanted in asked for n in range(len(wanted.tokens))]
    tokens = [token for _, wanted in asked for token in wanted.tokens]
    most = max(wanted.top for _, wanted in asked)
    there, following = send(np.asarray((places, tokens), np.int64), hidden.device)
    parts = zip(there.split(PROMPT_ROWS), following.split(PROMPT_ROWS), strict=True)
    found = [logprobs_of(head(hidden[some]), told, most, invariant) for some, told in parts]
    likeliest, values = (torch.cat([top[n] for _, top in found]) for n in (0, 1))
    return Picked(following, torch.cat([logprobs for logprobs, _ in found]), (likeliest, values))
