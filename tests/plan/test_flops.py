"""Counting by formula against counting the network itself."""

from __future__ import annotations

import pytest
import torch
from published_sizes import PUBLISHED
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from shardwise.model import Transformer, initialize
from shardwise.plan.cost.flops import forward_flops, keys_seen, parameters, training_flops
from shardwise.plan.trainer.work import work
from shardwise.run import PRESETS, ModelConfig, run_from_dict
from shardwise.run.derive import derive_model


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.drawn(6)
def test_parameters_of_every_preset_equal_the_networks(name: str) -> None:
    config = derive_model(ModelConfig(**PRESETS[name]), 1024)
    with torch.device("meta"):
        network = Transformer(config)
    assert parameters(config).total == sum(p.numel() for p in network.parameters())


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameters_are_as_many_as_published(name: str) -> None:
    config = derive_model(ModelConfig(**PRESETS[name]), 1024)
    mixtures = config.layers - config.dense_layers if config.router == "sigmoid" else 0
    assert parameters(config).total + mixtures * config.experts == PUBLISHED[name]


def test_the_size_of_every_preset_is_published() -> None:
    rounded = {"gpt3-175b": 175e9, "mt-nlg-530b": 530e9, "palm-8b": 9e9, "palm-62b": 62e9, "palm-540b": 540e9}
    rounded |= {"opt-13b": 13e9, "opt-30b": 30e9, "opt-66b": 66e9, "opt-175b": 175e9}
    assert set(PRESETS) - set(PUBLISHED) == set(rounded)
    for name, size in rounded.items():
        assert round(parameters(derive_model(ModelConfig(**PRESETS[name]), 1024)).total, -9) == size


SHAPES = {
    "llama": dict(kv_heads=2),
    "gpt": dict(norm="layernorm", activation="gelu", bias="all", position="learned", tied_embeddings=True),
    "qwen": dict(bias="qkv", qk_norm=True, head_dim=24),
    "mixtral": dict(experts=4, experts_per_token=2, expert_ffn=96),
    "deepseek": dict(
        attention="latent", q_rank=24, kv_rank=16, nope_dim=16, rope_dim=8, v_dim=12, experts=8, experts_per_token=3,
        expert_ffn=32, shared_experts=2, dense_layers=1, router="sigmoid",
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", SHAPES)
def test_forward_operations_equal_those_pytorch_counts(family: str) -> None:
    length = 16
    config = derive_model(ModelConfig(layers=3, hidden=64, heads=4, vocab=100, **SHAPES[family]), length)
    model = Transformer(config)
    initialize(model, config, 0)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(torch.randint(0, 100, (1, length)))
    # The math backend multiplies whole score matrices; the convention counts the causal half.
    v_dim = config.v_dim if config.attention == "latent" else config.head_dim
    whole = 2 * config.layers * config.heads * (config.head_dim + v_dim) * length
    causal = whole / length * keys_seen(config, length)
    assert counter.get_total_flops() == pytest.approx(
        length * (forward_flops(config, length) - causal + whole), rel=1e-12
    )


def test_active_parameters_leave_out_the_experts_a_token_does_not_meet() -> None:
    p = parameters(derive_model(ModelConfig(**PRESETS["mixtral-8x7b"]), 1024))
    assert p.total - p.active == p.experts * 6 // 8


@pytest.mark.parametrize(("length", "window"), [(1, 0), (7, 0), (7, 3), (7, 7), (7, 100)])
def test_keys_seen_is_the_mean_over_queries(length: int, window: int) -> None:
    counted = sum(min(i + 1, window or length) for i in range(length)) / length
    assert keys_seen(ModelConfig(sliding_window=window), length) == pytest.approx(counted)


def test_frozen_matrices_have_no_gradient_to_compute() -> None:
    """What all passes compute is the model's training FLOPs, and the adapter's own, which are few."""
    shape = dict(layers=2, hidden=256, heads=4, kv_heads=2, ffn=512, vocab=512)
    for adapter, own in (({}, 0.0), (dict(kind="lora", rank=1, targets=["q"]), 2 * 3 * 2 * (256 + 256))):
        run = run_from_dict(dict(model=shape, adapter=adapter, train=dict(seq_len=64, global_batch=1, device="cpu")))
        assert work(run, 0).total == 64 * (training_flops(run.model, 64, run.adapter) + own)
