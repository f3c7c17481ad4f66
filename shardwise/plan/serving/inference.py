"""Predict what serving a model will give: time to the first token, time a token, throughput and memory.

`serving.py` counts what passes cost, `loads.py` what requests wait for; here stand the fitted constants, the question a user
asks, and the rows that others published.

Published rows are predicted with constants fitted without their source (`benchmarks/fit_inference.py`), unless asked otherwise.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from shardwise.hardware import Cluster
from shardwise.plan.published.prediction import Prediction
from shardwise.plan.published.rows import Row, Unsupported, cluster_of_row, model_of
from shardwise.plan.serving.engines import ENGINES, FORMATS
from shardwise.plan.serving.loads import Load, prepare, quantities
from shardwise.plan.serving.serving import GIB, Serving, memory_by_owner
from shardwise.run import ModelConfig, Problem, UserError
from shardwise.run.derive import derive_model

NAMES: dict[str, tuple[float, tuple[str, ...]]] = {
    # name: (value before fitting, what it may depend on)
    "read": (1.0, ("chip", "family", "engine", "format")),
    "matmul": (1.0, ("chip", "family", "engine", "format")),
    "experts": (1.0, ("chip", "family", "engine")),
    "attention": (1.0, ("chip", "family", "engine")),
    "streams": (1.0, ("family",)),
    "tensor": (1.0, ("chip", "family")),
    "wait": (1.0, ("family",)),
    "gap": (1.0e-6, ("family",)),
    "launch": (1.0, ("family",)),
    "step": (1.0, ("family", "engine")),
    "stall": (0.2, ()),
    "load": (1.0, ()),
    "arrive": (1.0, ("engine",)),
    "queue": (0.05, ("engine",)),
}
"""Factors on the seconds of a kind of work: products of a step and of a prompt, experts, attention, kernels that move bytes,
sums between ranks; on an engine's waits, launches, steps and arrivals; on a run under full load. `gap` is seconds between the
kernels of a recorded graph; `stall` the share of the other copies' prompts that a copy of attention waits for at the experts;
`queue` the share of the other clients' prompts that one waits for: a twentieth when all come at once and then each sends ten,
as benchmarks do."""

FIRST = ("latency_ms", "tpot_ms", "decode_ms_per_token", "output_tokens_per_s")
"""What a row is judged by: the first of these that was measured."""

# How many requests TensorRT-LLM's published throughput runs sent, by lengths of prompt and answer (its perf-overview.md).
REQUESTS = {
    (128, 128): 30000, (128, 2048): 3000, (128, 4096): 1500, (500, 2000): 3000, (1000, 1000): 3000, (1000, 2000): 1500,
    (2048, 128): 3000, (2048, 2048): 1500, (5000, 500): 1500, (20000, 2000): 1000,
}  # fmt: skip


@cache
def fitted_inference() -> Mapping[str, Any]:
    """What `fitted.json` holds."""
    return json.loads(resources.files("shardwise.plan.serving").joinpath("fitted.json").read_text("utf-8"))


def groups_of(s: Serving) -> dict[str, str]:
    """What the constants depend on, by name."""
    return {
        "chip": s.chip.name.split("-")[0],
        "family": s.engine.family,
        "engine": s.engine.name,
        "format": s.weights.name if s.weights.bytes < 2 else "",
    }


def constants_of(s: Serving, effects: Mapping[str, float]) -> dict[str, float]:
    """The constants of a serving; `effects` are logarithms by "name" and "name/kind:value"."""
    groups = groups_of(s)
    result = {}
    for name, (start, kinds) in NAMES.items():
        total = effects.get(name, 0.0) + sum(effects.get(f"{name}/{kind}:{groups[kind]}", 0.0) for kind in kinds)
        result[name] = start * math.exp(total)
    return result


def serve(
    model: ModelConfig, cluster: Cluster, tensor: int = 1, pipeline: int = 1, batch: int = 1, input_len: int = 1024,
    output_len: int = 256, precision: str = "bf16", stack: str = "trtllm",
) -> dict[str, Any]:  # fmt: skip
    """A batch that starts and ends together: `ttft_s`, `tpot_s`, `latency_s`, `output_tokens_per_s`, and `memory`, bytes of
    a rank by owner. A mixture's experts are cut like the rest. Raises `UserError` for what does not exist."""
    problems = [
        Problem(f'is "{value}", but has to be one of {", ".join(known)}', name)
        for name, value, known in (("precision", precision, FORMATS), ("stack", stack, ENGINES))
        if value not in known
    ]
    if tensor * pipeline > cluster.devices:
        problems.append(
            Problem(f"{tensor} x {pipeline} ranks, but the cluster has {cluster.devices} devices", "tensor")
        )
    if problems:
        raise UserError(*problems)
    form = FORMATS[precision]
    serving = Serving(
        model=derive_model(model, input_len + output_len),
        cluster=cluster,
        engine=ENGINES[stack],
        weights=form,
        attention_weights=form,
        cache_bytes=_cache_width(precision),
        tensor=tensor,
        pipeline=pipeline,
        expert_tensor=tensor,
    )
    load = Load("static", batch, input_len, output_len)
    found = quantities(prepare(serving, load), constants_of(serving, fitted_inference()["effects"]))
    names = {"ttft": "ttft_s", "tpot": "tpot_s", "latency": "latency_s", "output_tokens_per_s": "output_tokens_per_s"}
    result: dict[str, Any] = {ours: found[name] for name, ours in names.items()}
    return result | {"memory": memory_by_owner(serving, batch, input_len, output_len)}


def _cache_width(precision: str) -> float:
    """Bytes of a number in the cache: published fp8 and fp4 checkpoints come with an 8-bit cache."""
    return 1.0 if precision in ("fp8", "fp4") else 2.0


def serving_of_row(row: Row) -> tuple[Serving, Load, tuple[str, ...]]:
    """A row's serving, its load, and what had to be assumed; raises `Unsupported`."""
    assumed: list[str] = []
    model = model_of(row)
    note = row.get("note") or ""
    ranks = _ranks(row, model, assumed)
    precision = row["precision"] or "bf16"
    if precision not in FORMATS:
        raise Unsupported(f"the precision {precision}")
    devices = ranks["tensor"] * ranks["pipeline"] * ranks["copies"]
    cluster = cluster_of_row(row, devices)
    windowed = (0.0, 0)
    if "alternating" in str(row["model"].get("window")):
        windowed = (0.5, int(re.findall(r"\d+", row["model"]["window"])[0]))
    serving = Serving(
        model=model,
        cluster=cluster,
        engine=ENGINES[_engine_name(row)],
        weights=FORMATS[precision],
        attention_weights=FORMATS["bf16" if _wide_attention(model, precision) else precision],
        cache_bytes=_cache_width(precision),
        windowed=windowed,
        **ranks,
    )
    return serving, _load(row, note), tuple(assumed)


def _engine_name(row: Row) -> str:
    """The program, from the note's first word or the family of rows."""
    word = (row.get("note") or "").split(" ")[0].rstrip(";")
    if word in ENGINES:
        return word
    return {"fastertransformer": "fastertransformer", "kipply": "fastertransformer", "gpt_fast": "gpt-fast"}.get(
        row["group"], "trtllm"
    )


def _wide_attention(model: ModelConfig, precision: str) -> bool:
    """Published 4-bit checkpoints of mixtures (DeepSeek-R1, gpt-oss) leave attention in 16 bits."""
    return precision == "fp4" and bool(model.experts)


def _ranks(row: Row, model: ModelConfig, assumed: list[str]) -> dict[str, int]:
    """Axes of a row. Where a source multiplied the ranks that tensor and expert axes share, they are counted once."""
    p, devices = row["parallel"], row["hardware"]["gpus"]
    if p.get("tp") is None or p.get("pp") is None or not devices:
        raise Unsupported("the layout was not published")
    tensor, pipeline, expert = p["tp"], p["pp"], p.get("ep") or 1
    copies, expert_tensor = p.get("attention_dp") or 1, p.get("moe_tp") or 1
    if expert > 1 and expert_tensor == expert and tensor * copies == expert * expert:
        assumed.append(f"{expert} devices: the tensor and expert axes are the same ranks")
        devices, tensor, copies, expert_tensor = expert, max(1, tensor // expert), max(1, copies // expert), 1
    if "attention-DP" in (row.get("note") or ""):
        tensor, copies = 1, devices
    if model.heads % tensor:
        assumed.append(f"{tensor} whole copies of attention: its heads do not divide by that")
        tensor, copies, expert = 1, tensor, tensor
    if not model.experts:
        return dict(tensor=tensor, pipeline=pipeline, copies=1)
    return dict(
        tensor=tensor, pipeline=pipeline, copies=copies, expert=expert, expert_tensor=max(1, tensor * copies // expert)
    )


def _load(row: Row, note: str) -> Load:
    w = row.get("workload") or {}
    if not w.get("input_len") or not w.get("output_len"):
        raise Unsupported("the lengths of prompt and answer not stated")
    lengths = w["input_len"], w["output_len"]
    if w.get("batch") is None:
        return Load("full", 0, *lengths, REQUESTS.get(lengths, 0) if row["group"] == "trtllm_perf_overview" else 0)
    clients = re.search(r"concurrency=(\d+)", note)
    if clients:
        return Load("closed", int(clients[1]), *lengths)
    return Load("static", w["batch"], *lengths)


MEASURES = {
    # what a row may hold: (which of our quantities, how it is written there)
    "latency_ms": ("latency", 1e3),
    "ttft_ms": ("ttft", 1e3),
    "tpot_ms": ("tpot", 1e3),
    "decode_ms_per_token": ("decode", 1e3),
    "output_tokens_per_s": ("output_tokens_per_s", 1.0),
}


def effects_for(group: str, *, leave_out: bool) -> Mapping[str, float]:
    """The fitted effects for rows of a source: without it where it took part and is to be left out."""
    content = fitted_inference()
    return content["without"].get(group, content["effects"]) if leave_out else content["effects"]


def first_measured(row: Row) -> str:
    """What the row is judged by, or nothing."""
    return next((name for name in FIRST if row["measured"].get(name)), "")


def predict_inference(row: Row, *, leave_out: bool = True) -> Prediction:
    """A row of serving."""
    result = Prediction(row["id"], row["group"], row["kind"], True, bool(row.get("complete")))
    try:
        serving, load, result.assumed = serving_of_row(row)
        first = first_measured(row)
        if not first:
            raise Unsupported("none of the quantities that serving predicts was measured")
    except Unsupported as reason:
        result.supported, result.reason = False, str(reason)
        return result
    prepared = prepare(serving, load)
    found = quantities(prepared, constants_of(serving, effects_for(row["group"], leave_out=leave_out)))
    for name, (ours, unit) in MEASURES.items():
        if row["measured"].get(name):
            result.errors[name] = found[ours] * unit / row["measured"][name] - 1
    ours, unit = MEASURES[first]
    width = fitted_inference()["interval"]
    result.measured, result.predicted = row["measured"][first], found[ours] * unit
    result.low, result.high = result.predicted * math.exp(-width), result.predicted * math.exp(width)
    result.error = result.errors[first]
    given = row["measured"].get("memory_gib")
    if given:
        owners = memory_by_owner(serving, prepared.running, load.input_len, load.output_len)
        result.memory_measured_gib, result.memory_predicted_gib = given, sum(owners.values()) / GIB
        result.memory_error = result.memory_predicted_gib / given - 1
    return result
