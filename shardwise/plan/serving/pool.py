"""The memory of a serving device by owner, and how many pages of keys and values fit beside the rest. The engine takes its pool
from here, so the plan is what it gets.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardwise.run import ModelConfig, Run
from shardwise.run.parameters import Parameter, first_parameters, last_parameters, layer_parameters

BYTES = {"float64": 8.0, "float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
LIBRARIES = 2**30
"""Bytes that kernels' code, their workspaces and recorded steps take on a GPU."""


@dataclass(frozen=True)
class ServingMemory:
    """Bytes of one device."""

    weights: int
    activations: int
    """The largest step at work."""
    libraries: int
    page: int
    """One page, of all layers here."""
    pages: int

    @property
    def cache(self) -> int:
        """All pages."""
        return self.page * self.pages

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.activations + self.libraries + self.cache


def token_elements(model: ModelConfig, tensor: int = 1) -> int:
    """Numbers that one layer keeps of a token on a rank."""
    if model.attention == "latent":
        return model.kv_rank + model.rope_dim
    return 2 * max(1, model.kv_heads // tensor) * model.head_dim


def kv_dtype(run: Run) -> str:
    """What keys and values are kept in."""
    return run.train.dtype if run.serve.kv_dtype == "auto" else run.serve.kv_dtype


def weight_bytes(run: Run) -> int:
    """Bytes of the weights of the largest rank: its layers, cut over tensor ranks, with the embedding and the head."""
    model, layout = run.model, run.layout
    kept = BYTES[run.train.dtype if run.serve.weights == "auto" else run.serve.weights]

    def held(entries: Iterable[Parameter], matrix: float) -> float:
        return sum(
            entry.numel
            * (matrix if entry.multiplied else BYTES[run.train.dtype])
            / (layout.tensor if entry.cuts(layout) else 1)
            for entry in entries
        )

    layers = sum(held(layer_parameters(model, model.is_moe(layer)), kept) for layer in range(model.layers))
    ends = held(first_parameters(model), BYTES[run.train.dtype]) + held(last_parameters(model), BYTES[run.train.dtype])
    return int(layers / layout.pipeline + ends)


def activation_bytes(run: Run) -> int:
    """What the largest step holds at a time beside weights and pages: the residual stream and the widest part of a layer, and the
    logits of every sequence with what picking makes of them."""
    model, serve = run.model, run.serve
    tokens, each, tensor = serve.max_step_tokens, BYTES[run.train.dtype], run.layout.tensor
    wide = max(2 * model.ffn, model.heads * model.head_dim + token_elements(model))
    if model.experts:
        wide = max(wide, model.experts_per_token * (model.hidden + 2 * model.expert_ffn))
    layer = tokens * (3 * model.hidden + 1.5 * wide / tensor) * each
    logits = min(serve.max_sequences, tokens) * model.vocab * (each + 4) / tensor
    return int(layer + logits)


def serving_memory(run: Run, device_bytes: int, gpu: bool) -> ServingMemory:
    """What a device with so many bytes holds; the pages are what is left, but no more than all sequences could ever fill."""
    serve = run.serve
    layers = -(-run.model.layers // run.layout.pipeline)
    page = int(serve.page_tokens * layers * token_elements(run.model, run.layout.tensor) * BYTES[kv_dtype(run)])
    weights, activations, libraries = weight_bytes(run), activation_bytes(run), LIBRARIES if gpu else 0
    room = int(device_bytes * (1 - run.cluster.headroom)) - weights - activations - libraries
    if serve.memory_gib:
        room = int(serve.memory_gib * 2**30)
    most = serve.max_sequences * -(-run.model.max_positions // serve.page_tokens) + 1
    return ServingMemory(weights, activations, libraries, page, max(0, min(room // page, most)))
