"""How many parameters a model has and how many FLOPs a token takes, added up from the table of parameters (`run/parameters.py`).

The planner, the trainer's utilisation and the reports all read them here. Counts carry their convention, since "FLOPs" alone means
four different things in the literature.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from shardwise.run import AdapterConfig, ModelConfig
from shardwise.run.parameters import Parameter, first_parameters, last_parameters, layer_parameters
from shardwise.run.sections.adapter import NO_ADAPTER

CONVENTION = "model FLOPs: causal attention, head in, embedding lookup out, recomputation out"


@dataclass(frozen=True)
class Parameters:
    """Parameters by part, over all layers; `active` are those that one token uses."""

    embedding: int
    attention: int
    dense_ffn: int
    router: int
    experts: int
    shared_experts: int
    norms: int
    head: int
    active_experts: int

    @property
    def total(self) -> int:
        """All parameters, tied ones once."""
        layers = self.attention + self.dense_ffn + self.router + self.experts + self.shared_experts
        return self.embedding + layers + self.norms + self.head

    @property
    def active(self) -> int:
        """Parameters that one token uses."""
        return self.total - self.experts + self.active_experts


@cache
def learned_share(model: ModelConfig, adapter: AdapterConfig) -> float:
    """Trained parameters, as a share of the network's own parameters."""
    if not adapter.used:
        return 1.0
    tables = [(count, layer_parameters(model, moe, adapter)) for moe, count in layer_kinds(model)]
    learned = sum(count * entry.numel for count, table in tables for entry in table if not entry.frozen)
    return learned / parameters(model).total


@cache
def frozen_width(model: ModelConfig, adapter: AdapterConfig, width: float) -> float:
    """Mean bytes of a frozen parameter, where one that is not kept in 4 bits has `width`; 0 where all are trained."""
    if not adapter.used:
        return 0.0
    frozen = [(count, entry) for count, entry in counted_parameters(model, adapter) if entry.frozen]
    widths = {"": width, "uint8": 1.0, "int32": 4.0}
    return sum(count * entry.numel * widths[entry.dtype] for count, entry in frozen) / parameters(model).total


def layer_kinds(model: ModelConfig) -> list[tuple[bool, int]]:
    """Whether there are MoE layers, and dense ones, each with their number."""
    kinds = ((False, model.layers - model.moe_layers), (True, model.moe_layers))
    return [(moe, count) for moe, count in kinds if count]


def counted_parameters(model: ModelConfig, adapter: AdapterConfig = NO_ADAPTER) -> Iterator[tuple[int, Parameter]]:
    """Every entry of the table of parameters; those of the layers with how many layers have them."""
    for moe, count in layer_kinds(model):
        yield from ((count, entry) for entry in layer_parameters(model, moe, adapter))
    yield from ((1, entry) for entry in (*first_parameters(model, adapter), *last_parameters(model, adapter)))


@cache
def parameters(model: ModelConfig) -> Parameters:
    """Parameters of the whole model, exact."""
    numel: Counter[str] = Counter()
    for count, entry in counted_parameters(model):
        numel[entry.owner] += count * entry.numel
    return Parameters(
        embedding=numel["embedding"],
        attention=numel["attention"],
        dense_ffn=numel["ffn"],
        router=numel["router"],
        experts=numel["experts"],
        shared_experts=numel["shared_experts"],
        norms=numel["norm"],
        head=numel["head"],
        active_experts=numel["experts"] // model.experts * model.experts_per_token if model.experts else 0,
    )


@cache
def multiplied(model: ModelConfig, moe: bool) -> dict[str, int]:
    """Elements of one layer's GEMM weights by owner; of the experts, those that one token uses."""
    numel: Counter[str] = Counter()
    for entry in layer_parameters(model, moe):
        if entry.multiplied:
            met = entry.numel // model.experts * model.experts_per_token if entry.routed else entry.numel
            numel[entry.owner] += met
    return dict(numel)


def keys_seen(model: ModelConfig, seq_len: int) -> float:
    """Keys a query sees on average under the causal mask and the sliding window."""
    window = min(model.sliding_window or seq_len, seq_len)
    return (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len


def layer_multiply_adds(model: ModelConfig, moe: bool, seq_len: int) -> float:
    """Multiply-adds of one token in one layer, forward."""
    attention = model.heads * (model.head_dim + model.value_dim) * keys_seen(model, seq_len)
    return sum(multiplied(model, moe).values()) + attention


def forward_flops(model: ModelConfig, seq_len: int) -> float:
    """FLOPs of one token's forward pass, a multiply-add as two."""
    total = float(model.head_rows * model.hidden)
    for moe, count in layer_kinds(model):
        total += count * layer_multiply_adds(model, moe, seq_len)
    return 2.0 * total


def training_flops(model: ModelConfig, seq_len: int, adapter: AdapterConfig = NO_ADAPTER) -> float:
    """FLOPs of one token in training: the backward pass costs twice the forward pass. With adapters, which are not counted here,
    frozen matrices have no weight gradient, so their backward pass costs one forward pass; attention itself has no weights, and
    still costs two."""
    whole = forward_flops(model, seq_len)
    if not adapter.used:
        return 3.0 * whole
    attention = 2.0 * model.layers * keys_seen(model, seq_len) * model.heads * (model.head_dim + model.value_dim)
    return 2.0 * whole + attention
