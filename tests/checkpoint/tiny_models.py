"""Tiny random models of `transformers`, one for each family and for what configs may vary; their files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from late import Late
from safetensors.torch import load_file

from shardwise.checkpoint.weights import load_model

os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
transformers: Any = Late("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
LATENT = SIZES | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
MOE = GROUPED | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GPT = {"vocab_size": 67, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
OPT = {key: value for key, value in SIZES.items() if key != "intermediate_size"} | {
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
}
BLOOM = {"vocab_size": 67, "hidden_size": 48, "n_layer": 2, "n_head": 6}
NEOX = SIZES | {"hidden_act": "gelu_fast", "rotary_pct": 0.25}
PARTIAL = {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 0.5}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e3,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
BETAS = {"beta_fast": 8.0, "beta_slow": 2.0}
MSCALES = {"mscale": 0.8, "mscale_all_dim": 1.1}
UNTIED_GPT = {"tie_word_embeddings": False, "n_inner": 40, "activation_function": "gelu_pytorch_tanh"}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT),
    "gpt2-untied": ("GPT2", GPT | UNTIED_GPT),
    "gpt2-exact": ("GPT2", GPT | {"activation_function": "gelu"}),
    "opt": ("OPT", OPT),
    "opt-untied": ("OPT", OPT | {"tie_word_embeddings": False}),
    "bloom": ("Bloom", BLOOM),
    "bloom-untied": ("Bloom", BLOOM | {"n_head": 4, "tie_word_embeddings": False}),
    "gpt-neox": ("GPTNeoX", NEOX),
    "gpt-neox-yarn": ("GPTNeoX", NEOX | {"rotary_pct": 0.5, "rope_parameters": PARTIAL | YARN | BETAS}),
    "gpt-neox-half": ("GPTNeoX", NEOX | {"rotary_pct": 0.5, "rope_parameters": PARTIAL, "tie_word_embeddings": True}),
    "pythia": ("GPTNeoX", NEOX | {"hidden_act": "gelu"}),
    "gemma": ("Gemma", GROUPED | {"head_dim": 16}),
    "gemma-untied": ("Gemma", GROUPED | {"head_dim": 8, "tie_word_embeddings": False, "num_key_value_heads": 1}),
    "llama2": ("Llama", SIZES),
    "llama3": (
        "Llama",
        GROUPED | {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    ),
    "llama-yarn": ("Llama", GROUPED | {"rope_parameters": YARN | BETAS, "head_dim": 16}),
    "llama-yarn-factor": ("Llama", GROUPED | {"rope_parameters": YARN | {"attention_factor": 1.3}}),
    "mistral": ("Mistral", GROUPED | {"sliding_window": 5}),
    "qwen2": ("Qwen2", GROUPED | {"tie_word_embeddings": True}),
    "qwen2-yarn": ("Qwen2", GROUPED | {"rope_parameters": YARN}),
    "qwen2-window": ("Qwen2", GROUPED | QWEN_WINDOW),
    "qwen3": ("Qwen3", GROUPED | {"head_dim": 16}),
    "qwen3-window": ("Qwen3", GROUPED | QWEN_WINDOW | {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3Moe", MOE | {"norm_topk_prob": True}),
    "qwen3-moe-dense-first": ("Qwen3Moe", MOE | {"mlp_only_layers": [0], "norm_topk_prob": False}),
    "mixtral": ("Mixtral", GROUPED | {"num_local_experts": 4}),
    "mixtral-window": ("Mixtral", GROUPED | {"num_local_experts": 4, "sliding_window": 5}),
    "deepseek": ("DeepseekV3", LATENT),
    "deepseek-yarn": ("DeepseekV3", LATENT | {"rope_parameters": YARN | MSCALES}),
    "deepseek-yarn-all": ("DeepseekV3", LATENT | {"rope_parameters": YARN | {"mscale_all_dim": 0.7}}),
    "deepseek-whole-queries": ("DeepseekV3", LATENT | {"q_lora_rank": None, "norm_topk_prob": False}),
    "deepseek-dense": ("DeepseekV3", LATENT | {"first_k_dense_replace": 2}),
}


def random_model(kind: str, settings: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """A model in which no norm is 1, no bias 0 and no two experts alike."""
    torch.manual_seed(7)
    config = getattr(transformers, f"{kind}Config")(**settings, **NO_TOKENS)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("e_score_correction_bias"):
                tensor.uniform_(0, 0.2)
            elif "norm" in name or ".ln_" in name:
                tensor.normal_(1, 0.2)
            elif "inv_freq" not in name and "embed_scale" not in name:
                tensor.normal_(0, 0.15)
    model.to(dtype)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = buffer.data.float()  # as transformers keeps it in every model
    return model


def their_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens).logits


def our_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    model, _ = load_model(folder)
    with torch.no_grad():
        return model(tokens).result


def tokens() -> torch.Tensor:
    return torch.randint(0, 67, (2, 40), generator=torch.Generator().manual_seed(1))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_same_tensors(one: Path, other: Path, *, shifted: bool = False) -> None:
    """Bit for bit; norms that are kept `shifted` by 1 lose the last bits of a sum with 1."""
    left, right = tensors(one), tensors(other)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        if shifted and "norm" in name:
            torch.testing.assert_close(tensor, right[name], atol=2e-7, rtol=0)
        else:
            assert torch.equal(tensor, right[name]), name


def save(folder: Path, kind: str, settings: dict[str, Any], **options: Any) -> Any:
    model = random_model(kind, settings)
    model.save_pretrained(folder, **options)
    return model


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in values.items() if v != "absent"}))
