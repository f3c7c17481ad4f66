"""A matrix stored as 8 or 4 bits a weight, and scales (`run/weights.py` has the formats).

To the network it is a tensor of the compute dtype. GEMMs that know it read the packed weights; any other operation gets the
dequantised matrix. It is a tensor subclass, so a `Linear`, a stack of experts, or latent attention's matrix may each be one.

Four-bit weights are packed eight to an int32, but not in the order of columns: in a group of G columns, bits 4i to 4i+3 of word j
hold column i G/8 + j. So a kernel that takes the same bits of neighbouring words gets neighbouring columns, and multiplies them
with neighbouring inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.run.weights import WeightFormat
from shardwise.torch_private import disabled_torch_function, tree_map_only, wrapper_subclass

_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def pack_int4(values: Tensor, group: int) -> Tensor:
    """Pack integers of 0 to 15, [..., columns], eight to an int32."""
    parts = values.unflatten(-1, (-1, 8, group // 8))
    words = parts[..., 0, :].int()
    for n in range(1, 8):
        words |= parts[..., n, :].int() << 4 * n
    return words.flatten(-2)


def unpack_int4(words: Tensor, group: int) -> Tensor:
    """The unpacked integers, as uint8."""
    words = words.unflatten(-1, (-1, group // 8))
    parts = [((words >> 4 * n) & 15).to(torch.uint8) for n in range(8)]
    return torch.stack(parts, dim=-2).flatten(-3)


class QuantizedMatrix(torch.Tensor):
    """`packed` weights [..., out, in] with `scale` [..., out, groups] and, with four bits, `zero` points of the same shape
    (uint8); None means that they are all 8. If `order` is given, packed column n is the matrix's column `order[n]`."""

    packed: Tensor
    scale: Tensor
    zero: Tensor | None
    order: Tensor | None
    form: WeightFormat

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        packed: Tensor,
        scale: Tensor,
        zero: Tensor | None,
        form: WeightFormat,
        dtype: torch.dtype,
        order: Tensor | None = None,
    ) -> QuantizedMatrix:
        columns = packed.shape[-1] * (8 if form.kind == "int4" else 1)
        made = wrapper_subclass(cls, packed, dtype, (*packed.shape[:-1], columns))
        made.packed, made.scale, made.zero, made.form, made.order = packed, scale, zero, form, order
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"QuantizedMatrix({tuple(self.shape)}, {self.form.kind} for {self.dtype})"

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.shape[-1] // self.scale.shape[-1]

    @property
    def stored_bytes(self) -> int:
        """Bytes of the packed weights, scales and zero points."""
        return sum(part.numel() * part.itemsize for part in (self.packed, self.scale, self.zero) if part is not None)

    def in_packed_order(self, dtype: torch.dtype) -> Tensor:
        """The dequantised matrix, with its columns in packed order."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        if self.form.kind != "int4":
            return (self.packed.to(wide) * self.scale.to(wide)).to(dtype)
        if self.packed.is_cuda:
            from shardwise.model.kernels.dequantize import dequantize_int4

            return dequantize_int4(self.packed, self.scale, self.zero, dtype)
        values = torch.empty(self.shape, dtype=dtype, device=self.packed.device)
        parts = values.unflatten(-1, (-1, 8, self.group // 8))
        words = self.packed.unflatten(-1, (-1, self.group // 8))
        scale = self.scale.to(wide)[..., None]
        zero = 8 if self.zero is None else self.zero.to(torch.int32)[..., None]
        for n in range(8):
            parts[..., n, :] = (((words >> 4 * n) & 15) - zero).to(wide) * scale
        return values

    def dequantized(self, dtype: torch.dtype | None = None) -> Tensor:
        """The dequantised matrix."""
        values = self.in_packed_order(dtype or self.dtype)
        if self.order is None:
            return values
        return torch.empty_like(values).index_copy_(-1, self.order, values)

    def map_rows(self, function: Any) -> QuantizedMatrix:
        """Apply a function to each stored tensor; they all have the same leading dimensions."""
        zero = None if self.zero is None else function(self.zero)
        made = function(self.packed), function(self.scale), zero
        return QuantizedMatrix(*made, self.form, self.dtype, self.order)

    def moved(self, device: torch.device | str, dtype: torch.dtype | None = None) -> QuantizedMatrix:
        """The same matrix on another device, for another compute dtype."""
        made = self.map_rows(lambda part: part.to(device))
        order = None if self.order is None else self.order.to(device)
        return QuantizedMatrix(made.packed, made.scale, made.zero, self.form, dtype or self.dtype, order)

    @staticmethod
    def joined(matrices: Sequence[QuantizedMatrix], stack: bool = False) -> QuantizedMatrix:
        """Matrices of one format concatenated by rows, or stacked."""
        first, join = matrices[0], torch.stack if stack else torch.cat
        zero = None if first.zero is None else join([each.zero for each in matrices if each.zero is not None])
        packed, scale = join([each.packed for each in matrices]), join([each.scale for each in matrices])
        return QuantizedMatrix(packed, scale, zero, first.form, first.dtype, first.order)

    def joins(self, other: Tensor) -> bool:
        """Whether it may be joined with another."""
        if not isinstance(other, QuantizedMatrix) or self.form != other.form or self.group != other.group:
            return False
        if (self.zero is None) != (other.zero is None) or self.scale.dtype != other.scale.dtype:
            return False
        if self.order is None or other.order is None:
            return self.order is None and other.order is None
        return torch.equal(self.order, other.order)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operator in _SAME:
            return args[0].map_rows(lambda part: part)
        if operator is torch.ops.aten._to_copy.default and set(kwargs or ()) <= {"dtype"} and isinstance(args[0], cls):
            return args[0].dequantized((kwargs or {}).get("dtype"))
        args, kwargs = tree_map_only(cls, lambda matrix: matrix.dequantized(), (args, kwargs or {}))
        return operator(*args, **kwargs)
