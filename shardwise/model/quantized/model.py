"""A network with packed matrices: those of its layers, experts included, and the head's where it is asked for. Embedding, norms
and routers are not packed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shardwise.model.layers import Linear
from shardwise.model.moe.layer import Experts, ReadCounts, grouped_linear, read_counts
from shardwise.model.quantized.linear import QuantizedGemm, rounded_rows
from shardwise.model.quantized.matrix import QuantizedMatrix
from shardwise.model.quantized.rounding import round_matrix
from shardwise.model.transformer import Transformer
from shardwise.run.weights import QUANTIZED, WeightFormat, form_of


def layer_matrices(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """The matrices that may be packed, with their names."""
    for prefix, module in model.layers.named_modules(prefix="layers"):
        if isinstance(module, Linear):
            yield f"{prefix}.weight", module.weight
        elif isinstance(module, Experts):
            for name in ("gate", "up", "down"):
                yield f"{prefix}.{name}", getattr(module, name)


def put_matrix(model: nn.Module, name: str, matrix: Tensor) -> None:
    """Replace a parameter by a matrix that is not trained."""
    module, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(module), leaf, nn.Parameter(matrix, requires_grad=False))


@torch.no_grad()
def quantize_model(model: Transformer, weights: str | WeightFormat) -> None:
    """Store the matrices of a model's layers as `serve.weights` says. Those that are not packed yet are rounded, one at a time."""
    form = QUANTIZED.get(weights) if isinstance(weights, str) else weights
    for name, matrix in list(layer_matrices(model)):
        if isinstance(matrix, QuantizedMatrix):
            continue
        if form is None:
            put_matrix(model, name, matrix.detach().to(getattr(torch, str(weights))))
        elif (made := round_matrix(matrix.detach(), form_of(name, form))) is not None:
            put_matrix(model, name, made)
    use_quantized_gemms(model)


def use_quantized_gemms(model: nn.Module) -> bool:
    """Use the quantized GEMMs for the packed matrices of a model, or of a part of it; returns whether there are any."""
    gemm, found = QuantizedGemm(), False
    for module in model.modules():
        if isinstance(module, Linear) and isinstance(module.weight, QuantizedMatrix):
            module.gemm, found = gemm, True
        elif isinstance(module, Experts) and isinstance(module.gate, QuantizedMatrix):
            module.multiply, found = quantized_grouped_linear, True
    return found


def quantized_grouped_linear(x: Tensor, weight: Tensor, counts: Tensor, read: ReadCounts = read_counts) -> Tensor:
    """`grouped_linear` with a packed stack of experts' matrices, which is dequantized for it."""
    if isinstance(weight, QuantizedMatrix):
        x, weight = rounded_rows(x, weight.form.activations), weight.dequantized(x.dtype)
    return grouped_linear(x, weight, counts, read)


def keep_weights(model: Transformer, weights: str, head: str = "auto") -> int:
    """Store a model's matrices as `serve.weights` and `serve.head` say. Returns the bytes of all parameters if some are packed,
    otherwise 0."""
    if weights != "auto":
        quantize_model(model, weights)
    if head != "auto" and model.head is not None and not isinstance(model.head.weight, QuantizedMatrix):
        made = round_matrix(model.head.weight.detach(), QUANTIZED[head], model.dtype or model.head.weight.dtype)
        assert made is not None
        put_matrix(model, "head.weight", made)
    return stored_bytes(model) if use_quantized_gemms(model) else 0


def stored_bytes(model: nn.Module) -> int:
    """Bytes that a model's parameters take."""
    return sum(p.stored_bytes if isinstance(p, QuantizedMatrix) else p.numel() * p.itemsize for p in model.parameters())
