"""What a pipeline needs of an objective: how the last stage makes the loss of a microbatch, and what auxiliary losses weigh.

The objectives themselves are in `train/objectives/`. A loss is a sum over the tokens of a microbatch, so that microbatches, data
ranks and context ranks add up; it is divided by what the objective counts over the global batch once that is known.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

Microbatch = dict[str, Tensor | None]
"""Tokens, positions and documents, and what the objective wants to know of each token."""


class Objective(ABC):
    """Makes the loss of a microbatch."""

    auxiliary_weights: Tensor
    """Factors on the (balance, z) losses of routers, beside a loss of weight 1."""

    @abstractmethod
    def loss(self, microbatch: Microbatch, head: nn.Module, hidden: Tensor, unembedding: Tensor) -> Tensor:
        """The sum over tokens of their terms. `hidden` are the normed hidden states, `head` one of `model/loss.py`: it makes
        terms of hidden states, the unembedding matrix and targets without holding the logits of all tokens."""
