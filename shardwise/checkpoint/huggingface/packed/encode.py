"""Converts our packed matrices to the compressed-tensors format, with its `quantization_config`, for vLLM and transformers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.model.quantized.matrix import QuantizedMatrix, unpack_int4
from shardwise.run.weights import WeightFormat

FORMATS = {"int4": "pack-quantized", "int8": "int-quantized", "fp8": "float-quantized"}


def _packed(integers: Tensor, dim: int) -> Tensor:
    """Pack integers 0 to 15, eight neighbours along a dimension into an int32."""
    moved = integers.movedim(dim, -1).int()
    moved = F.pad(moved, (0, -moved.shape[-1] % 8)).unflatten(-1, (-1, 8))
    words = moved[..., 0].clone()
    for n in range(1, 8):
        words |= moved[..., n] << 4 * n
    return words.movedim(-1, dim).contiguous()


def parts_of(matrix: QuantizedMatrix) -> dict[str, Tensor]:
    """The tensors of a matrix [out, in], by their suffix after the name of its module."""
    matrix = matrix.moved("cpu")
    if matrix.form.kind != "int4":
        return {"weight": matrix.packed, "weight_scale": matrix.scale}
    parts = {
        "weight_packed": _packed(unpack_int4(matrix.packed, matrix.group), 1),
        "weight_scale": matrix.scale,
        "weight_shape": torch.tensor(tuple(matrix.shape)),
    }
    if matrix.zero is not None:
        parts["weight_zero_point"] = _packed(matrix.zero, 0)
    return parts


def quantization_config(form: WeightFormat, group: int, whole: list[str]) -> dict[str, Any]:
    """The entry of `config.json` for matrices in a format, in groups of this size; the modules in `whole` are not quantized."""
    kind = "float" if form.kind == "fp8" else "int"
    weights: dict[str, Any] = {
        "num_bits": 4 if form.kind == "int4" else 8,
        "type": kind,
        "symmetric": not form.zeros,
        "strategy": "group" if form.kind == "int4" else "channel",
        "group_size": group if form.kind == "int4" else None,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    inputs: dict[str, Any] | None = None
    if form.activations:
        inputs = weights | {
            "strategy": "token",
            "group_size": None,
            "dynamic": True,
            "symmetric": True,
            "observer": None,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": FORMATS[form.kind],
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": inputs,
                "output_activations": None,
            }
        },
        "ignore": whole,
        "kv_cache_scheme": None,
    }
