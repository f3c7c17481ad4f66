"""fp8 GEMMs by the algorithm tuned for their shape, where each operand has one scale. `scaled_mm` of `quantized/fp8.py` is the
reference, and returns the same numbers to the last bit."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.model.gemm.tuned import multiply_into, worth_tuning
from shardwise.model.quantized.fp8 import scaled_mm


@torch.library.custom_op(
    "shardwise::fp8_gemm",
    mutates_args=(),
    schema="(Tensor left, Tensor right, Tensor left_scale, Tensor right_scale, ScalarType dtype, bool fast) -> Tensor",
)
def fp8_gemm(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    """`left @ right` of two fp8 matrices, the second column-major, times their scales."""
    out = left.new_empty((left.shape[0], right.shape[1]), dtype=dtype)
    if multiply_into(left, right, out, None, (left_scale, right_scale), fast):
        return out
    del out
    return scaled_mm(left, right.t(), (left_scale, right_scale), dtype, fast=fast)


@fp8_gemm.register_fake
def _(left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    return left.new_empty((left.shape[0], right.shape[1]), dtype=dtype)


@torch.library.custom_op(
    "shardwise::fp8_gemm_onto",
    mutates_args=(),
    schema="(Tensor left, Tensor right, Tensor left_scale, Tensor right_scale, ScalarType dtype, bool fast, Tensor base) -> Tensor",
)
def fp8_gemm_onto(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype, fast: bool, base: Tensor
) -> Tensor:
    """The same, accumulated onto `base` and rounded once."""
    base, out = base.contiguous(), left.new_empty((left.shape[0], right.shape[1]), dtype=dtype)
    if multiply_into(left, right, out, base, (left_scale, right_scale), fast):
        return out
    del out
    wide = scaled_mm(left, right.t(), (left_scale, right_scale), torch.float32, fast=fast)
    return (base.float() + wide).to(dtype)


@fp8_gemm_onto.register_fake
def _(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype, fast: bool, base: Tensor
) -> Tensor:
    return left.new_empty((left.shape[0], right.shape[1]), dtype=dtype)


def tuned_scaled_mm(
    left: Tensor, right: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """`scaled_mm`, by the tuned algorithm where the GEMM is large enough; with a scale for each row, by PyTorch's."""
    if any(scale.dim() for scale in scales) or not worth_tuning(left, right.t()):
        return scaled_mm(left, right, scales, dtype, fast=fast)
    return fp8_gemm(left, right.t(), *scales, dtype, fast)
