"""What a pipeline needs of an objective: how the last stage makes the loss of a microbatch, and what auxiliary losses weigh.

The objectives themselves are in `train/objectives/`. A loss is a sum over the tokens or documents of a microbatch, so that
microbatches, data ranks and context ranks add up; it is divided by what the objective counts over the global batch once that is
known.

A document is cut over context ranks as its row is. A sum over its tokens is then all-reduced over them: microbatch x sequence
elements for each sum, forward alone. Every context rank makes the same loss of these sums and takes its share of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.parallel.collectives import Group

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


def document_sums(values: Tensor, documents: Tensor, group: Group) -> Tensor:
    """Sums over documents [n, rows, slots] of numbers of each token [n, rows, length], of which this rank of the group (that of the
    context axis) has its part; `documents` [rows, length] numbers the documents of each row. There are as many slots as a whole row
    has tokens.

    The gradient is that of a loss of which every rank has its share: what all make of the same sums, divided by their number.
    """
    ranks = 1 if group is None else dist.get_world_size(group)
    slots = documents.shape[1] * ranks
    rows = torch.arange(len(documents), device=documents.device)[:, None] * slots
    # In one dimension, where PyTorch has a deterministic sum on GPUs too.
    place = (rows + documents).flatten().expand(len(values), -1) + (
        torch.arange(len(values), device=values.device)[:, None] * (len(documents) * slots)
    )
    sums = values.new_zeros(len(values) * len(documents) * slots).scatter_add(0, place.flatten(), values.flatten())
    sums = sums.view(len(values), len(documents), slots)
    return sums if group is None else _SharedSum.apply(sums, group, ranks)


class _SharedSum(torch.autograd.Function):
    """A sum over ranks that all make the same loss of, each its share: the gradients of the shares are alike, and add up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, ranks: int) -> Tensor:
        ctx.ranks = ranks
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] * ctx.ranks, None, None
