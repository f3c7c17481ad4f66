"""Published models by name, each as the keys of `[model]` that its published config sets.

Shapes come from the authors' papers and released `config.json` files: GPT-2 (Radford et al. 2019), GPT-3 (Brown et al.
2020, table 2.1), MT-NLG (Smith et al. 2022), OPT (Zhang et al. 2022, table 1), BLOOM (Le Scao et al. 2022, table 3), GPT-NeoX
(Black et al. 2022), PaLM (Chowdhery et al. 2022, table 1), Gemma (2024), Llama 1, 2 and 3 (Touvron et al. 2023, Grattafiori et al.
2024), Qwen2.5 and Qwen3 technical reports, Mixtral (Jiang et al. 2024), DeepSeek-V3 (2024). Their parameter counts are tested
against `transformers`.
"""

from __future__ import annotations

from typing import Any

Keys = dict[str, Any]


def _gpt(layers: int, hidden: int, heads: int, positions: int = 1024) -> Keys:
    return dict(
        layers=layers, hidden=hidden, heads=heads, ffn=4 * hidden, vocab=50257, max_positions=positions, norm="layernorm",
        activation="gelu", bias="all", position="learned", tied_embeddings=True,
    )  # fmt: skip


def _opt(layers: int, hidden: int, heads: int) -> Keys:
    return _gpt(layers, hidden, heads, 2048) | dict(vocab=50272, activation="relu", position_offset=2)


def _bloom(layers: int, hidden: int, heads: int) -> Keys:
    return _gpt(layers, hidden, heads, 2048) | dict(vocab=250880, position="alibi", embedding_norm=True)


def _palm(layers: int, hidden: int, heads: int) -> Keys:
    return dict(
        layers=layers, hidden=hidden, heads=heads, kv_heads=1, head_dim=256, ffn=4 * hidden, vocab=256000, max_positions=2048,
        norm="layernorm", parallel_block=True, tied_embeddings=True,
    )  # fmt: skip


def _gemma(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int) -> Keys:
    return dict(
        layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=256, ffn=ffn, vocab=256000, max_positions=8192,
        norm_eps=1e-6, activation="geglu", embedding_scale=True, tied_embeddings=True,
    )  # fmt: skip


def _llama2(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int) -> Keys:
    return dict(
        layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=32000, max_positions=4096, norm_eps=1e-5
    )  # fmt: skip


def _llama1(layers: int, hidden: int, heads: int, ffn: int) -> Keys:
    return _llama2(layers, hidden, heads, heads, ffn) | dict(max_positions=2048, norm_eps=1e-6)


def _llama3(layers: int, hidden: int, heads: int, ffn: int, *, factor: float = 0.0, tied: bool = False) -> Keys:
    keys: Keys = dict(
        layers=layers, hidden=hidden, heads=heads, kv_heads=8, ffn=ffn, vocab=128256, max_positions=8192, norm_eps=1e-5,
        rope_theta=500000.0, tied_embeddings=tied,
    )  # fmt: skip
    if factor:  # 3.1 and later stretch the context from 8k to 128k
        keys |= dict(max_positions=131072, rope_scaling="llama3", rope_factor=factor, rope_original=8192)
    return keys


def _qwen25(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int = 152064, tied: bool = False
) -> Keys:
    return dict(
        layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab, max_positions=32768, norm_eps=1e-6,
        rope_theta=1e6, bias="qkv", tied_embeddings=tied,
    )  # fmt: skip


def _qwen3(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, tied: bool = False) -> Keys:
    return dict(
        layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=128, ffn=ffn, vocab=151936, max_positions=40960,
        norm_eps=1e-6, rope_theta=1e6, qk_norm=True, tied_embeddings=tied,
    )  # fmt: skip


def _mixtral(layers: int, hidden: int, heads: int, ffn: int, vocab: int, positions: int) -> Keys:
    return dict(
        layers=layers, hidden=hidden, heads=heads, kv_heads=8, ffn=ffn, vocab=vocab, max_positions=positions, norm_eps=1e-5,
        rope_theta=1e6, experts=8, experts_per_token=2,
    )  # fmt: skip


PRESETS: dict[str, Keys] = {
    "gpt2-124m": _gpt(12, 768, 12),
    "gpt2-355m": _gpt(24, 1024, 16),
    "gpt2-774m": _gpt(36, 1280, 20),
    "gpt2-1.5b": _gpt(48, 1600, 25),
    "gpt3-175b": _gpt(96, 12288, 96, 2048),
    "mt-nlg-530b": _gpt(105, 20480, 128, 2048),
    "opt-125m": _opt(12, 768, 12),
    "opt-1.3b": _opt(24, 2048, 32),
    "opt-6.7b": _opt(32, 4096, 32),
    "opt-13b": _opt(40, 5120, 40),
    "opt-30b": _opt(48, 7168, 56),
    "opt-66b": _opt(64, 9216, 72),
    "opt-175b": _opt(96, 12288, 96),
    "bloom-560m": _bloom(24, 1024, 16),
    "bloom-7b1": _bloom(30, 4096, 32),
    "bloom-176b": _bloom(70, 14336, 112),
    "gpt-neox-20b": dict(
        layers=44,
        hidden=6144,
        heads=64,
        ffn=24576,
        vocab=50432,
        max_positions=2048,
        norm="layernorm",
        activation="gelu",
        bias="all",
        parallel_block=True,
        parallel_norms=2,
        rope_share=0.25,
    ),
    "palm-8b": _palm(32, 4096, 16),
    "palm-62b": _palm(64, 8192, 32),
    "palm-540b": _palm(118, 18432, 48),
    "gemma-2b": _gemma(18, 2048, 8, 1, 16384),
    "gemma-7b": _gemma(28, 3072, 16, 16, 24576),
    "llama1-7b": _llama1(32, 4096, 32, 11008),
    "llama1-13b": _llama1(40, 5120, 40, 13824),
    "llama1-33b": _llama1(60, 6656, 52, 17920),
    "llama1-65b": _llama1(80, 8192, 64, 22016) | dict(norm_eps=1e-5),
    "llama2-7b": _llama2(32, 4096, 32, 32, 11008),
    "llama2-13b": _llama2(40, 5120, 40, 40, 13824),
    "llama2-70b": _llama2(80, 8192, 64, 8, 28672),
    "llama3-1b": _llama3(16, 2048, 32, 8192, factor=32.0, tied=True),
    "llama3-3b": _llama3(28, 3072, 24, 8192, factor=32.0, tied=True),
    "llama3-8b": _llama3(32, 4096, 32, 14336),
    "llama3-70b": _llama3(80, 8192, 64, 28672),
    "llama3-405b": _llama3(126, 16384, 128, 53248, factor=8.0),
    "qwen2.5-0.5b": _qwen25(24, 896, 14, 2, 4864, 151936, tied=True),
    "qwen2.5-1.5b": _qwen25(28, 1536, 12, 2, 8960, 151936, tied=True),
    "qwen2.5-3b": _qwen25(36, 2048, 16, 2, 11008, 151936, tied=True),
    "qwen2.5-7b": _qwen25(28, 3584, 28, 4, 18944),
    "qwen2.5-14b": _qwen25(48, 5120, 40, 8, 13824),
    "qwen2.5-32b": _qwen25(64, 5120, 40, 8, 27648),
    "qwen2.5-72b": _qwen25(80, 8192, 64, 8, 29568),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 8, 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 8, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 8, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 8, 12288),
    "qwen3-14b": _qwen3(40, 5120, 40, 8, 17408),
    "qwen3-32b": _qwen3(64, 5120, 64, 8, 25600),
    "qwen3-30b-a3b": _qwen3(48, 2048, 32, 4, 6144) | dict(experts=128, experts_per_token=8, expert_ffn=768),
    "mixtral-8x7b": _mixtral(32, 4096, 32, 14336, 32000, 32768),
    "mixtral-8x22b": _mixtral(56, 6144, 48, 16384, 32000, 65536),
    "deepseek-v3": dict(
        layers=61,
        hidden=7168,
        heads=128,
        ffn=18432,
        vocab=129280,
        max_positions=163840,
        norm_eps=1e-6,
        attention="latent",
        q_rank=1536,
        kv_rank=512,
        nope_dim=128,
        rope_dim=64,
        v_dim=128,
        rope_scaling="yarn",
        rope_factor=40.0,
        rope_original=4096,
        yarn_mscale_all=1.0,
        experts=256,
        experts_per_token=8,
        expert_ffn=2048,
        shared_experts=1,
        dense_layers=3,
        router="sigmoid",
        router_groups=8,
        router_top_groups=4,
        router_scale=2.5,
    ),
}


# Sequence length and batch (in sequences) of pretraining, by the start of a preset's name. Published: GPT-2 (Radford
# et al. 2019, section 2.3), GPT-3 (Brown et al. 2020, table 2.1: 3.2M tokens, here the 1536 sequences of MLPerf's and
# Megatron's runs), MT-NLG (Smith et al. 2022: 1920 sequences), OPT-175B (Zhang et al. 2022: 2M tokens), BLOOM (Le
# Scao et al. 2022, table 3: 2048 sequences; its small models 256 to 512), GPT-NeoX (Black et al. 2022: 3.15M tokens),
# PaLM 540B (Chowdhery et al. 2022: 512 sequences, then 1024, then 2048; here the middle one), Llama 1 and 2 (Touvron
# et al. 2023: 4M tokens), Llama 3 405B (Grattafiori et al. 2024, section 3.4.1: 4M tokens, then 8M, then 16M),
# DeepSeek-V3 (2024, section 4.2), the lengths of Qwen2.5, Qwen3 (before they are extended) and Mixtral. Assumed: 4M
# tokens if no batch is published, and for Llama 3 70B the 8M of the second phase.
_PRETRAINING = {
    "gpt2-": (1024, 512),
    "gpt3-": (2048, 1536),
    "mt-nlg-": (2048, 1920),
    "opt-": (2048, 1024),
    "bloom-": (2048, 2048),
    "bloom-560m": (2048, 256),
    "bloom-7b1": (2048, 512),
    "gpt-neox-": (2048, 1538),
    "palm-": (2048, 1024),
    "gemma-": (8192, 512),
    "llama1-": (2048, 2048),
    "llama2-": (4096, 1024),
    "llama3-": (8192, 512),
    "llama3-70b": (8192, 1024),
    "llama3-405b": (8192, 2048),
    "qwen2.5-": (4096, 1024),
    "qwen3-": (4096, 1024),
    "mixtral-": (32768, 128),
    "deepseek-v3": (4096, 15360),
}


def pretraining(preset: str) -> Keys:
    """The keys of `[train]` with which a preset's model was pretrained. All are planned in bfloat16: papers before 2021 used
    float16 or do not say, and DeepSeek-V3's fp8 is a separate key."""
    begins = max((name for name in _PRETRAINING if preset.startswith(name)), key=len)
    seq_len, global_batch = _PRETRAINING[begins]
    return dict(dtype="bfloat16", seq_len=seq_len, global_batch=global_batch)
