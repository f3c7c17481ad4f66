"""Published measurements of serving as inputs of the planner: the ranks, the formats and the load of a row.

As in `rows.py`, facts that a source left out are assumed and listed, and rows that cannot be predicted are `Unsupported`.
"""

from __future__ import annotations

import re

from shardwise.plan.published.rows import Row, Unsupported, cluster_of_row, model_of
from shardwise.plan.serving.cost import Serving, experts_hit, weight_bytes
from shardwise.plan.serving.engines import ENGINES, FORMATS, Engine
from shardwise.plan.serving.loads import Load
from shardwise.run import ModelConfig

FIRST = ("latency_ms", "tpot_ms", "decode_ms_per_token", "output_tokens_per_s")
"""The quantity that a row is judged by: the first of these that was measured."""

MEASURES = {
    # key of a row: (our quantity, factor from seconds to the row's unit)
    "latency_ms": ("latency", 1e3),
    "ttft_ms": ("ttft", 1e3),
    "tpot_ms": ("tpot", 1e3),
    "decode_ms_per_token": ("decode", 1e3),
    "output_tokens_per_s": ("output_tokens_per_s", 1.0),
}


def first_measured(row: Row) -> str:
    """The quantity that the row is judged by, or ""."""
    return next((name for name in FIRST if row["measured"].get(name)), "")


def serving_of_row(row: Row) -> tuple[Serving, Load, tuple[str, ...]]:
    """A row's serving setup, its load, and the assumptions made; raises `Unsupported`."""
    assumed: list[str] = []
    model = model_of(row)
    note = row.get("note") or ""
    ranks = _ranks(row, model, assumed)
    precision = row["precision"] or "bf16"
    if precision not in FORMATS:
        raise Unsupported(f"the precision {precision}")
    devices = ranks["tensor"] * ranks["pipeline"] * ranks["replicas"]
    cluster = cluster_of_row(row, devices)
    windowed = (0.0, 0)
    if "alternating" in str(row["model"].get("window")):
        windowed = (0.5, int(re.findall(r"\d+", row["model"]["window"])[0]))
    engine = ENGINES[_engine_name(row)]
    # Published 4-bit checkpoints of MoE models (DeepSeek-R1, gpt-oss) leave attention in 16 bits.
    attention = "bf16" if precision == "fp4" and model.experts else precision
    cache = _cache_bytes(row, precision, engine)
    serving = Serving(
        model, cluster, engine, FORMATS[precision], FORMATS[attention], cache, windowed=windowed, head=None, **ranks
    )
    load = _load(row, note)
    _check_by_itself(row, serving, load)
    return serving, load, tuple(assumed)


def _check_by_itself(row: Row, s: Serving, load: Load) -> None:
    """Refuses a closed-loop row whose figures contradict each other. Waiting time and decode time of a request determine how many
    clients decode at a time (Little 1961). A step of that many reads the weights that their tokens touch, which at full memory
    bandwidth is a lower bound on the time per token."""
    first, each = (row["measured"].get(name) for name in ("ttft_ms", "tpot_ms"))
    if load.kind != "closed" or not first or not each:
        return
    decoding = each * (load.output_len - 1)
    running = load.batch * decoding / (first + decoding)
    held, m = weight_bytes(s), s.model
    if m.experts:
        met = max(1.0, running / s.pipeline)  # tokens that reach the experts of a stage together
        held["experts"] *= experts_hit(m.experts, m.experts_per_token, met, s.expert_skew) / m.experts
    least = 1e3 * s.pipeline * sum(held[part] for part in ("attention", "ffn", "experts")) / s.chip.hbm
    if each < least:
        raise Unsupported(
            f"its figures exclude each other: by its time to first token {running:.0f} requests decode at a time, and reading the "
            f"weights of such a step alone takes {least:.1f} ms, more than the {each:.1f} ms of a token"
        )


PROGRAMS = {"tensorrt-llm": "trtllm"}
CACHES = {"fp8": 1.0, "int8": 1.0, "fp16": 2.0, "bf16": 2.0}


def _engine_name(row: Row) -> str:
    """The engine that a row declares; an unknown one is treated as TensorRT-LLM."""
    name = str((row.get("software") or {}).get("framework") or "").lower()
    name = PROGRAMS.get(name, name)
    return name if name in ENGINES else "trtllm"


def _cache_bytes(row: Row, precision: str, engine: Engine) -> float:
    """Bytes per element of the KV cache, as declared, else the engine's default with such weights: published fp8 and fp4
    checkpoints come with an 8-bit cache."""
    usual = 1.0 if engine.narrow_cache and precision in ("fp8", "fp4") else 2.0
    return CACHES.get(str((row.get("software") or {}).get("kv_dtype")), usual)


def _ranks(row: Row, model: ModelConfig, assumed: list[str]) -> dict[str, int]:
    """The axes of a row. Where a source multiplied tensor and expert axes that share the same ranks, these are counted once."""
    p, devices = row["parallel"], row["hardware"]["gpus"]
    if p.get("tp") is None or p.get("pp") is None or not devices:
        raise Unsupported("the layout was not published")
    tensor, pipeline, expert = p["tp"], p["pp"], p.get("ep") or 1
    replicas, expert_tensor = p.get("attention_dp") or 1, p.get("moe_tp") or 1
    if expert > 1 and expert_tensor == expert and tensor * replicas == expert * expert:
        assumed.append(f"{expert} devices: the tensor and expert axes are the same ranks")
        devices, tensor, replicas, expert_tensor = expert, max(1, tensor // expert), max(1, replicas // expert), 1
    if "attention-DP" in (row.get("note") or "") and p.get("attention_dp") is None:
        tensor, replicas = 1, devices
    if model.heads % tensor:
        assumed.append(f"{tensor} whole copies of attention: its heads do not divide by that")
        tensor, replicas, expert = 1, tensor, tensor
    if not model.experts:
        return dict(tensor=tensor, pipeline=pipeline, replicas=1)
    return dict(
        tensor=tensor,
        pipeline=pipeline,
        replicas=replicas,
        expert=expert,
        expert_tensor=max(1, tensor * replicas // expert),
    )


def _load(row: Row, note: str) -> Load:
    w = row.get("workload") or {}
    if not w.get("input_len") or not w.get("output_len"):
        raise Unsupported("the lengths of prompt and answer not stated")
    lengths = w["input_len"], w["output_len"]
    if w.get("batch") is None:
        return Load("full", 0, *lengths, (row.get("software") or {}).get("num_requests") or 0)
    clients = re.search(r"concurrency=(\d+)", note)
    if clients:
        return Load("closed", int(clients[1]), *lengths)
    return Load("static", w["batch"], *lengths)
