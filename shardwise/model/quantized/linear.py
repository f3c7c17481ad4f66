"""GEMMs with packed matrices, and the choice of kernel.

With a few rows of input a GEMM takes as long as reading the matrix, so kernels read its packed bytes and multiply in 16 bits. With
many rows the multiplication itself takes the time: where inputs may have 8 bits too, the GEMM runs in 8 bits; otherwise the matrix
is dequantized and multiplied as any other. On other devices than GPUs the matrix is always dequantized first, which is the
reference for the kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.model.layers import Gemm
from shardwise.model.quantized.formats import E4M3
from shardwise.model.quantized.matrix import QuantizedMatrix
from shardwise.model.quantized.scaled import cast_rows_reference
from shardwise.torch_private import int_mm, scaled_mm

if TYPE_CHECKING:
    from shardwise.model.kernels.gemm.weight_only_tiles import TileScratch

MOST_TILED = {"int4": 64, "int8": 256, "fp8": 64}
"""Rows up to which packed weights are multiplied as they are read. With more, 8 bits on both sides, or a dequantized matrix, are
faster. From `benchmarks/gpu/weight_only.py` on an H200."""


def cast_rows_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as int8, and their scales [rows, 1]."""
    scale = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
    return (x / scale).round().to(torch.int8), scale


def rounded_rows(x: Tensor, activations: str) -> Tensor:
    """Rows rounded to 8 bits and dequantized again."""
    if activations == "fp8":
        values, scale = cast_rows_reference(x, E4M3)
        return values.to(x.dtype) * scale.to(x.dtype)
    if activations == "int8":
        values, scale = cast_rows_int8(x)
        return values.to(x.dtype) * scale
    return x


def quantized_linear_reference(x: Tensor, matrix: QuantizedMatrix) -> Tensor:
    """Rows times the dequantized matrix; rows are rounded too where its format says so."""
    return F.linear(rounded_rows(x, matrix.form.activations), matrix.dequantized(x.dtype))


class QuantizedGemm(Gemm):
    """Replaces a `Linear`'s GEMM: multiplies packed matrices, and others as before."""

    def __init__(self) -> None:
        self._scratch: TileScratch | None = None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not isinstance(weight, QuantizedMatrix):
            return super().__call__(x, weight, bias)
        out = self.fused(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])
        return out if bias is None else out + bias.to(x.dtype)

    def fused(
        self,
        x: Tensor,
        matrix: QuantizedMatrix,
        norm: tuple[Tensor, float] | None = None,
        residual: Tensor | None = None,
        gated: str = "",
    ) -> Tensor:
        """Rows [rows, in] times a matrix, with the norm before it and the gate or residual sum after it, as in `skinny_gemm`."""
        kind, rows = matrix.form.kind, len(x)
        parts = matrix.packed, matrix.scale, matrix.zero, kind
        if not (x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)):
            made = quantized_linear_reference(_normed(x, norm), matrix)
            return _finished(made, residual, gated)
        from shardwise.model.kernels.gemm.int4_rows import int4_rows, takes
        from shardwise.model.kernels.gemm.weight_only import MOST_ROWS, weight_only_gemm
        from shardwise.model.kernels.gemm.weight_only_tiles import LEAST_GROUP, tiled_gemm
        from shardwise.model.kernels.quantize import fp8_rows

        whole = matrix.form.activations != "int8"
        if kind == "int4" and matrix.order is None and takes(x, matrix.packed, matrix.scale):
            return int4_rows(x, matrix.packed, matrix.scale, matrix.zero, norm, residual, gated)
        if rows <= MOST_ROWS and matrix.order is None and whole:
            return weight_only_gemm(x, *parts, norm, residual, gated)
        if matrix.form.activations == "fp8":  # the rows are rounded first, so that both operands are fp8
            values, scale = fp8_rows(x, norm)
            if _multiplies_fp8(rows, matrix):
                return _finished(_fp8_gemm(values, scale, matrix, x.dtype), residual, gated)
            return tiled_gemm(values, *parts, self._room(x), residual, gated, x_scale=scale, dtype=x.dtype)
        x = _normed(x, norm)
        if matrix.order is not None:
            x = x[:, matrix.order]
        if matrix.form.activations == "int8":
            if rows > 16:
                values, scale = cast_rows_int8(x)
                made = int_mm(values, matrix.packed.t()) * scale.float() * matrix.scale.t()
                return _finished(made.to(x.dtype), residual, gated)
            x = rounded_rows(x, "int8")
        if rows <= MOST_TILED[kind] and (kind != "int4" or matrix.group >= LEAST_GROUP):
            return tiled_gemm(x, *parts, self._room(x), residual, gated)
        if kind == "int4" or x.dtype == torch.float16:  # float16 has no room for a result that is not scaled yet
            made = F.linear(x, matrix.in_packed_order(x.dtype))
        else:  # 8-bit values are exact in 16 bits, and each scale belongs to one column of the result
            made = (F.linear(x, matrix.packed.to(x.dtype)) * matrix.scale.t()).to(x.dtype)
        return _finished(made, residual, gated)

    def feed_forward(
        self,
        x: Tensor,
        gate_up: QuantizedMatrix,
        down: QuantizedMatrix,
        norm: tuple[Tensor, float],
        residual: Tensor | None,
        gated: str,
    ) -> Tensor:
        """The two GEMMs of a feed-forward layer, one after the other. With many rows in fp8, the gate's kernel also rounds its
        result for the second GEMM, so that the intermediate is only written in 8 bits."""
        many = all(each.form.activations == "fp8" and _multiplies_fp8(len(x), each) for each in (gate_up, down))
        if not (many and x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)):
            return self.fused(self.fused(x, gate_up, norm, None, gated), down, None, residual)
        from shardwise.model.kernels.quantize import fp8_rows

        made = _fp8_gemm(*fp8_rows(x, norm), gate_up, x.dtype)
        return _finished(_fp8_gemm(*fp8_rows(made, gated=gated), down, x.dtype), residual, "")

    def _room(self, x: Tensor) -> TileScratch:
        from shardwise.model.kernels.gemm.weight_only_tiles import TileScratch

        if self._scratch is None:
            self._scratch = TileScratch(x.device)
        return self._scratch


def _multiplies_fp8(rows: int, matrix: QuantizedMatrix) -> bool:
    """Whether this many fp8 rows are multiplied by an fp8 GEMM, and not by tiles."""
    return rows > MOST_TILED["fp8"] and not any(size % 16 for size in matrix.shape)


def _fp8_gemm(values: Tensor, scale: Tensor, matrix: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
    sides = values, matrix.packed.t(), scale, matrix.scale.t()
    return scaled_mm(*sides, out_dtype=dtype, use_fast_accum=True)


def _normed(x: Tensor, norm: tuple[Tensor, float] | None) -> Tensor:
    if norm is None:
        return x
    if not x.is_cuda:
        return F.rms_norm(x, x.shape[-1:], norm[0].to(x.dtype), norm[1])
    from shardwise.model.kernels.rms_norm import rms_norm

    return rms_norm(x, *norm)


def _finished(made: Tensor, residual: Tensor | None, gated: str) -> Tensor:
    if gated:
        gate, up = made.chunk(2, dim=-1)
        if made.is_cuda:
            from shardwise.model.kernels.gated import gated_product

            return gated_product(gate, up, gated)
        made = (F.silu(gate) if gated == "silu" else F.gelu(gate, approximate="tanh")) * up
    return made if residual is None else residual + made
