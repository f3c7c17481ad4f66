"""The interface of a compression method: it sums tensors over replicas, and may keep its own tensors from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

State = dict[str, Tensor]
"""Tensors kept for a parameter, by name: part of the train state. Those shaped like the gradient are this replica's own."""


class Compressor(Protocol):
    """Sums gradients over the ranks of a group, approximately."""

    states: list[State]
    """One for each tensor, in the order they are given."""

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the ranks, as far as it was sent. Every rank calls it, and gets the same result."""


def zeros_like(x: Tensor) -> Tensor:
    """Contiguous zeros, whatever the tensor is a view of."""
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
