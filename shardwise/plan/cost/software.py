"""A training program declared by facts: which one, which release, what it fuses, overlaps and recomputes.

A row of published measurements, or a user who plans a run `--as` another program, states facts (`docs/validation.md` lists them). A
`Framework` is made of them: first the defaults of the program in that year, then each fact. Where a fact that would change the time
is not stated, its likeliest value is planned; every other common value is an `Alternative`, which shifts the prediction and widens
its interval.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.plan.cost.frameworks import FRAMEWORKS, Framework

Facts = Mapping[str, Any]

_EITHER = ("true", "false")
FACTS: dict[str, tuple[str, ...]] = {
    # every fact that changes a plan: its allowed values, or none where it is free text
    "release": (),
    "attention": ("unfused", "flash1", "flash2", "flash3", "flash4", "cudnn", "te", "flex"),
    "loss": ("full", "fused", "chunked", "vocab-parallel"),
    "compile": _EITHER,
    "cuda_graphs": _EITHER,
    "tp_overlap": _EITHER,
    "tp_async": _EITHER,
    "overlap_grad_reduce": _EITHER,
    "overlap_param_gather": _EITHER,
    "dispatcher": ("allgather", "alltoall", "deepep", "hybridep", "flex"),
    "a2a_overlap": _EITHER,
    "token_drop": _EITHER,
    "fp8_recipe": ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8", "nvfp4"),
}

LATER = 9999.0
_ONE_ENTRY = {
    # entry of FRAMEWORKS: the programs that it describes, whenever they were released
    "megatron-2022": ("zero-bubble", "nanotron"),
    "megatron-deepspeed": ("megatron-deepspeed", "gpt-neox"),
    "megatron-flash1": ("flash-attn-training",),
    "nemo": ("nemo", "megatron-bridge", "primus", "megascale", "hai-llm"),
    "internevo": ("internevo",),
    "fsdp": ("fsdp", "llm-foundry", "transformers", "olmo", "automodel"),
    "fairscale": ("metaseq", "meta-internal"),
    "torchtitan": ("torchtitan",),
    "colossalai": ("colossalai",),
    "jax": ("jax", "maxtext", "paxml"),
    "shardwise-compiled": ("shardwise",),
}
PROGRAMS: dict[str, tuple[tuple[float, str], ...]] = {
    # program: its entries of FRAMEWORKS, each with the year until which it held
    "megatron-lm": ((2022.0, "megatron"), (2023.5, "megatron-2022"), (LATER, "nemo")),
    "deepspeed": ((2022.5, "deepspeed-2021"), (LATER, "deepspeed")),
    **{name: ((LATER, entry),) for entry, names in _ONE_ENTRY.items() for name in names},
}
ALIASES = {"fairseq": "metaseq", "accelerate": "transformers", "axolotl": "transformers", "pytorch": "fsdp", "t5x": "jax",
           "levanter": "jax", "composer": "llm-foundry", "nemo-framework": "nemo", "megatron": "megatron-lm",
           "megatron-core": "megatron-lm", "mosaicml": "llm-foundry", "picotron": "nanotron", "neox": "gpt-neox"}  # fmt: skip
"""Other names, and programs that behave like another."""
SHOWN = {"zero-bubble": {"attention": "unfused"}}
"""Facts that a program's published memory shows, which override facts that its rows only assume: 26 rows of zero-bubble pipelines
hold the attention scores."""
YEARS = {"volta": 2020.4, "ampere": 2022.5, "hopper": 2024.5, "blackwell": 2025.5, "cdna3": 2025.0, "tpu": 2022.5}
"""The year in which most published measurements of a chip generation were made."""
USER_BUFFERS, PIECES, EXPERTS_HIDDEN = 0.85, 0.5, 0.6
"""Shares of traffic that overlap with GEMMs: tensor traffic through user buffers, in pieces, and expert traffic with other work."""


@dataclass(frozen=True)
class Situation:
    """The properties of a run that decide which facts matter, and which values are common."""

    generation: str
    experts: bool = False
    expert: int = 1
    tensor: int = 1
    data: int = 1
    zero: int = 1
    fp8: bool = False
    bf16: bool = True


@dataclass(frozen=True)
class Alternative:
    """Another common behaviour of the program."""

    what: str
    chance: float
    framework: Framework


@dataclass(frozen=True)
class DeclaredFramework:
    """The program as it is planned, and the alternatives for facts that were not stated."""

    framework: Framework
    alternatives: tuple[Alternative, ...] = ()
    known: bool = True
    """Whether the program is one of `PROGRAMS`."""


def year_of(software: Facts, generation: str = "") -> float:
    """The year of a release: from "2021-04", "2023", the year and month of a container such as "25.02", or the date of measurement.
    A version number gives no year; then it is the usual year of the chips."""
    for key in ("release", "date"):
        text = str(software.get(key) or "")
        if found := re.match(r"(20\d\d)(?:-(\d\d))?", text):
            return int(found[1]) + (int(found[2] or 7) - 1) / 12
        if found := re.match(r"(2\d)\.(\d\d)\b", text):
            return 2000 + int(found[1]) + (int(found[2]) - 1) / 12
    return YEARS.get(generation, 2024.0)


def _name(given: Any) -> str:
    """A program's name as in `PROGRAMS`."""
    name = str(given or "").lower()
    return ALIASES.get(name, name)


def program_of(software: Facts, situation: Situation) -> tuple[str, bool]:
    """The entry of `FRAMEWORKS` that a program starts from, and whether its name is known. A program without a name, or with a new
    one, is taken to do what most programs did with that layout at that time."""
    year = year_of(software, situation.generation)
    for name in map(_name, (software.get("library"), software.get("framework"))):
        if name in PROGRAMS:
            return next(entry for until, entry in PROGRAMS[name] if year < until), True
    if situation.zero == 3 and not situation.experts:
        return "fsdp", False
    return next(entry for until, entry in PROGRAMS["megatron-lm"] if year < until), False


def framework_of_facts(software: Facts, situation: Situation) -> DeclaredFramework:
    """The framework that the facts declare, and the alternatives that they leave open."""
    name, known = program_of(software, situation)
    base, year = FRAMEWORKS[name], year_of(software, situation.generation)
    if name == "megatron-deepspeed" and situation.bf16:
        base = FRAMEWORKS["megatron-bf16"]
    stated = {key: value for key, value in software.items() if value is not None and key != "assumed"}
    assumed = software.get("assumed") or ()
    for program in map(_name, (software.get("framework"), software.get("library"))):
        shown = SHOWN.get(program, {})
        stated |= {key: value for key, value in shown.items() if key not in stated or key in assumed}
    likely = {key: chances[0][0] for key, chances in _open(stated, base, situation, year).items()}
    framework = declared(base, likely | stated, situation)
    others = []
    for key, chances in _open(stated, base, situation, year).items():
        for value, chance in chances[1:]:
            other = declared(base, likely | stated | {key: value}, situation)
            if other != framework:
                said = {True: "on", False: "off"}.get(likely[key], likely[key])
                others.append(Alternative(f"{key.replace('_', ' ')} {said}", chance, other))
    return DeclaredFramework(framework, tuple(others), known)


def mixture(others: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Mean and standard deviation of a sum of independent terms, each of which has its value with its chance, and else is 0."""
    mean = sum(chance * value for chance, value in others)
    return mean, math.sqrt(sum(chance * (1.0 - chance) * value**2 for chance, value in others))


def _open(
    stated: Facts, base: Framework, situation: Situation, year: float
) -> dict[str, tuple[tuple[Any, float], ...]]:
    """Facts that matter here and were not stated: their possible values, the likeliest first, each with its chance."""

    def either(chance: float) -> tuple[tuple[bool, float], ...]:
        return ((True, chance), (False, 1 - chance)) if chance >= 0.5 else ((False, 1 - chance), (True, chance))

    modern = base.family in ("nemo", "jax")
    found: dict[str, tuple[tuple[Any, float], ...]] = {}
    if "attention" not in stated:
        if year < 2022.7:
            found["attention"] = (("unfused", 0.9), ("flash1", 0.1))
        elif year < 2023.6:
            found["attention"] = (("flash1", 0.6), ("unfused", 0.4))
        elif situation.generation in ("volta", "ampere"):
            found["attention"] = (("flash2", 0.8), ("flash1", 0.2))
        else:
            found["attention"] = (("te", 0.8), ("flash2", 0.2)) if modern else (("flash2", 0.6), ("te", 0.4))
    if "compile" not in stated and base.kernels == "eager" and year > 2023.5:
        found["compile"] = either(0.3 if year < 2025 else 0.6 if base.name == "torchtitan" else 0.3)
    if situation.tensor > 1 and not {"tp_overlap", "tp_async"} & set(stated):
        found["tp_overlap"] = either(0.5 if modern else 0.05)
    if situation.data > 1 and "overlap_grad_reduce" not in stated:
        found["overlap_grad_reduce"] = either(0.8 if modern or base.gradients_overlap else 0.15)
    if situation.data > 1 and "overlap_param_gather" not in stated and 0 < situation.zero < 3:
        found["overlap_param_gather"] = either(0.7 if modern else 0.1)
    if situation.experts and situation.expert > 1:
        if "dispatcher" not in stated:
            found["dispatcher"] = (("alltoall", 0.6), ("deepep", 0.4))
        if "a2a_overlap" not in stated:
            found["a2a_overlap"] = either(0.3)
    if "cuda_graphs" not in stated and modern and year > 2025:
        found["cuda_graphs"] = either(0.25)
    return found


FUSED_TE = 2024.4
"""Until then Transformer Engine called FlashAttention-2, also on Hopper; since then cuDNN, with context parallelism too."""
KERNELS = {"flash4": "flash3", "cudnn": "flash3", "te": "flash3", "flex": "flash2"}
LOSSES: dict[str, dict[str, Any]] = {
    # bytes moved for each logit, and bytes held
    "full": dict(loss_bytes=36.0, logit_bytes=14.0),
    "fused": dict(loss_bytes=20.0, logit_bytes=6.0),
    "vocab-parallel": dict(loss_bytes=44.0, logit_bytes=10.0),
    "chunked": dict(chunked_loss=True),
}
MODULES = {
    # a program's module name: our names of the ops that are recomputed, some with their part of the network first
    "core_attn": ("attention",),
    "layernorm": ("norm",),
    "moe_act": ("experts activation",),
    "mlp": ("up", "ffn activation", "down"),
    "moe": (
        "router",
        "choose",
        "to experts",
        "expert all_to_all",
        "expert up",
        "experts activation",
        "expert down",
        "from experts",
    ),
    "mla_up_proj": ("q_up", "kv_up", "rotary"),
    "shared_experts": ("up", "ffn activation", "down"),
}
SCOPES = {"attn": 0.45, "mlp": 0.25, "moe_router": 0.15, "moe_preprocess": 0.1, "moe": 0.3}
"""Shares of a layer's launches that a CUDA graph of that part takes over."""


def declared(base: Framework, facts: Facts, situation: Situation) -> Framework:
    """The framework with the facts applied to it."""
    changes: dict[str, Any] = {}
    if word := facts.get("attention"):
        changes["attention"] = KERNELS.get(word, word)
        if word == "te" and year_of(facts, situation.generation) < FUSED_TE:
            changes["attention"] = "flash2"
    if (word := facts.get("loss")) in LOSSES:
        changes |= LOSSES[word]
    if "compile" in facts and base.kernels != "jit" and base.family not in ("nemo", "jax"):
        changes["kernels"] = "compiled" if facts["compile"] else "eager"
    if facts.get("cuda_graphs"):
        changes["graphed"] = _graphed(facts.get("cuda_graph_scope"))
    if facts.get("tp_overlap"):
        changes["tensor_overlap"] = USER_BUFFERS
    elif facts.get("tp_async"):
        changes["tensor_overlap"] = PIECES
    elif "tp_overlap" in facts or "tp_async" in facts:
        changes["tensor_overlap"] = 0.0
    for key, name in (("overlap_grad_reduce", "gradients_overlap"), ("overlap_param_gather", "gather_overlap")):
        if key in facts:
            changes[name] = bool(facts[key])
    if base.family == "nemo" and "overlap_grad_reduce" in facts:
        changes["pipeline_blocks"] = not facts["overlap_grad_reduce"]
    if situation.experts:
        changes["expert_once"] = facts.get("dispatcher") in ("deepep", "hybridep", "flex")
        changes["expert_overlap"] = EXPERTS_HIDDEN if facts.get("a2a_overlap") else 0.0
        changes["drops_tokens"] = bool(facts.get("token_drop"))
        changes["dispatcher"] = facts.get("dispatcher") or "alltoall"
    if recipe := facts.get("fp8_recipe"):
        changes["fp8_recipe"] = recipe
    modules = facts.get("recompute_modules")
    if modules:
        changes["recompute_selective"] = tuple(dict.fromkeys(op for m in modules for op in MODULES.get(m, (m,))))
    return replace(base, **changes)


def _graphed(scope: Any) -> float:
    """Share of the launches that CUDA graphs take over."""
    if not scope or isinstance(scope, str):
        return 0.95
    return min(0.95, sum(SCOPES.get(part, 0.2) for part in scope))
