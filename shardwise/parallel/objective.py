"""What a pipeline needs of an objective: how the last stage computes a microbatch's loss, and the weights of auxiliary losses.

The objectives themselves are in `train/objectives/`. A loss is a sum over the tokens or documents of a microbatch, so that
microbatches, data ranks and context ranks add up. It is divided by the objective's count over the global batch once that is known.

A document is cut over context ranks like its row. A sum over its tokens is then all-reduced over them: microbatch x sequence
elements per sum, in the forward pass only. Every context rank computes the same loss from these sums and takes its share of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.parallel.collectives import Collective, Group, all_reduced

Microbatch = dict[str, Tensor]
"""Tokens, positions and, where rows have several, documents, and the objective's other inputs for each token."""


class Objective(ABC):
    """Computes the loss of a microbatch."""

    auxiliary_weights: Tensor
    """Factors on the (balance, z) losses of routers, relative to a main loss of weight 1."""

    @abstractmethod
    def loss(self, microbatch: Microbatch, head: nn.Module, hidden: Tensor, unembedding: Tensor) -> Tensor:
        """The sum of a term per token. `hidden` are the normed hidden states, `head` one of `model/loss.py`: it computes terms from
        hidden states, the unembedding matrix and targets without holding the logits of all tokens."""


def document_sums(values: Tensor, documents: Tensor, group: Group) -> Tensor:
    """Sums over documents [n, rows, slots] of per-token values [n, rows, length], of which this rank of the group (that of the
    context axis) has its shard; `documents` [rows, length] numbers the documents of each row. The number of slots is the number of
    tokens in a full row.

    The gradient is that of a loss of which every rank has its share: the loss that all compute from the same sums, divided by the
    number of ranks.
    """
    ranks = 1 if group is None else dist.get_world_size(group)
    slots = documents.shape[1] * ranks
    rows = torch.arange(len(documents), device=documents.device)[:, None] * slots
    # In one dimension, where PyTorch has a deterministic scatter_add on GPUs too.
    place = (rows + documents).flatten().expand(len(values), -1) + (
        torch.arange(len(values), device=values.device)[:, None] * (len(documents) * slots)
    )
    sums = values.new_zeros(len(values) * len(documents) * slots).scatter_add(0, place.flatten(), values.flatten())
    sums = sums.view(len(values), len(documents), slots)
    if group is None:
        return sums
    # The shares' gradients are identical, and add up.
    return Collective.apply(sums, lambda x: all_reduced(x.clone(), group), lambda grad: grad * ranks)
