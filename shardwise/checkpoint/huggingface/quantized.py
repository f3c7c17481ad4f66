"""Reads weights published in fp8 with a scale for each block, such as DeepSeek-V3's, as bfloat16. They are dequantized one tensor
at a time, so the whole model is never in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.reader import Reader, find_weights
from shardwise.run import Problem, UserError

SCALE = "_scale_inv"  # a suffix to the name of the scaled tensor


def open_published(folder: Path, values: dict[str, Any], where: str) -> Reader:
    """The tensors of a Hugging Face folder, dequantized where its config says they are in fp8."""
    quantization = values.get("quantization_config")
    if not quantization:
        return Reader(folder, find_weights(folder))
    method, block = quantization, None
    if isinstance(quantization, dict):
        method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    sizes = isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    if method != "fp8" or not sizes or block is None:
        message = f"is {method}; weights are read in full precision, or in fp8 with a weight_block_size"
        raise UserError(Problem(message, "quantization_config", where))
    return BlockScaledReader(folder, (block[0], block[1]))


class BlockScaledReader(Reader):
    """Tensors that have a scale are returned as bfloat16; the scales themselves are not listed."""

    def __init__(self, folder: Path, block: tuple[int, int]) -> None:
        super().__init__(folder, find_weights(folder))
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
        """The dtype that `get` returns."""
        return torch.bfloat16 if name + SCALE in self else super().dtype(name)

    def get(self, name: str) -> Tensor:
        """A tensor, multiplied by its scales."""
        tensor = super().get(name)
        if name + SCALE not in self:
            return tensor
        rows, columns = self.block
        scale = super().get(name + SCALE).repeat_interleave(rows, dim=0)[: tensor.shape[0]]
        dequantized = torch.empty(tensor.shape, dtype=torch.bfloat16)
        for n, start in enumerate(range(0, tensor.shape[1], columns)):
            span = slice(start, start + columns)
            dequantized[:, span] = tensor[:, span].float() * scale[:, n, None]
        return dequantized
