"""The table of parameters against the network it describes, and rank coordinates against the array of ranks they index.
Shapes and layouts are drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.model.adapters import put_on_adapters
from shardwise.model.layers import Linear
from shardwise.model.transformer import Transformer
from shardwise.run import PRESETS, AdapterConfig, LayoutConfig, ModelConfig
from shardwise.run.axes import RANK_AXES
from shardwise.run.derive import derive_model
from shardwise.run.parameters import Parameter, find_parameter, first_parameters, last_parameters, layer_parameters
from shardwise.run.ranks.coordinates import GROUPS, RankCoordinates


def drawn_model(seed: int) -> ModelConfig:
    """A network with parts chosen at random."""
    rng = random.Random(seed)
    keys: dict[str, Any] = dict(
        layers=rng.randint(1, 3), hidden=16, heads=4, vocab=33, tied_embeddings=rng.random() < 0.5,
        norm=rng.choice(["rmsnorm", "layernorm"]), activation=rng.choice(["swiglu", "geglu", "gelu", "relu2"]),
        bias=rng.choice(["none", "qkv", "all"]), position=rng.choice(["rotary", "learned", "alibi"]),
        parallel_block=rng.random() < 0.3, parallel_norms=rng.choice([1, 2]), position_offset=rng.choice([0, 2]),
        embedding_norm=rng.random() < 0.3,
    )  # fmt: skip
    if rng.random() < 0.4:
        keys |= dict(attention="latent", q_rank=rng.choice([0, 6]), kv_rank=5, nope_dim=4, rope_dim=2, v_dim=3)
        keys |= dict(position="rotary", bias="none")
    else:
        keys |= dict(kv_heads=rng.choice([1, 2, 4]), qk_norm=rng.random() < 0.5)
    if rng.random() < 0.5:
        keys |= dict(experts=4, experts_per_token=2, expert_ffn=8, shared_experts=rng.choice([0, 2]))
        keys |= dict(dense_layers=rng.randint(0, keys["layers"]), activation="swiglu")
        keys["bias"] = "qkv" if keys["bias"] == "all" else keys["bias"]
    return derive_model(ModelConfig(**keys), 8)


def parameters_by_name(model: ModelConfig) -> Iterator[tuple[str, Parameter]]:
    """All parameters of a model with their full names, in the order of the module."""
    yield from ((entry.name, entry) for entry in first_parameters(model))
    for layer in range(model.layers):
        for entry in layer_parameters(model, model.is_moe(layer)):
            yield f"layers.{layer}.{entry.name}", entry
    yield from ((entry.name, entry) for entry in last_parameters(model))


def check(config: ModelConfig) -> None:
    with torch.device("meta"):
        network = Transformer(config)
    table = list(parameters_by_name(config))
    found = [(name, tuple(parameter.shape)) for name, parameter in network.named_parameters()]
    assert [(name, entry.shape) for name, entry in table] == found
    assert all(find_parameter(config, name) is entry for name, entry in table)
    linears = {f"{name}.weight" for name, m in network.layers.named_modules() if isinstance(m, Linear)}
    assert {name.removeprefix("layers.") for name, entry in table if entry.is_linear} == linears
    assert {name for name, entry in table if entry.is_layer_matrix} == {
        name for name, parameter in network.named_parameters() if name.startswith("layers.") and parameter.ndim > 1
    }
    for name, entry in table:
        leaf = name.removesuffix(".weight").split(".")[-1]
        kind = "residual" if leaf in ("out", "down") else "normal"
        vector = "zeros" if name.endswith(".bias") else "ones"
        assert entry.init == (kind if len(entry.shape) > 1 else vector), name


@pytest.mark.parametrize("targets", [("all",), ("q", "kv", "down"), ("k", "gate", "kv_down")], ids=str)
@pytest.mark.parametrize("seed", range(10))
def test_the_table_lists_adapters_behind_their_matrices(seed: int, targets: tuple[str, ...]) -> None:
    config, adapter = drawn_model(seed), AdapterConfig("lora", rank=2, targets=targets)
    with torch.device("meta"):
        network = Transformer(config)
    put_on_adapters(network, adapter)
    tables = [layer_parameters(config, config.is_moe(n), adapter) for n in range(config.layers)]
    table = [(e.name, e) for e in first_parameters(config, adapter)]
    table += [(f"layers.{n}.{e.name}", e) for n, entries in enumerate(tables) for e in entries]
    table += [(e.name, e) for e in last_parameters(config, adapter)]
    found = [(name, tuple(parameter.shape)) for name, parameter in network.named_parameters()]
    assert [(name, entry.shape) for name, entry in table] == found
    assert all(entry.frozen == (".lora." not in name) for name, entry in table)
    assert all(find_parameter(config, name, adapter) is entry for name, entry in table)


@pytest.mark.parametrize("seed", range(40))
def test_the_table_lists_the_networks_parameters_in_order(seed: int) -> None:
    check(drawn_model(seed))


@pytest.mark.parametrize("name", ["gpt2-124m", "llama3-8b", "qwen2.5-7b", "mixtral-8x7b", "deepseek-v3"])
def test_the_table_lists_those_of_published_models(name: str) -> None:
    check(derive_model(ModelConfig(**PRESETS[name]), 1024))


@pytest.mark.parametrize("seed", range(20))
def test_coordinates_are_those_of_the_array_of_ranks(seed: int) -> None:
    """Ranks as an array of the axes' sizes, which a reader trusts, against strides."""
    rng = random.Random(seed)
    sizes = {axis: rng.choice([1, 2, 3, 4]) for axis in RANK_AXES}
    zero = sizes["shard"] * sizes["context"]
    expert = rng.choice([d for d in range(1, zero + 1) if zero % d == 0])
    layout = LayoutConfig(**sizes, expert=expert)
    outer = [sizes["pipeline"], sizes["replicate"]]
    dense = np.arange(layout.world).reshape([*outer, sizes["shard"], sizes["context"], sizes["tensor"]])
    moe = dense.reshape([*outer, zero // expert, expert, sizes["tensor"]])
    arrays = {
        "pipeline": (dense, 0), "replicate": (dense, 1), "shard": (dense, 2), "context": (dense, 3), "tensor": (dense, 4),
        "zero": (dense.reshape([*outer, zero, -1]), 2), "expert_shard": (moe, 2), "expert": (moe, 3),
        "sequence": (dense.reshape([*outer, sizes["shard"], -1]), 3), "world": (dense.reshape(-1), 0),
    }  # fmt: skip
    assert set(arrays) == set(GROUPS)
    for group, (ranks, dim) in arrays.items():
        lines = np.moveaxis(ranks, dim, -1).reshape(-1, ranks.shape[dim])
        for line in lines.tolist():
            for index, rank in enumerate(line):
                here = RankCoordinates(layout, rank)
                assert (here.size(group), here.index(group), here.members(group)) == (len(line), index, line)
