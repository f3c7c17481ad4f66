"""Matrices in 4-bit NormalFloat with double quantisation (Dettmers et al. 2023, "QLoRA", sections 3 and appendix E).

Each 64 neighbours in a row are a block, whose largest magnitude, `absmax`, is their scale; a weight is the nearest of 16 values
that split a normal distribution evenly. The scales themselves, minus their mean, come in blocks of 256. Each is the nearest of 256
values of a dynamic tree (Dettmers et al. 2022, "8-bit Optimizers", section 1.3), times the largest magnitude in its block: 4.127
bits a weight. Blocks follow the memory order of the whole matrix, so a rank that holds a slice of it dequantises the same numbers.
In a stack of experts each expert is a matrix of its own.

A GEMM dequantises the matrix to 16 bits while it multiplies, and once more in the backward pass; the 16-bit matrix is never saved.
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
from shardwise.model.operator import operator, shape_of
from shardwise.run.parameters import scales_of
from shardwise.run.sections.adapter import NF4_BLOCK as BLOCK
from shardwise.run.sections.adapter import NF4_SCALES as SCALES

Multiply = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Multiplies rows by a stack of matrices, given how many rows each has."""

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The values of NormalFloat (QLoRA, appendix E)."""


class Quantized(NamedTuple):
    """A whole matrix: two weights a byte, the earlier in the upper half; the scale of each block, as an index into the dynamic
    tree or in float32; and, with the tree, the scale of each block of scales, then their mean."""

    codes: Tensor
    absmax: Tensor
    scales: Tensor


def _tree() -> tuple[float, ...]:
    """The 256 values of the dynamic tree, in order: each decade from 1e-6 to 1 has twice as many steps as the one below, of both
    signs; besides there are 0 and 1. They are float32, rounded once, as `torch.linspace` computes them from both ends; but without
    a tensor, since a dry run's tensors have no values."""
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
    """The 16 NormalFloat values on a device."""
    return torch.tensor(NF4, dtype=torch.float32, device=device)


@cache
def tree_values(device: torch.device) -> Tensor:
    """The values of the dynamic tree on a device."""
    return torch.tensor(TREE, dtype=torch.float32, device=device)


def nearest(x: Tensor, values: tuple[float, ...]) -> Tensor:
    """The index of the nearest of some ordered values."""
    ends = torch.tensor(
        values, dtype=torch.float32, device=x.device
    )  # not the cached tensor: in a dry run it has no values
    middles = (ends[:-1] + ends[1:]) / 2
    return torch.bucketize(x, middles, out_int32=True).to(torch.uint8)


@torch.no_grad()
def quantize(matrix: Tensor, double: bool = True) -> Quantized:
    """Quantise a matrix [rows, columns] whose rows are whole blocks, or a stack of them."""
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
    """The matrix, or the stack of them, that a slice of codes stands for. Its first block is block `first` of the whole matrix,
    and each row begins `stride` blocks after the one before."""
    if scales.numel():
        rows, blocks = absmax.shape[-2:]
        row = torch.arange(rows, device=codes.device)[:, None] * stride
        number = first + row + torch.arange(blocks, device=codes.device)
        absmax = tree_values(codes.device)[absmax.int()] * scales[..., number // SCALES] + scales[..., -1:, None]
    values = nf4_values(codes.device)[torch.stack((codes >> 4, codes & 15), dim=-1).flatten(-2).int()]
    return (values.unflatten(-1, (-1, BLOCK)) * absmax[..., None]).flatten(-2).to(dtype)


@operator(
    "dequantize_nf4(Tensor codes, Tensor absmax, Tensor scales, int first, int stride, ScalarType dtype) -> Tensor"
)
def dequantize(codes: Tensor, absmax: Tensor, scales: Tensor, first: int, stride: int, dtype: torch.dtype) -> Tensor:
    """`dequantize_reference`, by a kernel on a GPU."""
    if not codes.is_cuda:
        return dequantize_reference(codes, absmax, scales, first, stride, dtype)
    from shardwise.model.kernels.dequantize import dequantize_nf4

    tables = nf4_values(codes.device), tree_values(codes.device)
    return dequantize_nf4(codes, absmax, scales, first, stride, dtype, *tables)


@shape_of(dequantize)
def _(codes: Tensor, absmax: Tensor, scales: Tensor, first: int, stride: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty((*codes.shape[:-1], 2 * codes.shape[-1]), dtype=dtype)


class _Multiply(torch.autograd.Function):
    """A GEMM that dequantises its matrix on the fly, forward and backward."""

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
    """The GEMM of one layer whose matrix is stored in 4 bits. `place` says where its slice lies in the whole matrix: the index of
    its first block, and how many blocks a row has."""

    def __init__(self, layer: Linear, place: tuple[int, int]) -> None:
        self.layer, self.place, self.inner = layer, place, layer.gemm

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert isinstance(self.layer.absmax, Tensor)
        absmax, scales = _numbers(self.layer.absmax, getattr(self.layer, "absmax_scales", None))
        out = _Multiply.apply(x, weight, absmax, scales, self.place, self.inner)
        return out if bias is None else out + bias.to(x.dtype)


def _numbers(absmax: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor]:
    """The scales of blocks and, where those are in 8 bits, the scales of scales, from the parameters that hold them."""
    if absmax.dtype == torch.int32:  # not in 8 bits: the bits of float32 numbers
        absmax = absmax.view(torch.float32)
    return absmax, absmax.new_empty(0, dtype=torch.float32) if scales is None else scales.view(torch.float32)


def slice_of_matrix(
    codes: Tensor, absmax: Tensor | None, scales: Tensor | None, place: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """Dequantise a slice of the parameters. Its first block is block `place[0]` of a matrix with `place[1]` blocks in a row; the
    scales of scales are not sliced."""
    assert absmax is not None
    return dequantize(codes, *_numbers(absmax, scales), *place, dtype)


def quantize_to_nf4(layer: Linear, place: tuple[int, int], double: bool) -> None:
    """Make a layer's matrix 4-bit: its parameters, still without values, and its GEMM."""
    for name in ("weight", "absmax", "absmax_scales")[: 3 if double else 2]:
        values = torch.empty(0, dtype=torch.uint8, device="meta")
        layer.register_parameter(name, nn.Parameter(values, requires_grad=False))
    layer.gemm = NF4Gemm(layer, place)


class _MultiplyStack(torch.autograd.Function):
    """GEMMs of rows ordered by expert with matrices that are dequantised on the fly, forward and backward."""

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
    """Make the matrices of stacked experts 4-bit: their parameters, still without values, and their GEMMs. `places` says where the
    slice of each matrix lies."""
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
    """Quantises matrices to 4 bits, and returns the result by the names of the parameters that hold it. It holds one whole matrix
    at a time, since the mean of the scales is over all of it. `whole` returns a matrix by its name."""

    def __init__(self, whole: Callable[[str], Tensor], double: bool) -> None:
        self.whole, self.double, self.name = whole, double, ""

    def part(self, name: str) -> Tensor:
        """The full values of one parameter."""
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
