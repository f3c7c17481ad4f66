"""The storage format of a served model's matrices, and its bytes: the model packs them this way, and the plan counts them this way.
No torch.

A quantized matrix is integers, or fp8 numbers, times scales. 8-bit formats have a scale for each row (output channel); 4 bits have
one for each group of neighbours in a row, and a zero point: the integer that represents 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from shardwise.run.config import ModelConfig, Run
from shardwise.run.dtypes import DTYPE_BYTES
from shardwise.run.parameters import HEAD, Parameter, layer_parameters
from shardwise.run.rules.rule import Rule

Kind = Literal["fp8", "int8", "int4"]
Activations = Literal["", "fp8", "int8"]
GROUPS = (128, 64, 32, 16, 8)
"""Group sizes, the preferred one first; a smaller one is used if the row length is not a multiple of it."""


@dataclass(frozen=True)
class WeightFormat:
    """The storage format of a matrix."""

    kind: Kind
    group: int = 0
    """int4: weights of a row that share a scale and a zero point; 0: the entire row."""
    zeros: bool = False
    """int4: whether there are zero points (asymmetric); otherwise 8 represents 0."""
    activations: Activations = ""
    """The dtype to which the matrix's input is quantized, with a scale per token: both sides of a large GEMM then have 8 bits."""

    def group_of(self, columns: int) -> int:
        """The group size for rows of `columns` columns; 0: 4 bits cannot hold such rows, and the matrix stays unquantized."""
        if self.kind != "int4":
            return columns
        sizes = (self.group or columns, *(size for size in GROUPS if size < self.group))
        return next((size for size in sizes if size % 8 == 0 and columns % size == 0), 0)

    def bytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix with all its scales and zero points; 0 for one that stays unquantized."""
        group = self.group_of(columns)
        if not group:
            return 0
        if self.kind != "int4":
            return rows * (columns + SCALE_BYTES[self.kind])
        return rows * (columns // 2 + columns // group * (SCALE_BYTES[self.kind] + int(self.zeros)))


SCALE_BYTES: dict[Kind, int] = {"fp8": 4, "int8": 4, "int4": 2}
QUANTIZED: dict[str, WeightFormat] = {
    "fp8": WeightFormat("fp8", activations="fp8"),
    "int8": WeightFormat("int8"),
    "int4": WeightFormat("int4", GROUPS[0], zeros=True),
}
"""Formats by their names in `serve.weights`."""
SMOOTHED = replace(QUANTIZED["int8"], activations="int8")
"""Weights and activations in 8 bits (SmoothQuant)."""


def is_reduced(entry: Parameter) -> bool:
    """Whether a parameter is a matrix that can be quantized: those of the layers, but not the router's."""
    return entry.is_linear or entry.routed


def form_of(name: str, form: WeightFormat) -> WeightFormat:
    """The format of the matrix with this name. With cached latents, the matrix that expands latent keys and values is never
    multiplied with its input (`LatentAttention`), so its input is not quantized elsewhere either."""
    return replace(form, activations="") if name.endswith("attention.kv.weight") else form


def parameter_bytes(
    entry: Parameter, weights: str, dtype: str, shape: tuple[int, ...] | None = None, head: str = "auto"
) -> int:
    """Bytes of a parameter, or of a slice with this shape, in a model that computes in `dtype` and stores its matrices as
    `serve.weights` and `serve.head` specify."""
    shape = tuple(shape or entry.shape)
    whole = prod(shape) * DTYPE_BYTES[dtype]
    if head in QUANTIZED and entry.name == HEAD:
        return QUANTIZED[head].bytes(*shape)
    if weights == "auto" or not is_reduced(entry):
        return whole
    if weights not in QUANTIZED:
        return prod(shape) * DTYPE_BYTES[weights]
    *stack, rows, columns = shape
    return QUANTIZED[weights].bytes(rows, columns) * (stack[0] if stack else 1) or whole


def bytes_a_weight(model: ModelConfig, weights: str, dtype: str) -> float:
    """Mean bytes per weight of the matrices of a model's layers, including scales and zero points."""
    layers = (layer_parameters(model, model.is_moe(layer)) for layer in range(model.layers))
    entries = [entry for layer in layers for entry in layer if is_reduced(entry)]
    return sum(parameter_bytes(e, weights, dtype) for e in entries) / sum(e.numel for e in entries)


def head_rule(run: Run) -> Rule:
    """The requirement of a quantized head."""
    head = run.serve.head
    return Rule(
        head != "auto" and run.model.tied_embeddings, "serve.head", ("model.tied_embeddings",),
        lambda: f"{head} keeps the head apart, and here it is the embedding as well; use auto",
    )  # fmt: skip
