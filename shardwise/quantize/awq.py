"""AWQ (Lin et al. 2023): input channels with large inputs matter more, so their weights are scaled up before rounding, and the
scale is divided out of the layer that produces the input. The scales are searched: they are the mean input magnitudes to a power
between 0 and 1 (eq. 5), the one whose rounded matrices change the output least. Then the range of each group is clipped where that
helps, also those of queries and keys, which the paper leaves out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.model.quantized.matrix import QuantizedMatrix
from shardwise.model.quantized.rounding import assembled, rounded_groups, values_of
from shardwise.run.weights import WeightFormat

POWERS = tuple(n / 20 for n in range(20))
RANGES = tuple(1 - n / 100 for n in range(41))
"""Fractions of a group's range that are tried. In steps of 0.05 a model trained here lost a third more."""


def nearest(weight: Tensor, form: WeightFormat, dtype: torch.dtype, keep: Tensor | None = None) -> Tensor:
    """Weights [..., out, in] rounded. `keep` [out, groups]: the fraction of each group's range that is kept."""
    integers, scale, zero = rounded_groups(weight, form, dtype, keep)
    zero = None if zero is None else zero[..., None]
    return values_of(integers, scale[..., None], zero, form, weight.dtype).flatten(-2)


def output_error(change: Tensor, products: Tensor) -> Tensor:
    """The squared change of a matrix's outputs, summed over out: [...], for a change [..., out, in] of the matrix."""
    return ((change @ products) * change).sum((-2, -1))


def search_scales(
    matrices: Sequence[tuple[Tensor, Tensor]], sizes: Tensor, form: WeightFormat, dtype: torch.dtype, shared: bool
) -> Tensor:
    """The scale of each input channel, for matrices [..., out, in] with the sums of outer products of their inputs, and the mean
    magnitudes [..., in] of these inputs. `shared`: experts share the scales."""
    best, least = torch.ones_like(sizes), torch.tensor(torch.inf, device=sizes.device)
    for power in POWERS:
        scale = sizes.clamp(min=1e-8) ** power
        scale = scale / (scale.amax(-1, keepdim=True) * scale.amin(-1, keepdim=True)).sqrt()
        errors = []
        for weight, products in matrices:
            by_column = scale.unsqueeze(-2)
            made = nearest(weight * by_column, form, dtype) / by_column
            errors.append(output_error(made - weight, products))
        error = torch.stack([each.sum() if shared else each for each in errors]).sum(0)
        best, least = torch.where((error < least)[..., None], scale, best), torch.minimum(error, least)
    return best


def clipped(weight: Tensor, products: Tensor, form: WeightFormat, dtype: torch.dtype) -> QuantizedMatrix | None:
    """A matrix [out, in] rounded to nearest within the fraction of each group's range that changes outputs least."""
    group = form.group_of(weight.shape[-1])
    if not group:
        return None
    groups = weight.unflatten(-1, (-1, group))
    inside = torch.stack([products[n : n + group, n : n + group] for n in range(0, weight.shape[1], group)])
    best = torch.ones(groups.shape[:2], device=weight.device)
    least = torch.full_like(best, torch.inf)
    for share in RANGES:
        keep = torch.full_like(best, share)
        change = nearest(weight, form, dtype, keep).view_as(groups) - groups
        error = (torch.einsum("ogi,gij->ogj", change, inside) * change).sum(-1)
        best, least = torch.where(error < least, keep, best), torch.minimum(error, least)
    integers, scale, zero = rounded_groups(weight, form, dtype, best)
    return assembled(integers.flatten(-2), scale, zero, form, dtype)
