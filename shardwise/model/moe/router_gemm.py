"""A router's GEMM on a GPU: 16-bit tokens times float32 weights, nearly as exact as float32 and as fast as 16 bits.

A float32 value is exactly the sum of three bfloat16 values. The product of two bfloat16 values is exact in float32, in which the
tensor cores accumulate. So the three parts of the small weight matrix are concatenated, one bfloat16 GEMM reads the tokens once,
uncast, and three columns are added up for each expert. The reference implementation, in `Router`, casts the tokens to float32,
saves that copy, and multiplies without the tensor cores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.model.operator import differentiate, operator, shape_of


def multiplies(x: Tensor) -> bool:
    """Whether tokens like these are multiplied by weights split into parts."""
    return x.is_cuda and x.dtype == torch.bfloat16


def in_parts(x: Tensor) -> list[Tensor]:
    """bfloat16 tensors that add up to `x`: one if it is bfloat16, three if it is float32."""
    if x.dtype == torch.bfloat16:
        return [x]
    high = x.to(torch.bfloat16)
    rest = x - high
    middle = rest.to(torch.bfloat16)
    return [high, middle, (rest - middle).to(torch.bfloat16)]


def _wide(left: Tensor, right: Tensor) -> Tensor:
    """The product of bfloat16 matrices, in float32."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


@operator("router_gemm(Tensor x, Tensor weight) -> Tensor", differentiable=True)
def router_gemm(x: Tensor, weight: Tensor) -> Tensor:
    """Tokens [tokens, hidden] of bfloat16 times weights [hidden, experts] of bfloat16 or float32, in float32."""
    parts = in_parts(weight.mT)
    return _wide(x, torch.cat(parts).mT).view(len(x), len(parts), -1).sum(dim=1)


@shape_of(router_gemm)
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[1]), dtype=torch.float32)


@operator("router_grad_input(Tensor gradient, Tensor weight) -> Tensor")
def router_grad_input(gradient: Tensor, weight: Tensor) -> Tensor:
    """Gradients [tokens, experts] times weights [experts, hidden], in bfloat16.

    The result is rounded to 8 bits, so the product of the largest parts and those of each with the other's second part are enough.
    """
    (high, middle, _), (top, *low) = in_parts(gradient), in_parts(weight)
    left, right = (
        (torch.cat((high, high, middle), dim=1), torch.cat((top, low[0], top)))
        if low
        else (torch.cat((high, middle), dim=1), torch.cat((top, top)))
    )
    return left @ right


@shape_of(router_grad_input)
def _(gradient: Tensor, weight: Tensor) -> Tensor:
    return gradient.new_empty((gradient.shape[0], weight.shape[1]), dtype=torch.bfloat16)


@operator("router_grad_weight(Tensor gradient, Tensor x) -> Tensor")
def router_grad_weight(gradient: Tensor, x: Tensor) -> Tensor:
    """Gradients [experts, tokens] times tokens [tokens, hidden] of bfloat16, in float32."""
    parts = in_parts(gradient.mT)
    return _wide(torch.cat(parts, dim=1).mT, x).view(len(parts), len(gradient), -1).sum(dim=0)


@shape_of(router_grad_weight)
def _(gradient: Tensor, x: Tensor) -> Tensor:
    return gradient.new_empty((gradient.shape[0], x.shape[1]), dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)


def _back(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
    x, weight = ctx.saved_tensors
    to_weight = None if x is None else router_grad_weight(gradient.mT, x).to(weight.dtype).mT
    return router_grad_input(gradient, weight.mT), to_weight


differentiate(router_gemm, _back, _keep)
