"""Attention with linear biases (ALiBi, Press et al. 2022): a score falls by its head's slope for each position that the key lies
back.

Softmax does not see what is added to all scores of a query, so it is enough to add slope x position of the key, and a dot product
adds it by itself: keys get their position as further elements, queries the slope. So every kernel, page and exchange between
devices that takes heads takes these too, a little wider, and no matrix of biases is made. 16 bits hold neither a position nor a
slope exactly: the position is written in digits to the base of 256, the slope as a value and what was rounded off.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from shardwise.model.rope import Rope
from shardwise.run import ModelConfig

BASE = 256
"""Digits below it are exact in bfloat16. Three of them write positions below 2^24."""


def alibi_slopes(heads: int, device: torch.device | str) -> Tensor:
    """The slope of each head: 2^(-8 n/heads), n from 1 on. Where heads are no power of two, those of the next smaller power, then
    every second one of the next larger."""
    below = 1 << (heads.bit_length() - 1)
    number = torch.arange(1, heads + 1, dtype=torch.float64, device=device)
    return 2.0 ** torch.where(number <= below, -8.0 * number / below, -4.0 * (2.0 * (number - below) - 1.0) / below)


def alibi_elements(
    config: ModelConfig, positions: Tensor, dtype: torch.dtype, first: int = 0, heads: int | None = None
) -> Rope:
    """What queries [1, 1, heads, elements] and keys [batch, sequence, 1, elements] get beside their own, for `heads` heads from the
    `first` on (None: all)."""
    slopes = alibi_slopes(config.heads, positions.device)[first : None if heads is None else first + heads]
    slopes = slopes * config.head_dim**0.5  # which scores are divided by
    rounded = slopes.to(dtype)
    rest = (slopes - rounded.to(torch.float64)).to(dtype)
    # Of what the highest digit counts, one half stands with the slope: float16 holds no more.
    digits = [positions // BASE**2 * BASE, positions // BASE % BASE, positions % BASE]
    for_queries = [part * worth for part in (rounded, rest) for worth in (BASE, BASE, 1)]
    for_keys = [digit.to(dtype) for digit in (*digits, *digits)]
    none = config.key_dim - config.head_dim - len(for_keys)
    for_queries += [torch.zeros_like(rounded)] * none
    for_keys += [torch.zeros_like(for_keys[0])] * none
    return torch.stack(for_queries, dim=-1)[None, None], torch.stack(for_keys, dim=-1)[:, :, None]


def alibi_of_rank(config: ModelConfig, ranks: int, rank: int) -> Callable[[ModelConfig, Tensor, torch.dtype], Rope]:
    """The same on one of some devices that have as many heads each."""
    heads = config.heads // ranks
    return partial(alibi_elements, first=rank * heads, heads=heads)


def with_elements(x: Tensor, elements: Tensor) -> Tensor:
    """Heads [batch, sequence, heads, width] with further elements behind their own."""
    return torch.cat((x, elements.expand(*x.shape[:-1], -1)), dim=-1)
