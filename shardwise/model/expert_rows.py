"""The experts that tokens choose, tokens in the order of their experts and back, as operators that a compiler takes whole: what
runs is `kernels/`, what is here says shapes and gradients. Each choice of each token has a place among the rows; everything else
follows from the places, so that they alone are kept for the backward pass. How many rows an expert has only the device knows.

The plain implementation of all this is PyTorch's `topk` and `Mixture.dispatch_plain`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def fuses(x: Tensor) -> bool:
    """Whether rows like these are moved by the kernels: on a GPU, in what float32 is wide enough to add up."""
    return x.is_cuda and x.dtype != torch.float64


@torch.library.custom_op("shardwise::best_experts", mutates_args=(), schema="(Tensor scores, int k) -> Tensor")
def best_experts(scores: Tensor, k: int) -> Tensor:
    """The experts of the k highest scores, [..., experts] to [..., k]; of equal ones the first."""
    from shardwise.model.kernels.best_experts import best_experts_fused

    return best_experts_fused(scores, k)


@best_experts.register_fake
def _(scores: Tensor, k: int) -> Tensor:
    return scores.new_empty((*scores.shape[:-1], k), dtype=torch.int64)


@torch.library.custom_op(
    "shardwise::order_by_expert", mutates_args=(), schema="(Tensor chosen, int experts) -> (Tensor, Tensor)"
)
def order_by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The place of each choice [tokens, k] among rows in the order of experts, and how many rows each expert has.

    Choices of one expert stay in order. A choice of an expert that does not exist has no place, -1, and no row.
    """
    from shardwise.model.kernels.expert_order import order_by_expert_fused

    return order_by_expert_fused(chosen, experts)


@order_by_expert.register_fake
def _(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    return chosen.new_empty(chosen.shape, dtype=torch.int32), chosen.new_empty((experts,), dtype=torch.int64)


@torch.library.custom_op(
    "shardwise::spread", mutates_args=(), schema="(Tensor x, Tensor places, SymInt rows) -> Tensor"
)
def spread(x: Tensor, places: Tensor, rows: int) -> Tensor:
    """Each token [tokens, width] at each of its places [tokens, k] among so many rows; rows that are nobody's hold anything."""
    from shardwise.model.kernels.expert_rows import spread_fused

    return spread_fused(x, places, rows)


@spread.register_fake
def _(x: Tensor, places: Tensor, rows: int) -> Tensor:
    return x.new_empty((rows, x.shape[1]))


@torch.library.custom_op("shardwise::collect", mutates_args=(), schema="(Tensor rows, Tensor places) -> Tensor")
def collect(rows: Tensor, places: Tensor) -> Tensor:
    """The rows at the places of each token, added up in the order of its choices."""
    from shardwise.model.kernels.expert_rows import collect_fused

    return collect_fused(rows, places)


@collect.register_fake
def _(rows: Tensor, places: Tensor) -> Tensor:
    return rows.new_empty((places.shape[0], rows.shape[1]))


@torch.library.custom_op(
    "shardwise::weigh", mutates_args=(), schema="(Tensor rows, Tensor places, Tensor weights) -> Tensor"
)
def weigh(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """The rows at the places of each token, added up by weight [tokens, k]."""
    from shardwise.model.kernels.expert_rows import collect_fused

    return collect_fused(rows, places, weights)


@weigh.register_fake
def _(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    return rows.new_empty((places.shape[0], rows.shape[1]))


@torch.library.custom_op(
    "shardwise::weigh_back",
    mutates_args=(),
    schema="(Tensor gradient, Tensor rows, Tensor places, Tensor weights) -> (Tensor, Tensor)",
)
def weigh_back(gradient: Tensor, rows: Tensor, places: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `weigh` for its rows and its weights."""
    from shardwise.model.kernels.expert_rows import weigh_back_fused

    return weigh_back_fused(gradient, rows, places, weights)


@weigh_back.register_fake
def _(gradient: Tensor, rows: Tensor, places: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), weights.new_empty(weights.shape)


def _keep_places(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.rows = inputs[0].shape[0]


def _spread_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return collect(gradient, ctx.saved_tensors[0]), None, None


def _collect_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return spread(gradient, ctx.saved_tensors[0], ctx.rows), None


def _keep_all(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _weigh_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor]:
    to_rows, to_weights = weigh_back(gradient, *ctx.saved_tensors)
    return to_rows, None, to_weights


spread.register_autograd(_spread_back, setup_context=_keep_places)
collect.register_autograd(_collect_back, setup_context=_keep_places)
weigh.register_autograd(_weigh_back, setup_context=_keep_all)
