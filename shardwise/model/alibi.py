"""Attention with linear biases (ALiBi, Press et al. 2022): a score falls by its head's slope for each position that the key is
behind the query.

Softmax ignores a constant added to all scores of a query, so it is enough to add slope x position of the key. The dot product can
add it by itself: keys get their position as extra elements, queries get the slope. So every kernel, page and exchange between
devices that handles heads handles these too, a little wider, and no matrix of biases is needed. 16 bits hold neither a position
nor a slope exactly: the position is split into base-256 digits, the slope into a rounded value and its rounding error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from shardwise.model.rope import Rope
from shardwise.run import ModelConfig

BASE = 256
"""Digits below this base are exact in bfloat16. Three of them write positions below 2^24."""


def alibi_slopes(heads: int, device: torch.device | str) -> Tensor:
    """The slope of each head: 2^(-8 n/heads), n from 1 on. If the number of heads is no power of two, the slopes of the next
    smaller power come first, then every second slope of the next larger power."""
    below = 1 << (heads.bit_length() - 1)
    number = torch.arange(1, heads + 1, dtype=torch.float64, device=device)
    return 2.0 ** torch.where(number <= below, -8.0 * number / below, -4.0 * (2.0 * (number - below) - 1.0) / below)


def alibi_elements(
    config: ModelConfig, positions: Tensor, dtype: torch.dtype, first: int = 0, heads: int | None = None
) -> Rope:
    """The elements appended to queries [1, 1, heads, elements] and keys [batch, sequence, 1, elements], for `heads` heads from
    `first` on (None: all)."""
    slopes = alibi_slopes(config.heads, positions.device)[first : None if heads is None else first + heads]
    slopes = slopes * config.head_dim**0.5  # because attention divides scores by this
    rounded = slopes.to(dtype)
    rest = (slopes - rounded.to(torch.float64)).to(dtype)
    # The highest digit counts 256^2: one factor of 256 multiplies the slope, the other the digit, since float16 holds
    # no more.
    digits = [positions // BASE**2 * BASE, positions // BASE % BASE, positions % BASE]
    for_queries = [part * worth for part in (rounded, rest) for worth in (BASE, BASE, 1)]
    for_keys = [digit.to(dtype) for digit in (*digits, *digits)]
    none = config.key_dim - config.head_dim - len(for_keys)
    for_queries += [torch.zeros_like(rounded)] * none
    for_keys += [torch.zeros_like(for_keys[0])] * none
    return torch.stack(for_queries, dim=-1)[None, None], torch.stack(for_keys, dim=-1)[:, :, None]


def alibi_of_rank(config: ModelConfig, ranks: int, rank: int) -> Callable[[ModelConfig, Tensor, torch.dtype], Rope]:
    """The same on one of `ranks` devices that split the heads evenly."""
    heads = config.heads // ranks
    return partial(alibi_elements, first=rank * heads, heads=heads)


def with_elements(x: Tensor, elements: Tensor) -> Tensor:
    """Heads [batch, sequence, heads, width] with extra elements appended."""
    return torch.cat((x, elements.expand(*x.shape[:-1], -1)), dim=-1)
