"""The model families that both sides know, each described once, for reading and for writing `config.json`.

A family says which of its keys mean the same as ours, which of our settings all its models share, and for which of its keys our
network supports only some values.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from shardwise.run import Problem, UserError

Keys = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """Models that share an architecture in `transformers`."""

    architecture: str
    model_type: str
    keys: dict[str, str]  # their key to our key of the same meaning; their null is our 0
    ours: Keys  # our settings that every model of the family shares
    only: dict[str, tuple[Any, ...]]  # values our network supports, the default first
    defaults: Keys = field(default_factory=dict)  # of optional keys; the other keys are required
    theta: float = 10000.0


_SHAPE = {
    "vocab_size": "vocab",
    "hidden_size": "hidden",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": "ffn",
    "max_position_embeddings": "max_positions",
    "rms_norm_eps": "norm_eps",
    "initializer_range": "init_std",
    "tie_word_embeddings": "tied_embeddings",
}
_GROUPED = _SHAPE | {"num_key_value_heads": "kv_heads", "head_dim": "head_dim"}
_LLAMA_LIKE: Keys = {
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": "none",
    "position": "rotary",
    "attention": "grouped",
    "qk_norm": False,
    "experts": 0,
}
_GPT_LIKE = _LLAMA_LIKE | {"norm": "layernorm", "activation": "gelu", "bias": "all", "sliding_window": 0}
_MOE: Keys = {"router": "softmax", "router_groups": 1, "router_scale": 1.0, "shared_experts": 0}
_DEFAULTS: Keys = {"initializer_range": 0.02, "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "head_dim": None}
_SILU = {"hidden_act": ("silu", "swish")}
_NO_BIAS = {"attention_bias": (False,)}


def without(keys: Keys, *names: str) -> Keys:
    """The keys without those named."""
    return {name: value for name, value in keys.items() if name not in names}


_KNOWN = (
    Family(
        "GPT2LMHeadModel",
        "gpt2",
        {
            "vocab_size": "vocab",
            "n_embd": "hidden",
            "n_layer": "layers",
            "n_head": "heads",
            "n_inner": "ffn",
            "n_positions": "max_positions",
            "layer_norm_epsilon": "norm_eps",
            "initializer_range": "init_std",
            "tie_word_embeddings": "tied_embeddings",
        },
        _GPT_LIKE | {"position": "learned"},
        {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        {"n_inner": None, "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": True},
    ),
    Family(
        "OPTForCausalLM",
        "opt",
        without(_SHAPE, "intermediate_size", "rms_norm_eps", "initializer_range")
        | {"ffn_dim": "ffn", "init_std": "init_std"},
        _GPT_LIKE | {"activation": "relu", "norm_eps": 1e-5, "position": "learned", "position_offset": 2},
        {
            "activation_function": ("relu",),
            "do_layer_norm_before": (True,),
            "_remove_final_layer_norm": (False,),
            "enable_bias": (True,),
            "layer_norm_elementwise_affine": (True,),
        },
        {"init_std": 0.02, "tie_word_embeddings": True},
    ),
    Family(
        "BloomForCausalLM",
        "bloom",
        {
            "vocab_size": "vocab",
            "hidden_size": "hidden",
            "n_layer": "layers",
            "n_head": "heads",
            "seq_length": "max_positions",
            "layer_norm_epsilon": "norm_eps",
            "initializer_range": "init_std",
            "tie_word_embeddings": "tied_embeddings",
        },
        _GPT_LIKE | {"position": "alibi", "embedding_norm": True},
        {"apply_residual_connection_post_layernorm": (False,)},
        # The network has no maximum length; the file may state the length it was trained with.
        {"seq_length": 2048, "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": True},
    ),
    Family(
        "GemmaForCausalLM",
        "gemma",
        _GROUPED,
        _LLAMA_LIKE | {"activation": "geglu", "embedding_scale": True, "sliding_window": 0},
        # Its first files say "gelu" but mean the tanh approximation.
        _NO_BIAS | {"hidden_act": ("gelu_pytorch_tanh", "gelu"), "hidden_activation": ("gelu_pytorch_tanh", None)},
        _DEFAULTS | {"head_dim": 256, "num_key_value_heads": None, "tie_word_embeddings": True},
    ),
    Family(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        without(_SHAPE, "rms_norm_eps") | {"layer_norm_eps": "norm_eps"},
        _GPT_LIKE | {"parallel_block": True, "parallel_norms": 2},
        {
            "hidden_act": ("gelu_fast", "gelu_new", "gelu_pytorch_tanh"),
            "use_parallel_residual": (True,),
            "attention_bias": (True,),
        },
        {"layer_norm_eps": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": False},
    ),
    Family(
        "LlamaForCausalLM",
        "llama",
        _GROUPED,
        _LLAMA_LIKE | {"sliding_window": 0},
        _SILU | _NO_BIAS | {"mlp_bias": (False,)},
        _DEFAULTS | {"num_key_value_heads": None},
    ),
    Family(
        "MistralForCausalLM",
        "mistral",
        _GROUPED | {"sliding_window": "sliding_window"},
        _LLAMA_LIKE,
        _SILU,
        _DEFAULTS | {"sliding_window": 4096},
    ),
    Family("Qwen2ForCausalLM", "qwen2", _GROUPED, _LLAMA_LIKE | {"bias": "qkv"}, _SILU, _DEFAULTS),
    Family(
        "Qwen3ForCausalLM",
        "qwen3",
        _GROUPED,
        _LLAMA_LIKE | {"qk_norm": True},
        _SILU | _NO_BIAS,
        _DEFAULTS | {"head_dim": 128},
    ),
    Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        _GROUPED
        | {
            "num_experts": "experts",
            "num_experts_per_tok": "experts_per_token",
            "moe_intermediate_size": "expert_ffn",
            "norm_topk_prob": "router_normalize",
        },
        without(_LLAMA_LIKE, "experts") | _MOE | {"qk_norm": True},
        _SILU | _NO_BIAS | {"decoder_sparse_step": (1,)},
        _DEFAULTS | {"norm_topk_prob": False},
    ),
    Family(
        "MixtralForCausalLM",
        "mixtral",
        _GROUPED
        | {"num_local_experts": "experts", "num_experts_per_tok": "experts_per_token"}
        | {"sliding_window": "sliding_window"},
        without(_LLAMA_LIKE, "experts") | _MOE | {"dense_layers": 0, "router_normalize": True},
        _SILU,
        _DEFAULTS | {"rms_norm_eps": 1e-5, "sliding_window": None},
        theta=1e6,
    ),
    Family(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        _SHAPE
        | {
            "q_lora_rank": "q_rank",
            "kv_lora_rank": "kv_rank",
            "qk_nope_head_dim": "nope_dim",
            "qk_rope_head_dim": "rope_dim",
            "v_head_dim": "v_dim",
            "n_routed_experts": "experts",
            "num_experts_per_tok": "experts_per_token",
            "moe_intermediate_size": "expert_ffn",
            "n_shared_experts": "shared_experts",
            "first_k_dense_replace": "dense_layers",
            "n_group": "router_groups",
            "topk_group": "router_top_groups",
            "norm_topk_prob": "router_normalize",
            "routed_scaling_factor": "router_scale",
        },
        without(_LLAMA_LIKE, "experts") | {"attention": "latent", "router": "sigmoid", "sliding_window": 0},
        _SILU | _NO_BIAS | {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)},
        without(_DEFAULTS, "head_dim") | {"norm_topk_prob": True},
    ),
)


def with_exact_gelu(family: Family, key: str) -> Family:
    """The variant of a family with the exact GELU (error function) instead of its approximation; Pythia is such a GPT-NeoX."""
    ours, only = family.ours | {"activation": "gelu_erf"}, family.only | {key: ("gelu", "gelu_python")}
    return replace(family, ours=ours, only=only)


_BY_TYPE = {family.model_type: family for family in _KNOWN}
# If two families describe a network, the first is written. A GPT-NeoX config that names no activation means the exact
# GELU.
FAMILIES = (
    with_exact_gelu(_BY_TYPE["gpt_neox"], "hidden_act"),
    *_KNOWN,
    with_exact_gelu(_BY_TYPE["gpt2"], "activation_function"),
)


CLASSIFIES = "ForSequenceClassification"


def gives_scores(values: Keys) -> bool:
    """Whether a config describes a sequence classification model."""
    named = values.get("architectures") or []
    return isinstance(named, list) and len(named) == 1 and str(named[0]).endswith(CLASSIFIES)


def architecture_of(family: Family, scores: bool) -> str:
    """The class in transformers of a family's model, a language model or one that returns scores."""
    name = family.architecture
    return name.removesuffix("ForCausalLM").removesuffix("LMHeadModel") + CLASSIFIES if scores else name


def family_named(values: Keys, where: str) -> Family:
    """The family that a config names: of language models, or of reward models with one score."""
    known = ", ".join(family.architecture for family in _KNOWN)
    named, scores = values.get("architectures") or [], gives_scores(values)
    labels = values.get("num_labels", len(values.get("id2label") or (0, 1)))
    if scores and labels != 1:
        message = f"is of {labels} labels; of models that classify, only reward models with one score are read"
        raise UserError(Problem(message, "id2label", where))
    found = [
        family
        for family in FAMILIES
        if named == [architecture_of(family, scores)] or (not named and values.get("model_type") == family.model_type)
    ]
    if found:
        functions = ("hidden_act", "activation_function")
        return next(
            (f for f in found if all(values.get(k, v[0]) in v for k, v in f.only.items() if k in functions)), found[-1]
        )
    name = ", ".join(map(str, named)) if isinstance(named, list) and named else values.get("model_type")
    raise UserError(Problem(f"{name} is not a known architecture; known: {known}", "architectures", where))
