"""Published measurements as jobs: a row of the format in `docs/validation.md`, in the planner's terms.

Facts that a source left out are assumed, and the assumptions are listed with the prediction. A row that cannot be expressed is
unsupported, with the reason; it is counted, not dropped.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from shardwise.hardware import Cluster, make_cluster
from shardwise.plan.cost.flops import parameters
from shardwise.plan.cost.frameworks import Framework
from shardwise.plan.cost.job import Job, job_of
from shardwise.plan.cost.software import Alternative, DeclaredFramework, Situation, framework_of_facts
from shardwise.run import LayoutConfig, ModelConfig, Run, UserError, run_from_dict
from shardwise.run.derive import derive_model

Row = dict[str, Any]

ACTIVATIONS = {"gelu": "gelu", "swiglu": "swiglu", "geglu": "geglu", "squared_relu": "relu2", "relu": "relu"}
SCHEDULES = {
    "1f1b": "1f1b",
    "interleaved-1f1b": "interleaved",
    "zb-1p": "zb-h1",
    "zb-2p": "zb-2p",
    "dualpipe": "dualpipe",
    "dualpipe-v": "dualpipe-v",
}
GROUPED = {"DeepSeek-V2": (8, 3), "DeepSeek-V3": (8, 4), "DeepSeek-R1": (8, 4)}
"""Published models whose router first chooses groups of experts: (groups, chosen groups), from their `config.json`."""
MODERN = ("hopper", "blackwell", "cdna3")
"""Generations whose published runs use frameworks that shard the optimizer and fuse their kernels."""


def published(kind: str) -> list[Row]:
    """The rows that come with the package: `training`, `layer`, `inference` or `own`."""
    return json.loads(resources.files("shardwise.plan").joinpath("published", f"{kind}.json").read_text("utf-8"))


class Unsupported(Exception):
    """Why a row cannot be predicted."""


@dataclass(frozen=True)
class RowJob:
    """A row's job, the assumptions made, and what else its framework may have done."""

    job: Job
    assumed: tuple[str, ...]
    alternatives: tuple[Alternative, ...] = ()
    known: bool = True
    """Whether the framework is a known one."""


def model_of(row: Row) -> ModelConfig:
    """The row's network."""
    m = row["model"]
    gpt = m.get("arch") == "gpt"
    needed = [name for name in ("layers", "hidden", "heads", "seq") if not m.get(name)]
    if needed:
        raise Unsupported(f"the model's {', '.join(needed)} not stated")
    if (act := m.get("act") or "gelu") not in ACTIVATIONS:
        raise Unsupported(f"the activation {act}")
    keys: dict[str, Any] = dict(
        layers=m["layers"],
        hidden=m["hidden"],
        heads=m["heads"],
        kv_heads=m.get("kv_heads") or m["heads"],
        head_dim=m.get("head_dim") or 0,
        ffn=m.get("ffn") or (m.get("moe_ffn") or 4 * m["hidden"]),
        vocab=m.get("vocab") or 51200,
        norm="layernorm" if gpt else "rmsnorm",
        bias="all" if gpt else "none",
        activation=ACTIVATIONS[act],
        position="learned" if gpt else "rotary",
        tied_embeddings=bool(m.get("tied_embeddings")),
        parallel_block=bool(m.get("parallel_block")),
    )
    name = m.get("name") or ""
    if gpt and name.startswith("BLOOM"):  # Le Scao et al. 2022, section 3.2; earlier trials had no ALiBi yet
        keys |= dict(embedding_norm=True, position="alibi" if name == "BLOOM-176B" else "learned")
    if isinstance(m.get("sliding_window"), int):
        keys["sliding_window"] = m["sliding_window"]
    if m.get("kv_lora_rank"):
        keys |= dict(
            attention="latent",
            q_rank=m.get("q_lora_rank") or 0,
            kv_rank=m["kv_lora_rank"],
            nope_dim=m["qk_head_dim"],
            rope_dim=m["qk_rope_dim"],
            v_dim=m["v_head_dim"],
        )
    if m.get("experts"):
        shared = m.get("shared_experts") or (1 if m.get("shared_expert_ffn") else 0)
        keys |= dict(
            experts=m["experts"],
            experts_per_token=m["topk"],
            expert_ffn=m.get("moe_ffn") or m["ffn"],
            dense_layers=m.get("dense_layers") or 0,
            shared_experts=shared,
        )
        groups = next((g for of, g in GROUPED.items() if of in name), None)
        if groups and m["experts"] % groups[0] == 0 and m["topk"] <= groups[1] * (m["experts"] // groups[0]):
            keys |= dict(router_groups=groups[0], router_top_groups=groups[1])
    return derive_model(ModelConfig(**keys), m["seq"])


def _even(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage, as even as possible, extra layers in the middle: embedding and head may have a stage to themselves."""
    base, more = divmod(layers, stages)
    start = (stages - more) // 2
    return tuple(base + (start <= n < start + more) for n in range(stages))


def cluster_of_row(row: Row, devices: int) -> Cluster:
    """A cluster of `devices` of the row's devices, with the row's links."""
    hardware = row["hardware"]
    if not hardware.get("gpus_per_node"):
        raise Unsupported("how many devices a machine has was not published")
    per_node = min(hardware["gpus_per_node"], devices)
    own: dict[str, Any] = {key: hardware.get(key) or 0 for key in ("intra_gbs", "inter_gbs", "power_w", "hbm_gbs")}
    try:
        return make_cluster(hardware["chip"], -(-devices // per_node), per_node, **own)
    except UserError as problem:
        raise Unsupported(str(problem)) from None


def layout_of(row: Row, model: ModelConfig, assumed: list[str], *, modern: bool) -> LayoutConfig:
    """The row's layout in this project's axes; on `modern` chips frameworks shard the optimizer by default."""
    p, devices = row["parallel"], row["hardware"]["gpus"]
    tensor, pipeline, context, expert = (p.get(k) or 1 for k in ("tp", "pp", "cp", "ep"))
    if p.get("tp") is None or p.get("pp") is None:
        raise Unsupported("the layout was not published")
    data = p.get("dp") or max(1, devices // (tensor * pipeline * context))
    zero = p.get("zero_stage")
    if zero is None:
        zero = 1 if modern else 0
        if data > 1:
            assumed.append(f"ZeRO stage {zero}")
    group = p.get("zero_group") if isinstance(p.get("zero_group"), int) else None
    shard = int(p.get("fsdp_size") or group or data) if zero else 1
    shard = min(shard, data)
    chunks = p.get("vpp") or 1
    schedule = SCHEDULES.get(p.get("schedule") or "", "interleaved" if chunks > 1 else "1f1b")
    if pipeline == 1:
        schedule, chunks = "1f1b", 1
    if p.get("schedule") and p["schedule"] not in SCHEDULES:
        raise Unsupported(f"the schedule {p['schedule']}")
    stated, modules = p.get("recompute"), (row.get("software") or {}).get("recompute_modules")
    if stated is None and modules is not None:  # a list of recomputed modules tells whether any were
        stated = "selective" if modules else "none"
    recompute = {"full": "full", "selective": "attention", "none": "none", None: "none"}.get(stated, "")
    if not recompute:
        raise Unsupported(f"the recomputation {stated}")
    if stated is None and "recompute" in p:
        assumed.append("no recomputation")
    layout = LayoutConfig(
        replicate=max(1, data // shard),
        shard=shard,
        context=context,
        tensor=tensor,
        pipeline=pipeline,
        expert=expert,
        zero=max(1, zero),
        schedule=schedule,  # type: ignore[arg-type]
        chunks=chunks,
        recompute=recompute,  # type: ignore[arg-type]
        expert_tensor=(p.get("etp") or 1) > 1,
    )
    if layout.directions > 1 and pipeline % 2:
        raise Unsupported(f"DualPipe over {pipeline} ranks, of which every two hold the same stages")
    stages = layout.distinct_stages
    if stages > model.layers + 2:
        raise Unsupported(f"{stages} stages for {model.layers} layers")
    return replace(layout, stages=_even(model.layers, stages))


def program_name(row: Row) -> str:
    """The framework that a row names, or ""."""
    return str((row.get("software") or {}).get("framework") or "")


def framework_of_row(row: Row, layout: LayoutConfig, cluster: Cluster) -> DeclaredFramework:
    """The framework a row was measured with, as the row declares it."""
    p, facts, precision = row["parallel"], dict(row.get("software") or {}), row["precision"] or "bf16"
    facts["assumed"] = tuple(row.get("software_assumed") or ())
    if p.get("async_tp") is not None:
        facts.setdefault("tp_async", bool(p["async_tp"]))
    situation = Situation(
        generation=cluster.chip.generation,
        experts=bool(row["model"].get("experts")),
        expert=layout.expert,
        tensor=layout.tensor,
        data=layout.replicate * layout.shard,
        zero=layout.zero if layout.shard > 1 else 0,
        fp8="fp8" in precision,
        bf16=precision != "fp16",
    )
    declared = framework_of_facts(facts, situation)
    return replace(
        declared,
        framework=_of_row(declared.framework, row),
        alternatives=tuple(replace(a, framework=_of_row(a.framework, row)) for a in declared.alternatives),
    )


def _of_row(framework: Framework, row: Row) -> Framework:
    """The framework with what else the row says about it."""
    p, note = row["parallel"], row.get("note") or ""
    if p.get("sp") is not None:
        framework = replace(framework, sequence_parallel=bool(p["sp"]))
    if (
        framework.family == "nemo"
        and p.get("recompute") == "selective"
        and framework.recompute_selective == ("attention",)
    ):
        # Today's frameworks recompute cheap operations, norms and activations; fused attention saves few tensors.
        framework = replace(framework, recompute_selective=("norm", "activation"))
    if "PURE" in note:  # gradients are reduced in 16 bits
        framework = replace(framework, reduce_bytes=2.0)
    if "nvidia-smi" in note:  # counts the driver and the memory that the allocator reserves
        framework = replace(framework, context_gib=3.0, fragmentation=0.15)
    return framework


def job_of_row(row: Row) -> RowJob:
    """The job of a row; raises `Unsupported`."""
    if row["group"].startswith("shardwise"):
        return _own_job(row)
    assumed: list[str] = []
    hardware = row["hardware"]
    if not hardware.get("gpus"):
        raise Unsupported("how many devices was not published")
    model, cluster = model_of(row), cluster_of_row(row, hardware["gpus"])
    modern = cluster.chip.generation in MODERN
    layout = layout_of(row, model, assumed, modern=modern)
    if row["model"].get("vocab") is None:
        assumed.append("a vocabulary of 51200")
    precision = row["precision"] or "bf16"
    if precision.split()[0] not in ("fp16", "bf16", "fp8", "mxfp8"):
        raise Unsupported(f"the precision {precision}")
    dtype, fp8 = "float16" if precision == "fp16" else "bfloat16", "fp8" in precision
    if missing := [each for each in (dtype, *["fp8"] * fp8) if each not in cluster.chip.peak]:
        raise Unsupported(f"{missing[0]} on {cluster.chip.name}, which does not compute in it")
    data = layout.replicate * layout.shard
    batch, micro = row.get("global_batch"), row.get("micro_batch")
    if not micro:
        # The usual choice where nothing is stated: one sequence in a pipeline, else some 16,000 tokens.
        share = (batch or data) // data
        micro = max(1, min(share, 16384 // row["model"]["seq"]))
        if layout.pipeline > 1:  # PyTorch's pipelines split a rank's share into one microbatch per stage
            micro = max(1, share // layout.pipeline) if layout.zero == 3 else 1
        while share % micro:
            micro -= 1
        assumed.append(f"a microbatch of {micro}")
    if not batch:
        batch = micro * data * 8
        assumed.append("8 microbatches a step")
    if batch < micro * data:
        raise Unsupported(f"a batch of {batch} over {data} data ranks in microbatches of {micro}")
    declared = framework_of_row(row, layout, cluster)
    assumed += dict.fromkeys(a.what for a in declared.alternatives)
    job = Job(
        model=model,
        layout=layout,
        seq_len=row["model"]["seq"],
        global_batch=batch,
        microbatch=micro,
        framework=declared.framework,
        cluster=cluster,
        dtype=dtype,
        fp8=fp8,
    )
    return RowJob(job, tuple(assumed), declared.alternatives, declared.known)


def _own_job(row: Row) -> RowJob:
    """The job of a row measured with this project's trainer: the one that its own run is planned as, by the trainer of that day."""
    try:
        job = job_of(own_run(row))
        to_end = row.get("software", {}).get("recomputes_to_end", False)
        return RowJob(
            replace(job, framework=replace(job.framework, early_stop=job.framework.early_stop and not to_end)), ()
        )
    except KeyError as missing:
        raise Unsupported(f"a row of this trainer without {missing.args[0]}") from None
    except UserError as problem:
        raise Unsupported(str(problem)) from None


OWN_KEYS = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "experts", "experts_per_token", "expert_ffn",
            "shared_experts", "dense_layers")  # fmt: skip


def own_run(row: Row) -> Run:
    """The run of a row measured with this project's trainer, on one device."""
    m, recompute = row["model"], row["parallel"]["recompute"]
    train = dict(seq_len=m["seq"], global_batch=row["global_batch"], microbatch=row["micro_batch"], dtype="bfloat16")
    if row["precision"] == "fp8":
        train["fp8"] = row["software"]["fp8_recipe"]
    return run_from_dict(
        dict(
            model={key: m[key] for key in OWN_KEYS if key in m},
            layout=dict(recompute="attention" if recompute == "selective" else recompute),
            train=train | dict(device="cuda", compile=row["parallel"]["compile"]),
            cluster=dict(chip=row["hardware"]["chip"]),
        )
    )


def flops_of_step(row: Row, job: Job) -> float:
    """FLOPs of a step as the row's source counts them."""
    m, tokens = job.model, job.tokens
    convention = row.get("flops_convention") or "model"
    if convention == "hardware_full_recompute_96":
        shape = 1 + job.seq_len / (6 * m.hidden) + m.vocab / (16 * m.layers * m.hidden)
        return 96.0 * tokens * m.layers * m.hidden**2 * shape
    attention = 12.0 * m.layers * m.heads * m.head_dim * job.seq_len
    if convention == "model_causal":
        attention /= 2
    counted = parameters(m)
    return tokens * (6.0 * (counted.active - counted.embedding * (0 if m.tied_embeddings else 1)) + attention)


def measured_seconds(row: Row, job: Job) -> float | None:
    """Seconds of an iteration, from the most direct figure in the source."""
    q, devices = row["measured"], row["hardware"]["gpus"]
    for key in ("iter_time_s", "iter_time_s_derived"):
        if q.get(key):
            return float(q[key])
    if q.get("tokens_per_s"):
        return job.tokens / q["tokens_per_s"]
    if q.get("tokens_per_s_per_gpu"):
        return job.tokens / (q["tokens_per_s_per_gpu"] * devices)
    if q.get("samples_per_s"):
        return job.global_batch / q["samples_per_s"]
    if q.get("tflops_per_gpu"):
        return flops_of_step(row, job) / (q["tflops_per_gpu"] * 1e12 * devices)
    if q.get("mfu"):
        peak = job.cluster.chip.peak["fp8" if job.fp8 else job.dtype]
        return flops_of_step(row, job) / (q["mfu"] * peak * devices)
    return None
