"""Products in 8 bits by the algorithm chosen for their shape, where each operand has one scale. `multiply` of `fp8.py` is the plain
counterpart, and gives the same numbers to the last bit."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.model.fp8 import multiply
from shardwise.model.products.chosen import multiply_into, worth_choosing


@torch.library.custom_op(
    "shardwise::product8",
    mutates_args=(),
    schema="(Tensor left, Tensor right, Tensor left_scale, Tensor right_scale, ScalarType dtype, bool fast) -> Tensor",
)
def product8(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    """`left @ right` of two matrices of 8 bits, the second by columns, times their scales."""
    out = left.new_empty((left.shape[0], right.shape[1]), dtype=dtype)
    if multiply_into(left, right, out, None, (left_scale, right_scale), fast):
        return out
    del out
    return multiply(left, right.t(), (left_scale, right_scale), dtype, fast=fast)


@product8.register_fake
def _(left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    return left.new_empty((left.shape[0], right.shape[1]), dtype=dtype)


@torch.library.custom_op(
    "shardwise::product8_onto",
    mutates_args=(),
    schema="(Tensor left, Tensor right, Tensor left_scale, Tensor right_scale, ScalarType dtype, bool fast, Tensor base) -> Tensor",
)
def product8_onto(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype, fast: bool, base: Tensor
) -> Tensor:
    """`base` and that product added, rounded once."""
    base, out = base.contiguous(), left.new_empty((left.shape[0], right.shape[1]), dtype=dtype)
    if multiply_into(left, right, out, base, (left_scale, right_scale), fast):
        return out
    del out
    wide = multiply(left, right.t(), (left_scale, right_scale), torch.float32, fast=fast)
    return (base.float() + wide).to(dtype)


@product8_onto.register_fake
def _(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype, fast: bool, base: Tensor
) -> Tensor:
    return left.new_empty((left.shape[0], right.shape[1]), dtype=dtype)


def multiply_chosen(
    left: Tensor, right: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """`multiply`, by a chosen algorithm where that matters; with a scale for each row, by PyTorch's."""
    if any(scale.dim() for scale in scales) or not worth_choosing(left, right.t()):
        return multiply(left, right, scales, dtype, fast=fast)
    return product8(left, right.t(), *scales, dtype, fast)
