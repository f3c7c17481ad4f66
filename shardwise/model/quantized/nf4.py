"""Matrices in 4-bit NormalFloat with double quantisation (Dettmers et al. 2023, "QLoRA", sections 3 and appendix E).

Neighbours in a row come in blocks of 64, whose largest magnitude, `absmax`, is their scale; a weight is the nearest of 16 values
that split a normal distribution evenly. The scales themselves, less their mean, come in blocks of 256 and are the nearest of 256
values of a dynamic tree (Dettmers et al. 2022, "8-bit Optimizers", section 1.3) times the largest magnitude of those: 4.127 bits a
weight. Blocks follow the order of memory of the whole matrix, so a rank that holds a slice of it dequantises the same numbers. Of
stacked experts each is a matrix of its own.

A GEMM makes the matrix of 16 bits for as long as it multiplies, and once more in the backward pass; nothing of it is saved.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shardwise.model.layers import Gemm, Linear
from shardwise.model.moe.layer import Experts, grouped_linear
from shardwise.run.parameters import scales_of
from shardwise.run.sections.adapter import NF4_BLOCK as BLOCK
from shardwise.run.sections.adapter import NF4_SCALES as SCALES

Multiply = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Rows times a stack of matrices, with how many rows each has."""

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The values of NormalFloat (QLoRA, appendix E)."""


class Quantized(NamedTuple):
    """A whole matrix: two weights a byte, the earlier in the upper half; the scale of each block, as a value of the dynamic tree or
    as it is; and for those values the scale of each block of scales, then their mean."""

    codes: Tensor
    absmax: Tensor
    scales: Tensor


def _tree() -> tuple[float, ...]:
    """The 256 values of the dynamic tree, in order: each decade from 1e-6 to 1 has twice as many steps as the one below, of both
    signs; besides there are 0 and 1. In float32, as `torch.linspace` counts from both ends, rounding once; but without a tensor: a
    dry run has none with values."""
    values = [0.0, 1.0]
    for steps in range(7):
        count = 2**steps
        low, step = float(np.float32(0.1)), float((np.float32(1) - np.float32(0.1)) / np.float32(count))
        half = (count + 1) // 2
        exact = [low + step * n for n in range(half)] + [1 - step * (count - n) for n in range(half, count + 1)]
        ends = [np.float32(each) for each in exact]
        for first, last in itertools.pairwise(ends):
            middle = float(np.float32(10.0 ** (steps - 6)) * ((first + last) / np.float32(2)))
            values += [middle, -middle]
    return tuple(sorted(values))


TREE = _tree()


@cache
def nf4_values(device: torch.device) -> Tensor:
    """The 16 values on a device."""
    return torch.tensor(NF4, dtype=torch.float32, device=device)


@cache
def tree_values(device: torch.device) -> Tensor:
    """Those of the dynamic tree."""
    return torch.tensor(TREE, dtype=torch.float32, device=device)


def nearest(x: Tensor, values: tuple[float, ...]) -> Tensor:
    """The index of the nearest of some ordered values."""
    ends = torch.tensor(
        values, dtype=torch.float32, device=x.device
    )  # not those of the cache: in a dry run they have no values
    middles = (ends[:-1] + ends[1:]) / 2
    return torch.bucketize(x, middles, out_int32=True).to(torch.uint8)


@torch.no_grad()
def quantize(matrix: Tensor, double: bool = True) -> Quantized:
    """A matrix [rows, columns] whose rows are whole blocks, or a stack of them."""
    if matrix.ndim > 2:
        return Quantized(*(torch.stack(each) for each in zip(*(quantize(one, double) for one in matrix), strict=True)))
    rows, columns = matrix.shape
    blocks = matrix.float().reshape(-1, BLOCK)
    absmax = blocks.abs().amax(dim=1)
    codes = nearest(blocks / absmax.clamp(min=torch.finfo(torch.float32).tiny)[:, None], NF4)
    codes = codes.view(-1, 2)
    packed = ((codes[:, 0] << 4) | codes[:, 1]).view(rows, columns // 2)
    if not double:
        return Quantized(packed, absmax.view(rows, columns // BLOCK), absmax.new_empty(0))
    mean = absmax.mean()
    padded = torch.nn.functional.pad(absmax - mean, (0, -len(absmax) % SCALES)).view(-1, SCALES)
    scales = padded.abs().amax(dim=1)
    of_tree = nearest(padded / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None], TREE)
    of_tree = of_tree.flatten()[: len(absmax)].view(rows, columns // BLOCK)
    return Quantized(packed, of_tree, torch.cat((scales, mean[None])))


def dequantize_reference(
    codes: Tensor, absmax: Tensor, scales: Tensor, first: int, stride: int, dtype: torch.dtype
) -> Tensor:
    """The matrix, or the stack of them, that a slice of codes stands for. Its first block is number `first` of the whole matrix,
    and one row further are `stride` blocks more."""
    if scales.numel():
        rows, blocks = absmax.shape[-2:]
        row = torch.arange(rows, device=codes.device)[:, None] * stride
        number = first + row + torch.arange(blocks, device=codes.device)
        absmax = tree_values(codes.device)[absmax.int()] * scales[..., number // SCALES] + scales[..., -1:, None]
    values = nf4_values(codes.device)[torch.stack((codes >> 4, codes & 15), dim=-1).flatten(-2).int()]
    return (values.unflatten(-1, (-1, BLOCK)) * absmax[..., None]).flatten(-2).to(dtype)


# Defined and not made a `custom_op`, which takes the host three times as long (25 and 8 microseconds, an empty one): it is called
# 21 times a layer, and has no gradient.
_LIBRARY = torch.library.Library("shardwise", "FRAGMENT")
_LIBRARY.define(
    "dequantize_nf4(Tensor codes, Tensor absmax, Tensor scales, int first, int stride, ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.impl(_LIBRARY, "dequantize_nf4", "CPU")
def _(codes: Tensor, absmax: Tensor, scales: Tensor, first: int, stride: int, dtype: torch.dtype) -> Tensor:
    return dequantize_reference(codes, absmax, scales, first, stride, dtype)


@torch.library.impl(_LIBRARY, "dequantize_nf4", "CUDA")
def _(codes: Tensor, absmax: Tensor, scales: Tensor, first: int, stride: int, dtype: torch.dtype) -> Tensor:
    from shardwise.model.kernels.dequantize_nf4 import dequantize_nf4

    tables = nf4_values(codes.device), tree_values(codes.device)
    return dequantize_nf4(codes, absmax, scales, first, stride, dtype, *tables)


@torch.library.register_fake("shardwise::dequantize_nf4", lib=_LIBRARY)
def _(codes: Tensor, absmax: Tensor, scales: Tensor, first: int, stride: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty((*codes.shape[:-1], 2 * codes.shape[-1]), dtype=dtype)


dequantize = torch.ops.shardwise.dequantize_nf4.default
"""`dequantize_reference`, by a kernel on a GPU."""


class _Multiply(torch.autograd.Function):
    """A GEMM with a matrix that is made for it, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codes: Tensor, absmax: Tensor, scales: Tensor, place: tuple[int, int], gemm: Gemm
    ) -> Tensor:
        ctx.save_for_backward(codes, absmax, scales)
        ctx.place, ctx.gemm = place, gemm
        matrix = dequantize(codes, absmax, scales, *place, x.dtype)
        return gemm.multiply(x.reshape(-1, x.shape[-1]), matrix.mT).view(*x.shape[:-1], matrix.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        matrix = dequantize(*ctx.saved_tensors, *ctx.place, grads[0].dtype)
        grad = ctx.gemm.multiply(grads[0].reshape(-1, matrix.shape[0]), matrix).view(
            *grads[0].shape[:-1], matrix.shape[1]
        )
        return grad, None, None, None, None, None


class NF4Gemm(Gemm):
    """The GEMM of one layer whose matrix is kept in 4 bits. `place` is where its slice lies in the whole matrix: the number of its
    first block, and how many blocks a row has."""

    def __init__(self, layer: Linear, place: tuple[int, int]) -> None:
        self.layer, self.place, self.inner = layer, place, layer.gemm

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert isinstance(self.layer.absmax, Tensor)
        absmax, scales = _numbers(self.layer.absmax, getattr(self.layer, "absmax_scales", None))
        out = _Multiply.apply(x, weight, absmax, scales, self.place, self.inner)
        return out if bias is None else out + bias.to(x.dtype)


def _numbers(absmax: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor]:
    """The scales of blocks, and of those where they are in 8 bits, from what parameters hold them."""
    if absmax.dtype == torch.int32:  # not in 8 bits: float32 numbers
        absmax = absmax.view(torch.float32)
    return absmax, absmax.new_empty(0, dtype=torch.float32) if scales is None else scales.view(torch.float32)


def slice_of_matrix(
    codes: Tensor, absmax: Tensor | None, scales: Tensor | None, place: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """What a slice of the parameters stands for, whose first block is number `place[0]` of a matrix with `place[1]` in a row; the
    scales of scales are whole."""
    assert absmax is not None
    return dequantize(codes, *_numbers(absmax, scales), *place, dtype)


def quantize_to_nf4(layer: Linear, place: tuple[int, int], double: bool) -> None:
    """Let a layer's matrix be of 4 bits: its parameters, still without values, and its GEMM."""
    for name in ("weight", "absmax", "absmax_scales")[: 3 if double else 2]:
        values = torch.empty(0, dtype=torch.uint8, device="meta")
        layer.register_parameter(name, nn.Parameter(values, requires_grad=False))
    layer.gemm = NF4Gemm(layer, place)


class _MultiplyStack(torch.autograd.Function):
    """The GEMMs of rows in the order of their experts with matrices that are made for them, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codes: Tensor, absmax: Tensor, scales: Tensor, counts: Tensor, place: tuple[int, int], by: Multiply
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(codes, absmax, scales, counts)
        ctx.place, ctx.by, ctx.rows = place, by, len(x)
        return by(x, dequantize(codes, absmax, scales, *place, x.dtype), counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
        *kept, counts = ctx.saved_tensors
        stack = dequantize(*kept, *ctx.place, grads[0].dtype)
        grad = ctx.by(grads[0], stack.mT, counts)
        missing = ctx.rows - len(grad)  # rows of no expert
        grad = torch.nn.functional.pad(grad, (0, 0, 0, missing)) if missing else grad
        return grad, None, None, None, None, None, None


def quantize_experts_to_nf4(experts: Experts, places: dict[str, tuple[int, int]], double: bool) -> None:
    """Let the matrices of stacked experts be of 4 bits: their parameters, still without values, and their GEMMs. `places` says of
    each matrix where its slice lies."""
    for part in places:
        for name in (part, *scales_of(part)[: 2 if double else 1]):
            values = torch.empty(0, dtype=torch.uint8, device="meta")
            experts.register_parameter(name, nn.Parameter(values, requires_grad=False))

    def grouped(x: Tensor, stack: Tensor, counts: Tensor) -> Tensor:
        return (experts.multiply or grouped_linear)(x, stack, counts, experts.read_counts)

    def multiply(part: str, x: Tensor, counts: Tensor) -> Tensor:
        first, second = scales_of(part)
        absmax, scales = _numbers(getattr(experts, first), getattr(experts, second, None))
        return _MultiplyStack.apply(x, getattr(experts, part), absmax, scales, counts, places[part], grouped)

    experts.frozen_multiply = multiply


class Quantizer:
    """What is kept of matrices in 4 bits, by the names of the parameters that keep it. One matrix is held at a time, whole: its
    scales' mean is over all of it. `whole` gives a matrix by its name."""

    def __init__(self, whole: Callable[[str], Tensor], double: bool) -> None:
        self.whole, self.double, self.name = whole, double, ""

    def part(self, name: str) -> Tensor:
        """All of one parameter."""
        stacked = not name.endswith((".weight", ".absmax", ".absmax_scales"))
        matrix = re.sub("_absmax(_scales)?$", "", name) if stacked else f"{name.rpartition('.')[0]}.weight"
        if matrix != self.name:
            self.name, self.quantized = matrix, quantize(self.whole(matrix), self.double)
        codes, absmax, scales = self.quantized
        if name == matrix:
            return codes
        if name.endswith("absmax_scales"):
            return scales.view(torch.int32)
        return absmax if self.double else absmax.view(torch.int32)
