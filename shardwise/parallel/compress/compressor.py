"""What a method of compression is: it adds up tensors over replicas, and may keep tensors of its own from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

State = dict[str, Tensor]
"""Tensors kept for a parameter, by name: part of the train state. Those shaped like the gradient are this replica's own."""


class Compressor(Protocol):
    """Adds up gradients over the ranks of a group, roughly."""

    states: list[State]
    """Of each tensor, in the order they are given."""

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the ranks, as far as it was sent. Every rank calls it, and gets the same."""


def zeros_like(x: Tensor) -> Tensor:
    """Zeros that lie in memory one behind the other, whatever the tensor is a view of."""
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
