"""AWQ (Lin et al. 2023): input channels with large inputs matter more, so their weights are scaled up before rounding, and the
scale is divided out of the layer that produces the input. The scales are searched: they are the mean input magnitudes to a power
between 0 and 1 (eq. 5), the one whose rounded matrices change the output least. Then the range of each group is clipped where that
helps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.model.quantized.matrix import QuantizedMatrix
from shardwise.model.quantized.rounding import assembled, integers_of, scales_of, stored_scale_dtype
from shardwise.run.weights import WeightFormat

POWERS = tuple(n / 20 for n in range(20))
RANGES = tuple(1 - n / 20 for n in range(11))
"""Fractions of a group's range that are tried."""


def rounded(weight: Tensor, form: WeightFormat, dtype: torch.dtype, keep: Tensor | float = 1.0) -> tuple[Tensor, ...]:
    """The quantized numbers in groups [..., out, groups, group], their scales, and their zero points if there are any. `keep`: the
    fraction of each group's range that is kept."""
    groups = weight.unflatten(-1, (-1, form.group_of(weight.shape[-1])))
    shrunk = groups * keep if isinstance(keep, float) else groups * keep[..., None]
    scale, zero = scales_of(shrunk, form, stored_scale_dtype(form, dtype))
    integers = integers_of(groups, scale[..., None], None if zero is None else zero[..., None], form)
    return (integers, scale) if zero is None else (integers, scale, zero)


def _values(parts: tuple[Tensor, ...], form: WeightFormat, like: Tensor) -> Tensor:
    integers, scale, *zeros = parts
    offset: Tensor | int = 0
    if form.kind == "int4":
        offset = zeros[0].to(like.dtype)[..., None] if zeros else 8
    return ((integers.to(like.dtype) - offset) * scale.to(like.dtype)[..., None]).flatten(-2)


def output_error(change: Tensor, products: Tensor) -> Tensor:
    """The squared change of a matrix's outputs, summed over out: [...], for a change [..., out, in] of the matrix."""
    return ((change @ products) * change).sum((-2, -1))


def search_scales(
    matrices: Sequence[tuple[Tensor, Tensor]], sizes: Tensor, form: WeightFormat, dtype: torch.dtype, shared: bool
) -> Tensor:
    """The scale of each input channel, for matrices [..., out, in] with the sums of outer products of their inputs, and the mean
    magnitudes [..., in] of these inputs. `shared`: experts share the scales."""
    best = torch.ones_like(sizes)
    least: Tensor | None = None
    for power in POWERS:
        scale = sizes.clamp(min=1e-8) ** power
        scale = scale / (scale.amax(-1, keepdim=True) * scale.amin(-1, keepdim=True)).sqrt()
        errors = []
        for weight, products in matrices:
            by_column = scale.unsqueeze(-2)
            made = _values(rounded(weight * by_column, form, dtype), form, weight) / by_column
            errors.append(output_error(made - weight, products))
        error = torch.stack([each.sum() if shared else each for each in errors]).sum(0)
        if least is None:
            least, best = error, scale
        else:
            better = (error < least).unsqueeze(-1) if error.ndim else error < least
            best, least = torch.where(better, scale, best), torch.minimum(error, least)
    return best


def clipped(
    weight: Tensor, products: Tensor, form: WeightFormat, dtype: torch.dtype, clip: bool = True
) -> QuantizedMatrix | None:
    """A matrix [out, in] rounded to nearest within the range of each group, or, with `clip`, within the fraction of the range that
    changes outputs least."""
    group = form.group_of(weight.shape[-1])
    if not group:
        return None
    groups = weight.unflatten(-1, (-1, group))
    inside = torch.stack([products[n : n + group, n : n + group] for n in range(0, weight.shape[1], group)])
    best, least = torch.ones(groups.shape[:2], device=weight.device), None
    for share in RANGES if clip else ():
        keep = torch.full_like(best, share)
        change = _values(rounded(weight, form, dtype, keep), form, weight).view_as(groups) - groups
        error = (torch.einsum("ogi,gij->ogj", change, inside) * change).sum(-1)
        if least is None:
            least = error
        else:
            best, least = torch.where(error < least, keep, best), torch.minimum(error, least)
    integers, scale, *zeros = rounded(weight, form, dtype, best)
    return assembled(integers.flatten(-2), scale, zeros[0] if zeros else None, form, dtype)
