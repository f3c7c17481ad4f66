"""What a `config.json` may say and what is refused, every key at once; networks no architecture has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import MODELS, QWEN_WINDOW, YARN, edit_config, transformers

from shardwise.checkpoint.huggingface import config_from_model, from_hf, model_from_config
from shardwise.run import ModelConfig, UserError, run_from_dict

REFUSED: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "llama": (
        "llama2",
        {
            "hidden_act": "gelu",
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0},
        },
        {"hidden_act", "attention_bias", "mlp_bias", "rope_parameters.rope_type"},
    ),
    "partial": ("llama2", {"partial_rotary_factor": 0.5}, {"partial_rotary_factor"}),
    "longrope": (
        "qwen3",
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "attention_bias": True},
        {"rope_scaling.rope_type", "attention_bias"},
    ),
    "by layer": (
        "qwen3",
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        {"rope_parameters"},
    ),
    "yarn": ("llama-yarn", {"rope_parameters": YARN | {"truncate": False}}, {"rope_parameters.truncate"}),
    "no factor": ("llama-yarn", {"rope_parameters": {"rope_type": "yarn"}}, {"rope_parameters.factor"}),
    "small amplitude": (
        "llama-yarn",
        {"rope_parameters": YARN | {"attention_factor": 0.5}},
        {"rope_parameters.attention_factor"},
    ),
    "gpt2": (
        "gpt2",
        {
            "activation_function": "relu",
            "scale_attn_weights": False,
            "scale_attn_by_inverse_layer_idx": True,
            "n_embd": "absent",
        },
        {"activation_function", "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "n_embd"},
    ),
    "qwen2": (
        "qwen2",
        QWEN_WINDOW | {"layer_types": "absent", "max_window_layers": 1},
        {"max_window_layers"},
    ),
    "layers": (
        "qwen2",
        QWEN_WINDOW | {"layer_types": ["full_attention", "sliding_attention"]},
        {"layer_types"},
    ),
    "qwen3-moe": (
        "qwen3-moe",
        {"decoder_sparse_step": 2, "mlp_only_layers": [1]},
        {"decoder_sparse_step", "mlp_only_layers"},
    ),
    "deepseek": (
        "deepseek",
        {"topk_method": "greedy", "scoring_func": "softmax", "num_key_value_heads": 2},
        {"topk_method", "scoring_func", "num_key_value_heads"},
    ),
    "quantized": ("llama2", {"quantization_config": {"quant_method": "hqq"}}, {"quantization_config.quant_method"}),
    "unknown": ("llama2", {"architectures": ["FalconForCausalLM"]}, {"architectures"}),
    "wrong type": ("llama2", {"hidden_size": "wide", "rms_norm_eps": -1.0}, {"hidden_size", "rms_norm_eps"}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_network_lacks_is_refused_all_at_once(case: str, tmp_path: Path) -> None:
    name, changes, keys = REFUSED[case]
    kind, settings = MODELS[name]
    getattr(transformers, f"{kind}Config")(**settings, architectures=[f"{kind}ForCausalLM"]).save_pretrained(tmp_path)
    if kind == "GPT2":
        edit_config(tmp_path, architectures=["GPT2LMHeadModel"])
    edit_config(tmp_path, **changes)
    with pytest.raises(UserError) as caught:
        from_hf(tmp_path, tmp_path / "ours")
    assert {problem.key for problem in caught.value.problems} == keys
    assert all(problem.where == str(tmp_path / "config.json") for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("model", "key"),
    [
        ({"norm": "layernorm"}, "model.norm"),
        ({"bias": "all"}, "model.bias"),
        (
            {"position": "learned", "bias": "all", "norm": "layernorm", "activation": "gelu", "kv_heads": 2},
            "model.kv_heads",
        ),
        ({"experts": 4, "experts_per_token": 1, "router": "sigmoid"}, "model.router"),
    ],
)
def test_networks_that_no_architecture_has(model: dict[str, Any], key: str) -> None:
    config = run_from_dict({"model": model}).model
    with pytest.raises(UserError) as caught:
        config_from_model(config, "run.toml")
    assert key in {problem.key for problem in caught.value.problems}


def test_config_there_and_back_is_the_same_network() -> None:
    grouped = {"layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 24, "max_positions": 256, "init_std": 0.01}
    yarn = {"rope_scaling": "yarn", "rope_factor": 8.0, "rope_original": 32}
    latent = grouped | {
        "attention": "latent",
        "kv_heads": 4,
        "kv_rank": 16,
        "nope_dim": 16,
        "rope_dim": 8,
        "v_dim": 8,
    }
    networks = [
        grouped | yarn,
        grouped | yarn | {"yarn_mscale": 0.5, "bias": "qkv", "sliding_window": 9},
        grouped
        | {
            "qk_norm": True,
            "experts": 8,
            "experts_per_token": 3,
            "dense_layers": 1,
            "router_normalize": False,
        },
        grouped | {"experts": 8, "experts_per_token": 3, "sliding_window": 9},
        latent | yarn | {"yarn_mscale": 0.5, "yarn_mscale_all": 0.25},
        latent | yarn | {"yarn_mscale": 0.0, "yarn_mscale_all": 0.0},
    ]
    for keys in networks:
        config: ModelConfig = run_from_dict({"model": keys}).model
        _, values = config_from_model(config)
        back, notes = model_from_config(json.loads(json.dumps(values)))
        assert (back, notes) == (config, [])
