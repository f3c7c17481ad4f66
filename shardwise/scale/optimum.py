"""The best size of a model for an amount of compute, with its inference included, and the cost of other sizes.

Everything is found on a grid of sizes that is refined around the best, so that it works for any law.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shardwise.scale.minimize import Array
from shardwise.scale.points import FLOPS_PER_TOKEN

Loss = Callable[[Array, Array], Array]
"""A function from parameters and tokens to the loss."""
SERVED = 2.0
"""FLOPs per parameter and token that a served model reads or writes: only the forward pass."""
_GRID, _ROUNDS = 65, 12
_SIZES = (1e5, 1e15)


@dataclass(frozen=True)
class Optimum:
    """A model size, its training tokens and its loss."""

    params: float
    tokens: float
    loss: float

    @property
    def flops(self) -> float:
        """FLOPs of training."""
        return FLOPS_PER_TOKEN * self.params * self.tokens


def best_size(loss: Loss, flops: float, served: float = 0.0) -> Optimum:
    """The size with the lowest loss for `flops` FLOPs, which include serving `served` tokens: 6 N D + 2 N T = C."""

    def tokens_of(params: Array) -> Array:
        return (flops - SERVED * params * served) / (FLOPS_PER_TOKEN * params)

    def value(params: Array) -> Array:
        tokens = tokens_of(params)
        found = loss(params, np.maximum(tokens, 1.0))
        return np.where(tokens >= 1.0, found, np.inf)

    params = _lowest(value)
    tokens = float(tokens_of(np.array([params]))[0])
    return Optimum(params, tokens, float(value(np.array([params]))[0]))


def cheapest(loss: Loss, target: float, served: float = 0.0) -> Optimum | None:
    """The size that reaches a loss with the fewest FLOPs of training and serving together (Sardana et al. 2024, eq. 2); None where
    no size reaches it by the law."""

    def value(params: Array) -> Array:
        tokens = tokens_for(loss, params, target)
        return np.where(np.isfinite(tokens), FLOPS_PER_TOKEN * params * tokens + SERVED * params * served, np.inf)

    params = _lowest(value)
    tokens = float(tokens_for(loss, np.array([params]), target)[0])
    return Optimum(params, tokens, target) if np.isfinite(tokens) else None


def tokens_for(loss: Loss, params: Array, target: float) -> Array:
    """The tokens that models need to reach a loss; infinite where they never do. By bisection, since the loss falls with tokens."""
    low, high = np.zeros_like(params), np.full_like(params, 60.0)
    reached = loss(params, np.exp(high)) <= target
    for _ in range(60):
        middle = 0.5 * (low + high)
        done = loss(params, np.exp(middle)) <= target
        low, high = np.where(done, low, middle), np.where(done, middle, high)
    return np.where(reached, np.exp(high), np.inf)


def deviations(
    loss: Loss, best: Optimum, factors: tuple[float, ...] = (0.25, 0.5, 2.0, 4.0)
) -> list[tuple[float, float, float]]:
    """For models of `factors` times the best size: the factor, the tokens to the same loss, and the ratio of training compute."""
    sizes = best.params * np.array(factors)
    tokens = tokens_for(loss, sizes, best.loss)
    return [
        (factor, float(count), float(factor * count / best.tokens))
        for factor, count in zip(factors, tokens, strict=True)
    ]


def _lowest(value: Callable[[Array], Array]) -> float:
    low, high = np.log(_SIZES[0]), np.log(_SIZES[1])
    for _ in range(_ROUNDS):
        grid = np.linspace(low, high, _GRID)
        found = value(np.exp(grid))
        if not np.isfinite(found).any():
            return float(np.exp(0.5 * (low + high)))
        at = int(np.argmin(found))
        low, high = grid[max(0, at - 1)], grid[min(_GRID - 1, at + 1)]
    return float(np.exp(0.5 * (low + high)))
