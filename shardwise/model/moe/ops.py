"""Top-k, dispatch and combine of an MoE layer as custom operators, opaque to the compiler: `kernels/` has the kernels, this file
their shapes and gradients. Each choice of each token has a row index, its place. All routing follows from these places, so no
other routing tensor is saved for the backward pass. Only the device knows how many rows an expert has.

The reference implementation is PyTorch's `topk` and `MoE.forward_routed_reference`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.model.operator import differentiate, operator, shape_of


def has_fused_kernels(x: Tensor) -> bool:
    """Whether the kernels move rows like these: on a GPU, in a dtype that may be summed in float32."""
    return x.is_cuda and x.dtype != torch.float64


@operator("topk_experts(Tensor scores, int k) -> Tensor")
def topk_experts(scores: Tensor, k: int) -> Tensor:
    """The experts of the k highest scores, [..., experts] to [..., k]; of equal scores the first expert wins."""
    from shardwise.model.kernels.moe import topk_experts_fused

    return topk_experts_fused(scores, k)


@shape_of(topk_experts)
def _(scores: Tensor, k: int) -> Tensor:
    return scores.new_empty((*scores.shape[:-1], k), dtype=torch.int64)


@operator("sort_by_expert(Tensor chosen, int experts) -> (Tensor, Tensor)")
def sort_by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The row index of each choice [tokens, k] when rows are ordered by expert, and how many rows each expert has.

    Choices of one expert stay in order. A choice of an expert that does not exist has index -1 and no row.
    """
    from shardwise.model.kernels.moe import sort_by_expert_fused

    return sort_by_expert_fused(chosen, experts)


@shape_of(sort_by_expert)
def _(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    return chosen.new_empty(chosen.shape, dtype=torch.int32), chosen.new_empty((experts,), dtype=torch.int64)


@operator("dispatch(Tensor x, Tensor places, SymInt rows) -> Tensor", differentiable=True)
def dispatch(x: Tensor, places: Tensor, rows: int) -> Tensor:
    """Copy each token [tokens, width] to its row indices [tokens, k] among `rows` rows; rows without a token are undefined."""
    from shardwise.model.kernels.moe import dispatch_fused

    return dispatch_fused(x, places, rows)


@shape_of(dispatch)
def _(x: Tensor, places: Tensor, rows: int) -> Tensor:
    return x.new_empty((rows, x.shape[1]))


@operator("combine(Tensor rows, Tensor places) -> Tensor", differentiable=True)
def combine(rows: Tensor, places: Tensor) -> Tensor:
    """For each token, the sum of the rows at its indices, in the order of its choices."""
    from shardwise.model.kernels.moe import combine_fused

    return combine_fused(rows, places)


@operator("combine_weighted(Tensor rows, Tensor places, Tensor weights) -> Tensor", differentiable=True)
def combine_weighted(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """For each token, the sum of the rows at its indices, weighted by [tokens, k]."""
    from shardwise.model.kernels.moe import combine_fused

    return combine_fused(rows, places, weights)


@shape_of(combine, combine_weighted)
def _(rows: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    return rows.new_empty((places.shape[0], rows.shape[1]))


@operator("combine_weighted_backward(Tensor gradient, Tensor rows, Tensor places, Tensor weights) -> (Tensor, Tensor)")
def combine_weighted_backward(gradient: Tensor, rows: Tensor, places: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `combine_weighted` for its rows and its weights."""
    from shardwise.model.kernels.moe import combine_weighted_backward_fused

    return combine_weighted_backward_fused(gradient, rows, places, weights)


@shape_of(combine_weighted_backward)
def _(gradient: Tensor, rows: Tensor, places: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), weights.new_empty(weights.shape)


def _keep_places(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.rows = inputs[0].shape[0]


def _dispatch_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return combine(gradient, ctx.saved_tensors[0]), None, None


def _combine_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return dispatch(gradient, ctx.saved_tensors[0], ctx.rows), None


def _keep_all(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _combine_weighted_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor]:
    to_rows, to_weights = combine_weighted_backward(gradient, *ctx.saved_tensors)
    return to_rows, None, to_weights


differentiate(dispatch, _dispatch_backward, _keep_places)
differentiate(combine, _combine_backward, _keep_places)
differentiate(combine_weighted, _combine_weighted_backward, _keep_all)
