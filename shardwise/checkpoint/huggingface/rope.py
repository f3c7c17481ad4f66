"""Rotary settings of a `config.json`, in the form of transformers 5 (`rope_parameters`) and of 4 (`rope_theta` and `rope_scaling`,
whose kind was once called `type`). Kinds of scaling that our network lacks are refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from shardwise.model.rope import yarn_get_mscale
from shardwise.run import ModelConfig

Keys = dict[str, Any]


def read_rope(values: Keys, theta: float, refuse: Callable[[str, str], None], latent: bool, max_positions: Any) -> Keys:
    """Our rotary keys. `theta` is the family's base, for files that name none."""
    # transformers prefers rope_scaling where a file has both.
    name = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    scaling = values.get(name) or {}
    if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
        refuse(name, "must be one set of rotary settings; this network has the same in all layers")
        return {}

    def number(key: str, default: float | None = None) -> float:
        value = scaling.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
            refuse(f"{name}.{key}", f"must be a number, not {value!r}" if key in scaling else "is missing")
            return 1.0
        return float(value)

    keys: Keys = {"rope_theta": scaling.get("rope_theta") or values.get("rope_theta") or theta}
    partial = scaling.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if values.get("model_type") == "gpt_neox":  # transformers 4 has its own names for both
        keys["rope_theta"] = scaling.get("rope_theta") or values.get("rotary_emb_base") or theta
        keys["rope_share"] = partial or values.get("rotary_pct") or 0.25
    elif partial not in (None, 1, 1.0):
        refuse("partial_rotary_factor", f"is {partial}; this family's heads are rotated whole here")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "llama3", "yarn"):
        refuse(f"{name}.rope_type", f"is {kind}; this network has default, llama3 and yarn")
    if kind not in ("llama3", "yarn"):
        return keys
    keys |= {"rope_scaling": kind, "rope_factor": number("factor")}
    keys["rope_original"] = (
        values.get("original_max_position_embeddings")
        or scaling.get("original_max_position_embeddings")
        or max_positions
    )
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if high <= low:
            refuse(f"{name}.high_freq_factor", f"{high:g} must be above low_freq_factor = {low:g}")
        return keys | {"rope_low_freq": low, "rope_high_freq": high}
    keys |= {"yarn_beta_fast": number("beta_fast", 32.0) or 32.0, "yarn_beta_slow": number("beta_slow", 1.0) or 1.0}
    if scaling.get("truncate") is False:
        refuse(f"{name}.truncate", "is false; this network rounds YaRN's range to whole pairs")
    mscale, mscale_all = number("mscale", 0.0), number("mscale_all_dim", 0.0)
    ratio = yarn_get_mscale(keys["rope_factor"], mscale) / yarn_get_mscale(keys["rope_factor"], mscale_all)
    amplitude = number(
        "attention_factor", ratio if mscale and mscale_all else yarn_get_mscale(keys["rope_factor"], 1.0)
    )
    # Only DeepSeek's attention also scales its scores by mscale_all_dim.
    mscale_all = mscale_all if latent else 0.0
    keys["yarn_mscale_all"] = mscale_all
    keys["yarn_mscale"] = _weight(amplitude * yarn_get_mscale(keys["rope_factor"], mscale_all), keys["rope_factor"])
    if keys["yarn_mscale"] is None:
        refuse(f"{name}.attention_factor", f"an amplitude of {amplitude:g} is less than this network's YaRN can have")
    elif mscale and mscale_all and scaling.get("attention_factor") is None:
        keys["yarn_mscale"] = mscale  # the file's own value, without rounding error
    return keys


def _weight(growth: float, factor: float) -> float | None:
    """The weight of the logarithm for which `yarn_get_mscale` returns `growth`, or None if there is none."""
    if factor <= 1:
        return 1.0 if math.isclose(growth, 1.0) else None
    weight = (growth - 1.0) / (0.1 * math.log(factor))
    return round(weight, 12) if weight > -1e-9 else None


def write_rope(config: ModelConfig) -> Keys:
    """Both forms of the rotary settings."""
    scaling: Keys = {"rope_type": "default"}
    if config.rope_scaling != "none":
        scaling = {
            "rope_type": config.rope_scaling,
            "factor": config.rope_factor,
            "original_max_position_embeddings": config.rope_original,
        }
    if config.rope_scaling == "llama3":
        scaling |= {"low_freq_factor": config.rope_low_freq, "high_freq_factor": config.rope_high_freq}
    elif config.rope_scaling == "yarn":
        scaling |= {"beta_fast": config.yarn_beta_fast, "beta_slow": config.yarn_beta_slow}
        scaling |= _write_amplitude(config)
    old = None if config.rope_scaling == "none" else {"type": config.rope_scaling} | scaling
    keys: Keys = {
        "rope_parameters": scaling | {"rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,
        "rope_scaling": old,
    }
    if config.has_ffn_norm and config.parallel_block:  # GPT-NeoX
        keys["rope_parameters"]["partial_rotary_factor"] = config.rope_share
        keys |= {"rotary_pct": config.rope_share, "rotary_emb_base": config.rope_theta}
    return keys


def _write_amplitude(config: ModelConfig) -> Keys:
    weight, weight_all = config.yarn_mscale, config.yarn_mscale_all
    if config.attention == "grouped":
        # Whole heads are rotated, so scaling the scores and scaling the amplitude are the same thing.
        return {} if weight == 1.0 else {"attention_factor": yarn_get_mscale(config.rope_factor, weight)}
    if weight and weight_all:
        return {"mscale": weight, "mscale_all_dim": weight_all}
    growth = yarn_get_mscale(config.rope_factor, weight) / yarn_get_mscale(config.rope_factor, weight_all)
    return ({"mscale_all_dim": weight_all} if weight_all else {}) | {"attention_factor": growth}
