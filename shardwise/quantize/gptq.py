"""GPTQ (Frantar et al. 2022): columns are rounded one after the other, and the columns still to be rounded compensate for the
error that each rounding causes in the layer's output.

With H the sum of outer products of the inputs, rounding column q with an error e changes the output least when the other columns
change by -e H⁻¹[q, :] / H⁻¹[q, q] (eq. 2). The rows of the Cholesky factor of H⁻¹ hold all numbers that the steps need (section
3.3, step 3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.model.quantized.matrix import QuantizedMatrix
from shardwise.model.quantized.rounding import assembled, integers_of, scales_of, stored_scale_dtype, values_of
from shardwise.run import UserError
from shardwise.run.weights import WeightFormat

BLOCK = 128
"""Columns whose errors are applied to all later columns together."""


def cholesky_of_inverse(products: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of the inverse of H. The diagonal of H is first raised by a fraction `damping` of its mean, and by
    ten times more until H can be inverted."""
    if not products.isfinite().all():
        raise UserError(
            "the inputs of a matrix are not finite numbers; are the weights? bfloat16 has more range than float16"
        )
    products = products.clone()
    diagonal = products.diagonal()
    diagonal[diagonal == 0] = 1.0  # an input channel that was always 0
    mean = diagonal.mean()
    share = damping * mean
    while True:
        raised = products + share * torch.eye(len(products), dtype=products.dtype, device=products.device)
        factor, failed = torch.linalg.cholesky_ex(raised)
        if not failed:
            inverse, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
            if not failed:
                return inverse
        share = torch.maximum(share * 10, 1e-8 * mean)  # without damping, there is nothing to multiply


def gptq(
    weight: Tensor,
    products: Tensor,
    form: WeightFormat,
    dtype: torch.dtype,
    damping: float = 0.01,
    act_order: bool = False,
) -> QuantizedMatrix | None:
    """A matrix [out, in] rounded for inputs with this sum of outer products. `act_order` rounds the columns with the largest
    inputs first; the groups and their scales are then fixed beforehand. Columns whose inputs were always 0 become 0, as in the
    authors' code, so that scales are those of the others. Nothing is known of a matrix without any inputs, such as that of an
    expert that no token chose: it is rounded as it is."""
    columns = weight.shape[1]
    group = form.group_of(columns)
    if not group:
        return None
    left = weight.to(products.dtype).clone()
    dead = products.diagonal() == 0
    if not dead.all():
        left[:, dead] = 0
    scale_dtype = stored_scale_dtype(form, dtype)
    scales, zeros = scales_of(left.unflatten(1, (-1, group)), form, scale_dtype)
    order = torch.arange(columns, device=left.device)
    if act_order:
        order = products.diagonal().argsort(descending=True, stable=True)
    left = left[:, order]
    inverse = cholesky_of_inverse(products[order][:, order], damping)
    integers = torch.empty(left.shape, dtype=_stored(form), device=left.device)
    for start in range(0, columns, BLOCK):
        stop = min(start + BLOCK, columns)
        errors = torch.empty(len(left), stop - start, dtype=left.dtype, device=left.device)
        for column in range(start, stop):
            number = int(order[column]) // group if act_order else column // group
            if not act_order and column % group == 0:
                # Rounding earlier columns has changed the group; `left` includes the changes inside this block,
                ahead = left[:, column : column + group]
                if column + group > stop:  # but not yet those beyond it
                    pending = errors[:, : column - start] @ inverse[start:column, stop : column + group]
                    ahead = torch.cat((left[:, column:stop], left[:, stop : column + group] - pending), dim=1)
                fresh, zero = scales_of(ahead, form, scale_dtype)
                scales[:, number] = fresh
                if zeros is not None and zero is not None:
                    zeros[:, number] = zero
            scale, point = scales[:, number], None if zeros is None else zeros[:, number]
            values = left[:, column]
            rounded = integers_of(values, scale, point, form)
            integers[:, column] = rounded
            error = (values - values_of(rounded, scale, point, form, values.dtype)) / inverse[column, column]
            errors[:, column - start] = error
            left[:, column:stop] -= error[:, None] * inverse[column, column:stop]
        left[:, stop:] -= errors @ inverse[start:stop, stop:]
    if act_order:
        integers = integers[:, order.argsort()]
    return assembled(integers, scales, zeros, form, dtype)


def _stored(form: WeightFormat) -> torch.dtype:
    return {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}[form.kind]
