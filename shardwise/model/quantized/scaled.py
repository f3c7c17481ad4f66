"""Quantisation to fp8 with a scale: the stored value is `x / scale`, rounded to the format.

Scales are powers of two, the smallest that bring the amax into the format's range. Multiplying by such a scale is exact, so a
value is rounded once, wherever and in whatever order it is done: eagerly, compiled, or on a shard. A format's precision is
relative, so the only loss is up to one power of two of range at the low end (Micikevicius et al. 2022 describe the formats: e4m3
with three bits of fraction up to 448, e5m2 with two up to 57344).
The operators are opaque to the compiler, so it computes the same operator of the same tensor only once. Each is a kernel on GPUs
and its reference implementation elsewhere; values that are not finite stay so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.model.operator import operator, shape_of
from shardwise.model.quantized.formats import TOP

LOWEST = 27
"""The exponent of the smallest scale, biased as in float32: two to the power of -100, so that its inverse is finite."""


def scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale for float32 tensors with this amax; the amax itself where it is not finite."""
    bits = amax.view(torch.int32)
    exponent = ((bits >> 23) - TOP[dtype] + ((bits & 0x7FFFFF) > 0x600000)).clamp(min=LOWEST)
    return torch.where(bits >= 0x7F800000, amax, (exponent << 23).view(torch.float32))


def inverse(scale: Tensor) -> Tensor:
    """The exact inverse of a scale; some power of two where the scale is not finite."""
    return ((254 << 23) - (scale.view(torch.int32) & 0x7F800000)).clamp(min=1 << 23).view(torch.float32)


def amax_reference(x: Tensor) -> Tensor:
    """The largest magnitude in a matrix, by rows first: so it can be computed where the matrix is made."""
    return x.abs().amax(dim=-1).amax().float()


def cast_reference(x: Tensor, amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A matrix in fp8 with one scale, and the scale."""
    scale = scale_of(amax, dtype)
    return (x.float() * inverse(scale)).to(dtype), scale


def cast_rows_reference(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A matrix in fp8 with a scale for each row, and the scales [rows, 1]."""
    scale = scale_of(x.abs().amax(dim=-1, keepdim=True).float(), dtype)
    return (x.float() * inverse(scale)).to(dtype), scale


def transpose_reference(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix with a scale for each row, transposed, with a scale for each new row.

    Scales are powers of two, so a value changes only where the new scale makes it too small for the format. A single scale for the
    whole matrix stays the same.
    """
    if not scale.dim():
        return x.t().contiguous(), scale.clone()
    return cast_rows_reference((x.float() * scale).mT.contiguous(), x.dtype)


@operator("amax(Tensor x) -> Tensor")
def amax(x: Tensor) -> Tensor:
    """The largest magnitude in a matrix, in float32; NaN counts as the largest."""
    if not x.is_cuda:
        return amax_reference(x)
    from shardwise.model.kernels.quantize import amax_fused

    return amax_fused(x)


@operator("cast(Tensor x, Tensor amax, ScalarType dtype, bool plain, bool transposed) -> (Tensor, Tensor, Tensor)")
def cast(x: Tensor, amax: Tensor, dtype: torch.dtype, plain: bool, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """A matrix in fp8 as stored and transposed, each where wanted and otherwise empty, and their one scale."""
    if not x.is_cuda:
        values, scale = cast_reference(x, amax, dtype)
        nothing = values.new_empty(0)
        return values if plain else nothing, values.mT.contiguous() if transposed else nothing.clone(), scale
    from shardwise.model.kernels.quantize import cast_fused

    return cast_fused(x, amax, dtype, plain, transposed)


@operator("cast_rows(Tensor x, ScalarType dtype) -> (Tensor, Tensor)")
def cast_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A matrix in fp8 with a scale for each row, and the scales [rows, 1]."""
    if not x.is_cuda:
        return cast_rows_reference(x, dtype)
    from shardwise.model.kernels.quantize import cast_rows_fused

    return cast_rows_fused(x, dtype)


@operator("transpose(Tensor x, Tensor scale, Tensor? after=None) -> (Tensor, Tensor)")
def transpose(x: Tensor, scale: Tensor, after: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """An fp8 matrix transposed, and rescaled if it has a scale for each row. `after` is not used: a compiler that would compute
    this in the forward pass, and save it for the backward pass, has to wait for that tensor."""
    if not x.is_cuda:
        return transpose_reference(x, scale)
    from shardwise.model.kernels.quantize import transpose_fused

    return transpose_fused(x, scale)


@shape_of(amax)
def _(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.float32)


@shape_of(cast)
def _(x: Tensor, amax: Tensor, dtype: torch.dtype, plain: bool, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = x.shape
    as_it_lies = x.new_empty((rows, columns) if plain else (0,), dtype=dtype)
    by_column = x.new_empty((columns, rows) if transposed else (0,), dtype=dtype)
    return as_it_lies, by_column, x.new_empty((), dtype=torch.float32)


@shape_of(cast_rows)
def _(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=dtype), x.new_empty((x.shape[0], 1), dtype=torch.float32)


@shape_of(transpose)
def _(x: Tensor, scale: Tensor, after: Tensor | None = None) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    return x.new_empty(columns, rows), scale.new_empty((columns, 1) if scale.dim() else ())


@operator(
    "scaled_mm_reference(Tensor left, Tensor right, Tensor left_scale, Tensor right_scale, ScalarType dtype) -> Tensor"
)
def scaled_mm_reference(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """`left` [m, k] times `right` [k, n], the reference for `torch._scaled_mm`: the product of the dequantised matrices, summed in
    float32."""
    return ((left.float() @ right.float()) * left_scale * right_scale).to(dtype)


@shape_of(scaled_mm_reference)
def _(left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype) -> Tensor:
    return left.new_empty((left.shape[0], right.shape[1]), dtype=dtype)
