"""`config.json` to the network's keys and back, by the description of its family.

Settings that the network does not support are refused, all such keys at once: a network that is almost the published one would
load without complaint and answer wrongly.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from shardwise.checkpoint.huggingface.families import (
    FAMILIES,
    Family,
    Keys,
    architecture_of,
    family_named,
    gives_scores,
    without,
)
from shardwise.checkpoint.huggingface.rope import read_rope, write_rope
from shardwise.run import ModelConfig, Problem, UserError, run_from_dict

Refuse = Callable[[str, str], None]  # a key of config.json, and what is wrong with it

# Noise added only while training; our trainer has its own settings.
_TRAINING_ONLY = ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout",
                  "router_jitter_noise")  # fmt: skip
# Keys without meaning in a model with dense layers only.
_MOE_ONLY = ("experts", "experts_per_token", "expert_ffn", "shared_experts", "dense_layers", "router", "router_groups",
             "router_top_groups")  # fmt: skip
# Keys that transformers writes, with their other names in published files.
_BLOOM_NAMES = {"hidden_size": "n_embed", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers"}
# Values that most families share; a family with another value must name it.
_PLAIN: Keys = {
    "parallel_block": False,
    "parallel_norms": 1,
    "embedding_scale": False,
    "embedding_norm": False,
    "position_offset": 0,
    "rope_share": 1.0,
}


def model_from_config(values: Keys, where: str = "config.json") -> tuple[ModelConfig, list[str]]:
    """The network that a `config.json` describes, and a note for each setting that was left out."""
    family = family_named(values, where)
    if family.model_type == "qwen3_moe" and "num_local_experts" in values:
        # transformers 5 writes the number of experts under Mixtral's key; 4 and published files have their own key.
        values = {"num_experts": values["num_local_experts"], **values}
    if family.model_type == "bloom":
        values = {name: values[other] for name, other in _BLOOM_NAMES.items() if other in values} | values
    problems: list[Problem] = []

    def refuse(key: str, message: str) -> None:
        problems.append(Problem(message, key, where))

    model: Keys = dict(family.ours)
    for theirs, ours in family.keys.items():
        if theirs not in values and theirs not in family.defaults:
            refuse(theirs, f"is missing; a {family.model_type} config needs it")
            continue
        value = values.get(theirs, family.defaults.get(theirs))
        model[ours] = 0 if value is None else value
    for key, allowed in family.only.items():
        if values.get(key, allowed[0]) not in allowed:
            choice = " or ".join(map(json.dumps, allowed))
            refuse(key, f"is {json.dumps(values[key])}; this network only has {choice}")
    if model["position"] == "rotary":
        latent = model["attention"] == "latent"
        model |= read_rope(values, family.theta, refuse, latent, model.get("max_positions", 0))
    if family.model_type in ("qwen2", "qwen3", "qwen3_moe"):
        model["sliding_window"] = _read_qwen_window(values, model, family, refuse)
    if family.model_type == "qwen3_moe":
        model["dense_layers"] = _read_dense_layers(values, refuse)
    if family.model_type == "opt" and values.get("word_embed_proj_dim", model["hidden"]) != model["hidden"]:
        refuse("word_embed_proj_dim", f"must be hidden_size = {model['hidden']}: embeddings are not projected here")
    if family.model_type == "deepseek_v3":
        heads = values.get("num_attention_heads")
        if values.get("num_key_value_heads", heads) not in (None, heads):
            refuse("num_key_value_heads", f"must be num_attention_heads = {heads}: latent keys serve every head")
    if problems:
        raise UserError(*problems)
    if family.model_type == "deepseek_v3" and model["dense_layers"] == model["layers"]:
        model = without(model, *_MOE_ONLY)
    return _checked(model, family, where, gives_scores(values)), _training_only(values)


def _checked(model: Keys, family: Family, where: str, scores: bool) -> ModelConfig:
    """The validated model config of a run; problems are reported under the keys of the file."""
    positions = model["max_positions"]
    seq_len = min(512, positions) if isinstance(positions, int) and positions > 0 else 512
    try:
        objective = {"kind": "reward"} if scores else {}
        return run_from_dict({"model": model, "train": {"seq_len": seq_len}, "objective": objective}, where).model
    except UserError as e:
        names = {f"model.{ours}": theirs for theirs, ours in family.keys.items()}
        raise UserError(*(Problem(p.message, names.get(p.key, p.key), p.where) for p in e.problems)) from None


def _training_only(values: Keys) -> list[str]:
    noisy = [f"{key} = {values[key]}" for key in _TRAINING_ONLY if values.get(key)]
    return [f"noise of training that this network does not have ({', '.join(noisy)})"] if noisy else []


def _read_qwen_window(values: Keys, model: Keys, family: Family, refuse: Refuse) -> Any:
    window = values.get("sliding_window", 4096) if values.get("use_sliding_window") else None
    if family.model_type == "qwen3_moe":
        return window or 0
    full, sliding = "full_attention", "sliding_attention"
    key, types = "layer_types", values.get("layer_types")
    if types is None:
        key, first = "max_window_layers", values.get("max_window_layers", 28)
        known = isinstance(first, int) and isinstance(model.get("layers"), int)
        types = [sliding if window and n >= first else full for n in range(model["layers"])] if known else []
    if types not in ([full] * len(types), [sliding] * len(types)):
        refuse(key, "asks for layers of different kinds; here all attend to everything, or all to the same window")
    elif sliding in types and not window:
        refuse(key, "asks for sliding layers, but use_sliding_window or sliding_window is not set")
    return window if sliding in types else 0


def _read_dense_layers(values: Keys, refuse: Refuse) -> int:
    dense = values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or dense != list(range(len(dense))):
        refuse("mlp_only_layers", f"is {json.dumps(dense)}; in this network the dense layers come first")
        return 0
    return len(dense)


def config_from_model(config: ModelConfig, where: str = "") -> tuple[str, Keys]:
    """The architecture in `transformers` that computes the same as our network, and its `config.json`, with rotary settings in the
    form of transformers 5 and in that of 4, which each read their own."""
    family = _family_of(config, where)
    architecture = architecture_of(family, config.scores)
    values: Keys = {"architectures": [architecture], "model_type": family.model_type}
    if config.scores:
        values |= {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    for theirs, ours in family.keys.items():
        value = getattr(config, ours)
        values[theirs] = None if ours in ("q_rank", "sliding_window") and not value else value
    values |= {key: allowed[0] for key, allowed in family.only.items()}
    if config.position == "rotary":
        values |= write_rope(config)
    if family.model_type in ("qwen2", "qwen3", "qwen3_moe"):
        values |= {
            "use_sliding_window": bool(config.sliding_window),
            "sliding_window": config.sliding_window or None,
            "max_window_layers": 0 if config.sliding_window else config.layers,
        }
    if family.model_type == "gpt2":
        values |= {"n_ctx": config.max_positions, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    elif family.model_type in ("gpt_neox", "bloom"):
        values |= {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    elif family.model_type == "opt":
        values |= {"word_embed_proj_dim": config.hidden, "dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.0}
    elif family.model_type == "qwen3_moe":
        values |= {"num_local_experts": config.experts, "mlp_only_layers": list(range(config.dense_layers))}
    elif family.model_type == "mixtral":
        values["intermediate_size"] = config.expert_ffn
    elif family.model_type == "deepseek_v3":
        values |= {"num_key_value_heads": config.heads, "rope_interleave": True, "num_nextn_predict_layers": 0}
        if not config.experts:
            values["first_k_dense_replace"] = config.layers
    return architecture, values


def _family_of(config: ModelConfig, where: str) -> Family:
    def differences(family: Family) -> list[Problem]:
        wanted: Keys = _PLAIN | family.ours
        if family.model_type in ("gpt2", "opt", "gpt_neox", "bloom"):
            wanted |= {"kv_heads": config.heads, "head_dim": config.hidden / config.heads}
        if family.model_type == "bloom":
            wanted["ffn"] = 4 * config.hidden
        if family.model_type == "deepseek_v3" and not config.experts:
            del wanted["router"]
        if family.model_type == "gpt_neox":
            wanted["rope_share"] = config.rope_share
        nearest = f"the nearest family, {family.architecture}, has"
        different = {k: getattr(config, k) for k, v in wanted.items() if getattr(config, k) != v}
        return [Problem(f"is {v!r}; {nearest} {wanted[k]!r}", f"model.{k}", where) for k, v in different.items()]

    def distance(family: Family) -> int:
        # Structural differences count more than differences in settings.
        made_of = ("model.experts", "model.attention", "model.position")
        return sum(10 if problem.key in made_of else 1 for problem in differences(family))

    family = min(FAMILIES, key=distance)
    problems = differences(family)
    if problems:
        raise UserError(Problem("no Hugging Face architecture computes what this network does", where=where), *problems)
    return family
