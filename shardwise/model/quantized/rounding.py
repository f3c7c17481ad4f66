"""Rounds matrices to the nearest numbers of a format, each by itself: the simplest way, which needs no data.

Scales are rounded to their stored dtype before they are used, so that a weight is rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.model.quantized.matrix import QuantizedMatrix, pack_int4
from shardwise.run.weights import WeightFormat

TOP = {"fp8": torch.finfo(torch.float8_e4m3fn).max, "int8": 127.0}
"""The largest number of each 8-bit format."""


def scales_of(groups: Tensor, form: WeightFormat, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Scales and zero points [...] of weights [..., group]: from the range of the weights, or from the largest magnitude alone."""
    if form.kind != "int4":
        scale = (groups.abs().amax(-1) / TOP[form.kind]).to(scale_dtype)
        return _not_zero(scale), None
    if not form.zeros:  # -8 to 7: the negative side has one step more
        scale = torch.maximum(groups.amax(-1) / 7, -groups.amin(-1) / 8).to(scale_dtype)
        return _not_zero(scale), None
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = _not_zero(((high - low) / 15).to(scale_dtype))
    zero = (-low / scale.to(low.dtype)).round().clamp(0, 15)
    return scale, zero.to(torch.uint8)


def _not_zero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def integers_of(weight: Tensor, scale: Tensor, zero: Tensor | None, form: WeightFormat) -> Tensor:
    """The nearest numbers of the format; scales (and zeros) broadcast against the weights. int4 values are 0 to 15."""
    scaled = weight / scale.to(weight.dtype)
    if form.kind == "fp8":
        return scaled.clamp(-TOP["fp8"], TOP["fp8"]).to(torch.float8_e4m3fn)
    if form.kind == "int8":
        return scaled.round().clamp(-127, 127).to(torch.int8)
    offset = 8 if zero is None else zero.to(weight.dtype)
    return (scaled.round() + offset).clamp(0, 15).to(torch.uint8)


def values_of(integers: Tensor, scale: Tensor, zero: Tensor | None, form: WeightFormat, dtype: torch.dtype) -> Tensor:
    """The weights that numbers of the format stand for."""
    offset = 0 if form.kind != "int4" else 8 if zero is None else zero.to(dtype)
    return (integers.to(dtype) - offset) * scale.to(dtype)


def stored_scale_dtype(form: WeightFormat, dtype: torch.dtype) -> torch.dtype:
    """The dtype of stored scales: 16 bits for int4 weights, float32 for 8-bit weights, which have few scales."""
    if form.kind != "int4":
        return torch.float32
    return torch.float16 if dtype == torch.float16 else torch.bfloat16


def rounded_groups(
    weight: Tensor, form: WeightFormat, dtype: torch.dtype, keep: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The nearest numbers in groups [..., out, groups, group], their scales, and their zero points if there are any, of weights
    [..., out, in]. `keep` [out, groups]: the fraction of each group's range that is kept."""
    groups = weight.unflatten(-1, (-1, form.group_of(weight.shape[-1])))
    kept = groups if keep is None else groups * keep[..., None]
    scale, zero = scales_of(kept, form, stored_scale_dtype(form, dtype))
    integers = integers_of(groups, scale[..., None], None if zero is None else zero[..., None], form)
    return integers, scale, zero


def assembled(
    integers: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    form: WeightFormat,
    dtype: torch.dtype,
    order: Tensor | None = None,
) -> QuantizedMatrix:
    """A matrix from numbers of a format [..., out, in] and scales (and zeros) [..., out, groups]."""
    packed = integers
    if form.kind == "int4":
        packed = pack_int4(integers, integers.shape[-1] // scale.shape[-1])
    zero = None if zero is None else zero.contiguous()
    return QuantizedMatrix(packed.contiguous(), scale.contiguous(), zero, form, dtype, order)


def round_matrix(weight: Tensor, form: WeightFormat, dtype: torch.dtype | None = None) -> QuantizedMatrix | None:
    """A matrix, or a stack, rounded to nearest; None where int4 groups do not fit its rows. `dtype` is the compute dtype."""
    dtype = dtype or weight.dtype
    if not form.group_of(weight.shape[-1]):
        return None
    if weight.ndim > 2:  # one at a time, so that little more than the result is held
        made = [round_matrix(each, form, dtype) for each in weight]
        return QuantizedMatrix.joined([each for each in made if each is not None], stack=True)
    wide = weight if weight.dtype == torch.float64 else weight.float()
    integers, scale, zero = rounded_groups(wide, form, dtype)
    return assembled(integers.flatten(-2), scale, zero, form, dtype)
