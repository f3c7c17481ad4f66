"""Weights published in 8 bits with a scale for each block, as DeepSeek-V3 is, read as the bfloat16 numbers
they stand for. They are widened a tensor at a time, so the whole is never in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.model.weights import WeightReader
from shardwise.run import Problem, UserError

SCALE = "_scale_inv"  # follows the name of the tensor that it scales


def open_weights(folder: Path, values: dict[str, Any], where: str) -> WeightReader:
    """The tensors of a Hugging Face folder, widened where its config says they are in 8 bits."""
    quantization = values.get("quantization_config")
    if not quantization:
        return WeightReader(folder)
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    block = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    if method != "fp8" or not (
        isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    ):
        message = f"is {method}; weights are read in full precision, or in fp8 with a weight_block_size"
        raise UserError(Problem(message, "quantization_config", where))
    return BlockScaledReader(folder, (block[0], block[1]))


class BlockScaledReader(WeightReader):
    """Tensors that have a scale are given as bfloat16; the scales themselves are not listed."""

    def __init__(self, folder: Path, block: tuple[int, int]) -> None:
        super().__init__(folder)
        self.block = block
        for name in super().names:
            scaled = name.removesuffix(SCALE)
            if scaled == name or scaled not in self:
                continue
            blocks = tuple(-(-n // size) for n, size in zip(self.shape(scaled), block, strict=False))
            if self.shape(name) != blocks:
                message = f"{name} is {list(self.shape(name))} and should be {list(blocks)}"
                raise UserError(Problem(message, where=str(folder)))

    @property
    def names(self) -> list[str]:
        """Every tensor but the scales."""
        return [name for name in super().names if not name.endswith(SCALE)]

    def dtype(self, name: str) -> torch.dtype:
        """The dtype that `get` gives."""
        return torch.bfloat16 if name + SCALE in self else super().dtype(name)

    def get(self, name: str) -> Tensor:
        """A tensor, times its scales."""
        tensor = super().get(name)
        if name + SCALE not in self:
            return tensor
        rows, columns = self.block
        scale = super().get(name + SCALE).repeat_interleave(rows, dim=0)[: tensor.shape[0]]
        wide = torch.empty(tensor.shape, dtype=torch.bfloat16)
        for n, start in enumerate(range(0, tensor.shape[1], columns)):
            span = slice(start, start + columns)
            wide[:, span] = tensor[:, span].float() * scale[:, n, None]
        return wide

    def part(self, name: str, index: int) -> Tensor:
        """One slice along the first dimension."""
        return self.get(name)[index]
