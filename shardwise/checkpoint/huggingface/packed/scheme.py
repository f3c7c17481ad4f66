"""Reads the `quantization_config` of a `config.json`, in the formats of compressed-tensors, AutoAWQ and GPTQ (AutoGPTQ,
GPTQModel). Unknown settings are refused, all at once and by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from shardwise.run import Problem, UserError
from shardwise.run.weights import Activations, WeightFormat

KNOWN = "compressed-tensors, awq and gptq folders are read"


@dataclass(frozen=True)
class Scheme:
    """How some of a folder's matrices are stored."""

    form: WeightFormat
    targets: tuple[str, ...] = ("Linear",)
    """Modules by name, `re:` and an expression, or "Linear" for all."""
    offset: int = 0
    """gptq: the number to add to stored zero points."""

    def takes(self, module: str) -> bool:
        """Whether the scheme applies to a module."""
        return any(_matches(target, module) for target in self.targets)


@dataclass(frozen=True)
class Packing:
    """All schemes of a folder."""

    method: str
    schemes: tuple[Scheme, ...]
    notes: list[str] = field(default_factory=list)

    def of(self, module: str) -> Scheme:
        """The scheme of a module; schemes for named modules take precedence over those for all."""
        named = [each for each in self.schemes if each.takes(module) and "Linear" not in each.targets]
        found = named or [each for each in self.schemes if each.takes(module)]
        if not found:
            raise UserError(f"{module} is packed, but no group of the quantization_config names it")
        return found[0]


def _matches(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return target == "Linear" or module == target or module.endswith(f".{target}")


def read_packing(values: dict[str, Any], where: str) -> Packing | None:
    """The packing of a folder, from its config; None if its weights are unpacked, or in fp8 blocks, which `quantized.py` reads."""
    config = values.get("quantization_config")
    if not config:
        return None
    if not isinstance(config, dict):
        raise UserError(Problem(f"is {config!r}; {KNOWN}", "quantization_config", where))
    method = config.get("quant_method")
    if method == "fp8" and config.get("weight_block_size"):
        return None
    problems: list[Problem] = []

    def refuse(key: str, message: str) -> None:
        problems.append(Problem(message, f"quantization_config.{key}" if key else "quantization_config", where))

    schemes: list[Scheme] = []
    notes: list[str] = []
    if method == "compressed-tensors":
        schemes = _compressed(config, refuse, notes)
    elif method in ("awq", "gptq"):
        schemes = [_awq(config, refuse) if method == "awq" else _gptq(config, refuse)]
    else:
        refuse("quant_method", f"is {method}; {KNOWN}")
    if problems:
        raise UserError(*problems)
    return Packing(str(method), tuple(schemes), notes)


def _group_size(config: dict[str, Any], refuse: Any) -> int:
    size = config.get("group_size", 128)
    if not isinstance(size, int) or size == 0 or size < -1 or (size > 0 and size % 8):
        refuse("group_size", f"is {size!r}; groups are multiples of 8, or -1 for whole rows")
        return 128
    return max(0, size)


def _awq(config: dict[str, Any], refuse: Any) -> Scheme:
    if config.get("bits", 4) != 4:
        refuse("bits", f"is {config['bits']}; awq folders are read with 4")
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        refuse("version", f"is {version}; awq folders are read in the layout of gemm")
    return Scheme(WeightFormat("int4", _group_size(config, refuse), zeros=True))


def _gptq(config: dict[str, Any], refuse: Any) -> Scheme:
    if config.get("bits", 4) != 4:
        refuse("bits", f"is {config['bits']}; gptq folders are read with 4")
    kind = config.get("checkpoint_format", "gptq")
    if kind not in ("gptq", "gptq_v2"):
        refuse("checkpoint_format", f"is {kind}; gptq and gptq_v2 are read")
    # The first version stores zero points minus one, because its kernels add one.
    return Scheme(WeightFormat("int4", _group_size(config, refuse), zeros=True), offset=0 if kind == "gptq_v2" else 1)


def _compressed(config: dict[str, Any], refuse: Any, notes: list[str]) -> list[Scheme]:
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        refuse("config_groups", "is missing or empty")
        return []
    if config.get("kv_cache_scheme"):
        refuse(
            "kv_cache_scheme",
            "asks for scaled keys and values, which are not read; serve.kv_dtype = fp8 keeps them in fp8",
        )
    sparsity = config.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        refuse("sparsity_config.format", f"is {sparsity['format']}; weights are read dense")
    found = []
    for name, group in groups.items():
        key = f"config_groups.{name}"
        weights, inputs = group.get("weights") or {}, group.get("input_activations")
        form = _weights(weights, key, refuse)
        if group.get("output_activations"):
            refuse(f"{key}.output_activations", "rounds outputs, which is not done here")
        if form is not None:
            rounding = _inputs(inputs, form, key, refuse, notes)
            targets = tuple(map(str, group.get("targets") or ("Linear",)))
            found.append(Scheme(WeightFormat(form.kind, form.group, form.zeros, rounding), targets))
    return found


def _weights(weights: dict[str, Any], key: str, refuse: Any) -> WeightFormat | None:
    kind, bits, strategy = weights.get("type", "int"), weights.get("num_bits", 8), weights.get("strategy")
    strategy = strategy or ("group" if weights.get("group_size") else "tensor")
    symmetric = bool(weights.get("symmetric", True))
    if (kind, bits) == ("float", 8) and strategy in ("tensor", "channel"):
        return WeightFormat("fp8")
    if (kind, bits) == ("int", 8) and strategy in ("tensor", "channel") and symmetric:
        return WeightFormat("int8")
    if (kind, bits) == ("int", 4) and strategy in ("group", "channel"):
        group = weights.get("group_size") if strategy == "group" else 0
        return WeightFormat("int4", _group_size({"group_size": group or -1}, refuse), zeros=not symmetric)
    shape = f"{kind}{bits}, {'symmetric' if symmetric else 'asymmetric'}, by {strategy}"
    refuse(f"{key}.weights", f"is {shape}; int4 by group or channel, int8 and fp8 by channel or tensor are read")
    return None


def _inputs(inputs: Any, form: WeightFormat, key: str, refuse: Any, notes: list[str]) -> Activations:
    if not inputs:
        return ""
    rounding: Activations = "fp8" if inputs.get("type") == "float" else "int8"
    if inputs.get("num_bits", 8) != 8 or rounding != form.kind:
        refuse(
            f"{key}.input_activations", f"is {inputs.get('type')}{inputs.get('num_bits')} beside {form.kind} weights"
        )
    if not inputs.get("dynamic"):
        note = "scales of inputs, which are found for each token instead"
        notes.extend([note] if note not in notes else [])
    return rounding
