"""Converts packed matrices of a folder to ours: integers are unpacked from the order of the format and packed in that of our
kernels; no weight is rounded again.

All formats pack eight 4-bit weights into an int32. compressed-tensors packs neighbours of a row [out, in/8] and adds 8 to make
them positive; GPTQ packs neighbours of a column [in/8, out]; AutoAWQ packs neighbours of a row of the transposed matrix [in,
out/8], first the even and then the odd ones, as its kernels unpack them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.checkpoint.huggingface.packed.scheme import Packing, Scheme
from shardwise.checkpoint.reader import Reader
from shardwise.model.quantized.matrix import QuantizedMatrix
from shardwise.model.quantized.rounding import assembled
from shardwise.run import Problem, UserError
from shardwise.run.weights import GROUPS

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The position within an int32 of each of eight neighbours."""
PARTS = (
    "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "input_scale", "input_zero_point",
    "output_scale", "qweight", "qzeros", "scales", "g_idx",
)  # fmt: skip
"""Tensors that belong to a packed matrix, besides its `weight`."""


def unpacked(words: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8)), bits: int = 4) -> Tensor:
    """Unpack the integers of int32 words along one dimension, as uint8."""
    if bits == 8:
        return (
            torch.stack([(words >> 8 * n) & 255 for n in range(4)], dim=dim + 1).flatten(dim, dim + 1).to(torch.uint8)
        )
    return torch.stack([(words >> 4 * n) & 15 for n in order], dim=dim + 1).flatten(dim, dim + 1).to(torch.uint8)


class PackedReader:
    """Reads the packed matrices of a folder by the name of their module."""

    def __init__(self, reader: Reader, packing: Packing) -> None:
        self.reader, self.packing = reader, packing

    def holds(self, module: str) -> bool:
        """Whether a module's matrix is packed."""
        return any(f"{module}.{part}" in self.reader for part in ("weight_packed", "weight_scale", "qweight"))

    def get(self, module: str, dtype: torch.dtype) -> QuantizedMatrix:
        """A module's matrix; `dtype` is the compute dtype."""
        scheme = self.packing.of(module)
        made = {"compressed-tensors": self._compressed, "awq": self._awq, "gptq": self._gptq}[self.packing.method]
        try:
            return made(module, scheme, dtype)
        except (RuntimeError, IndexError) as e:
            reason = f"the parts of {module} do not fit together: {str(e).splitlines()[0]}"
            raise UserError(Problem(reason, where=str(self.reader.folder))) from None

    def _part(self, module: str, name: str) -> Tensor:
        return self.reader.get(f"{module}.{name}")

    def _compressed(self, module: str, scheme: Scheme, dtype: torch.dtype) -> QuantizedMatrix:
        scale = self._part(module, "weight_scale")
        if scheme.form.kind != "int4":
            return self._eight_bits(module, scheme, scale, dtype)
        rows, columns = self._part(module, "weight_shape").tolist()
        integers = unpacked(self._part(module, "weight_packed"), 1)[:, :columns]
        zero = None
        if scheme.form.zeros:
            zero = unpacked(self._part(module, "weight_zero_point"), 0)[:rows]
        index = self._part(module, "weight_g_idx") if f"{module}.weight_g_idx" in self.reader else None
        return self._grouped(module, integers, scale, zero, index, scheme, dtype)

    def _eight_bits(self, module: str, scheme: Scheme, scale: Tensor, dtype: torch.dtype) -> QuantizedMatrix:
        if f"{module}.weight_packed" in self.reader:
            _, columns = self._part(module, "weight_shape").tolist()
            integers = unpacked(self._part(module, "weight_packed"), 1, bits=8)[:, :columns]
            values = (integers.to(torch.int16) - 128).to(torch.int8)
        else:
            values = self._part(module, "weight")
        by_row = scale.float().reshape(-1, 1)
        if len(by_row) not in (1, len(values)):
            raise RuntimeError(f"{len(values)} rows have {len(by_row)} scales")
        return assembled(values, by_row.expand(len(values), 1).clone(), None, scheme.form, dtype)

    def _awq(self, module: str, scheme: Scheme, dtype: torch.dtype) -> QuantizedMatrix:
        integers = unpacked(self._part(module, "qweight"), 1, AWQ_ORDER).t()
        zero = unpacked(self._part(module, "qzeros"), 1, AWQ_ORDER).t()
        return self._grouped(module, integers, self._part(module, "scales").t(), zero, None, scheme, dtype)

    def _gptq(self, module: str, scheme: Scheme, dtype: torch.dtype) -> QuantizedMatrix:
        integers = unpacked(self._part(module, "qweight"), 0).t()
        zero = unpacked(self._part(module, "qzeros"), 1).t() + scheme.offset
        index = self._part(module, "g_idx") if f"{module}.g_idx" in self.reader else None
        return self._grouped(module, integers, self._part(module, "scales").t(), zero, index, scheme, dtype)

    def _grouped(
        self,
        module: str,
        integers: Tensor,
        scale: Tensor,
        zero: Tensor | None,
        index: Tensor | None,
        scheme: Scheme,
        dtype: torch.dtype,
    ) -> QuantizedMatrix:
        """A matrix of integers 0 to 15, in groups of a size that our kernels support. `index` is the group of each column, if
        groups are not made of neighbours."""
        columns, groups = integers.shape[1], scale.shape[1]
        order = None
        if index is not None and groups > 1:
            neighbours = torch.arange(columns) // (columns // groups)
            if not torch.equal(index.long(), neighbours):
                order = index.long().argsort(stable=True)
                if not torch.equal(index.long()[order], neighbours):
                    raise RuntimeError("g_idx names groups of different sizes")
                integers = integers[:, order]
        group = columns // groups
        size = next((n for n in GROUPS if group % n == 0), 0)
        if not size or columns % groups:
            raise RuntimeError(f"{columns} columns in {groups} groups; groups are multiples of 8")
        scale = scale.repeat_interleave(group // size, dim=1)
        zero = None if zero is None else zero.repeat_interleave(group // size, dim=1)
        return assembled(integers, scale, zero, scheme.form, dtype, order)
