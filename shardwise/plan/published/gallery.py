"""The gallery: tables and figures of papers as published, next to the planner's values for the same jobs.

Measured rows are those that come with the package, each predicted with constants fitted without its source, so no prediction was
fitted to the figure next to it. Figures that follow from a formula alone (bytes of ZeRO's states, FLOPs of a training run, the
bubble of a schedule) are computed by the same functions that every plan uses.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

from shardwise.hardware import make_cluster
from shardwise.plan.as_program import plan_as
from shardwise.plan.cost.flops import parameters, training_flops
from shardwise.plan.cost.frameworks import FRAMEWORKS
from shardwise.plan.cost.job import Job
from shardwise.plan.cost.memory import states
from shardwise.plan.cost.parameters import LocalNumel
from shardwise.plan.published.bandwidth import first_tokens, model_bandwidth, static_batches
from shardwise.plan.published.exhibit import Exhibit, Line
from shardwise.plan.published.rows import Row, published
from shardwise.plan.published.validate import Prediction, predict
from shardwise.plan.time.step import makespans
from shardwise.run import PRESETS, LayoutConfig, ModelConfig, run_from_dict
from shardwise.run.derive import derive_model
from shardwise.schedules import Cost

DAY = 86400.0


def _rows(kind: str, group: str) -> list[Row]:
    return [row for row in published(kind) if row["group"] == group]


Figure = Callable[[Row, float], float]
"""The figure that a table prints for a row, given its seconds (or milliseconds, for serving)."""


def _measured(
    title: str, source: str, unit: str, kind: str, group: str, label: Callable[[Row], str], figure: Figure, said: str = ""
) -> Exhibit:  # fmt: skip
    """The rows of a group as their table prints them, and as predicted without their source."""
    lines = []
    for row in _rows(kind, group):
        found: Prediction = predict(row)
        if found.measured and found.predicted and found.low and found.high:
            ends = sorted((figure(row, found.low), figure(row, found.high)))
            lines.append(Line(label(row), figure(row, found.measured), figure(row, found.predicted), *ends))
    return Exhibit(title, source, unit, lines, said)


def _teraflops(row: Row, seconds: float) -> float:
    """TFLOP/s per GPU, with FLOPs as the source counts them."""
    measured = row["measured"]
    return measured["tflops_per_gpu"] * (measured.get("iter_time_s_derived") or measured["iter_time_s"]) / seconds


def _days(tokens: float) -> Figure:
    return lambda row, seconds: tokens / (row["global_batch"] * row["model"]["seq"]) * seconds / DAY


def _layout(row: Row) -> str:
    p = row["parallel"]
    name = row["model"].get("name") or row["id"]
    cut = f"{p['tp']}-way tensor, {p['pp']}-way pipeline" if p["zero_stage"] != 3 else "ZeRO-3"
    return f"{name}, {row['hardware']['gpus']} GPUs, {cut}"


def _korthikanti(row: Row) -> str:
    p = row["parallel"]
    how = {"none": "no recomputation", "full": "full recomputation", "selective": "selective recomputation"}[
        p["recompute"]
    ]
    return f"{row['model'].get('name') or '22B'}, {how}" + (", sequence parallel" if p["sp"] else "")


def _after(prefix: str) -> Callable[[Row], str]:
    return lambda row: row["id"].removeprefix(prefix)


def zero_states() -> Exhibit:
    """Model states of 7.5 billion parameters over 64 ranks, in mixed precision: 2 + 2 + 12 bytes per parameter."""
    held, lines = LocalNumel(7.5e9, 0.0), []
    for label, stage, figure in (
        ("data parallel", 0, 120.0), ("optimizer states", 1, 31.4), ("and gradients", 2, 16.6), ("and parameters", 3, 1.9)
    ):  # fmt: skip
        layout = LayoutConfig(shard=64 if stage else 1, replicate=1 if stage else 64, zero=max(stage, 1))  # type: ignore[arg-type]
        model = derive_model(ModelConfig(), 1024)
        cluster = make_cluster("v100-sxm-32g", 4)
        job = Job(model, layout, 1024, 64, 1, FRAMEWORKS["deepspeed-2021"], cluster, dtype="float16")
        lines.append(Line(label, figure, sum(float(size) for size in states(job, held).values()) / 1e9))
    return Exhibit(
        "Model states that ZeRO cuts", "Rajbhandari et al. 2020, Figure 1", "GB a GPU, 7.5B parameters, 64 GPUs", lines
    )


TRAINED = (
    # preset, tokens, sequence length, published FLOPs, label
    ("gpt3-175b", 300e9, 2048, 3.14e23, "GPT-3 (3,640 petaflop/s-days)"),
    ("llama3-405b", 15.6e12, 8192, 3.8e25, "Llama 3.1 405B"),
)


def training_runs() -> Exhibit:
    """FLOPs of whole training runs: as a plan counts them, and as 6 per parameter and token."""
    lines = []
    for preset, tokens, length, figure, label in TRAINED:
        model = run_from_dict(dict(model=dict(preset=preset), train=dict(seq_len=length))).model
        lines.append(Line(f"{label}: 6ND", figure, 6.0 * parameters(model).active * tokens))
        lines.append(Line(f"{label}: with attention", figure, training_flops(model, length) * tokens))
    said = "The papers count 6 operations for each parameter and token; a plan also counts attention, and not the embedding."
    return Exhibit(
        "Operations of a whole training run", "Brown et al. 2020; Grattafiori et al. 2024", "FLOPs", lines, said
    )


LLAMA = (
    # preset, tokens, GPUs (published for the largest model, assumed for the others)
    ("llama1-7b", 1.0e12, 256),
    ("llama1-13b", 1.0e12, 512),
    ("llama1-33b", 1.4e12, 1024),
    ("llama1-65b", 1.4e12, 2048),
)


def llama_hours() -> Exhibit:
    """GPU-hours of LLaMA's runs. Their layouts were not published, so the fastest of some layouts that fit is used."""
    hours = {
        row["id"].split("_")[1].lower(): row["measured"]["gpu_hours"] for row in _rows("training", "llama1_gpuhours")
    }
    lines = []
    for preset, tokens, devices in LLAMA:
        found = []
        for tensor, microbatch in product((1, 2, 4, 8), (1, 2)):
            if PRESETS[preset]["heads"] % tensor or 2048 * tensor % (microbatch * devices):
                continue
            layout = dict(tensor=tensor, shard=devices // tensor, zero=1)
            train = dict(seq_len=2048, global_batch=2048, microbatch=microbatch, dtype="bfloat16")
            cluster = dict(chip="a100-sxm-80g", nodes=devices // 8)
            run = run_from_dict(dict(model=dict(preset=preset), layout=layout, train=train, cluster=cluster))
            planned = plan_as(run, dict(framework="meta-internal", attention="flash1", release="2023-02"))
            if planned.fits:
                found.append((planned.account.step_seconds, planned.low, planned.high))
        each = tokens / (2048 * 2048) * devices / 3600
        step, low, high = (each * seconds for seconds in min(found))
        lines.append(
            Line(f"LLaMA {preset.split('-')[1]}, {devices} GPUs", hours[preset.split("-")[1]], step, low, high)
        )
    said = (
        "The layouts, and but for 65B the number of GPUs, were not published: planned is the fastest of 1- to 8-way tensor "
        "parallelism that fits. What was published holds restarts and evaluations too."
    )
    return Exhibit("GPU-hours of LLaMA", "Touvron et al. 2023, Table 15", "GPU-hours", lines, said)


BUBBLES = (
    ("1f1b", 4, 8, 1),
    ("1f1b", 8, 32, 1),
    ("1f1b", 16, 128, 1),
    ("interleaved", 4, 8, 2),
    ("interleaved", 8, 32, 4),
)


def bubbles() -> Exhibit:
    """Idle time over busy time: (p - 1) / m, and with v stages per rank (p - 1) / (v m) (Narayanan et al. 2021, section 2.2)."""
    lines = []
    for schedule, ranks, microbatches, chunks in BUBBLES:
        layout = LayoutConfig(pipeline=ranks, schedule=schedule, chunks=chunks)  # type: ignore[arg-type]
        stages = ranks * chunks
        cost = Cost([1.0] * stages, [1.0] * stages, [1.0] * stages)
        (span,) = makespans(layout, [microbatches], [cost], [0.0])
        busy = 3.0 * chunks * microbatches
        label = f"{schedule}, {ranks} ranks, {microbatches} microbatches" + (
            f", {chunks} stages a rank" if chunks > 1 else ""
        )
        lines.append(Line(label, (ranks - 1) / (chunks * microbatches), span / busy - 1))
    return Exhibit("Bubbles of pipelines", "Narayanan et al. 2021, section 2.2", "idle time over busy time", lines)


EXHIBITS: dict[str, Callable[[], Exhibit]] = {
    "megatron-scaling": partial(
        _measured, "Megatron-LM from 1.7 billion to a trillion parameters", "Narayanan et al. 2021, Table 1", "TFLOP/s a GPU",
        "training", "megatron_sc21_t1", _layout, _teraflops, "Hardware FLOPs, recomputation counted, as the paper has them.",
    ),
    "megatron-zero3": partial(
        _measured, "Tensor and pipeline parallelism beside ZeRO-3", "Narayanan et al. 2021, Table 2", "days for 300 billion tokens",
        "training", "megatron_sc21_t2", _layout, _days(300e9),
        "No other row of DeepSpeed in 2021 is known, so its prediction rests on what that program did alone.",
    ),
    "recompute-layer": partial(
        _measured, "One layer of the 22B model, forward and backward", "Korthikanti et al. 2022, Table 4", "ms",
        "layer", "korthikanti_t4_layer", _korthikanti, lambda row, seconds: 1e3 * seconds,
    ),
    "recompute-step": partial(
        _measured, "Steps with full and with selective recomputation", "Korthikanti et al. 2022, Table 5", "seconds a step",
        "training", "korthikanti_t5", _korthikanti, lambda row, seconds: seconds,
    ),
    "zero-bubble": partial(
        _measured, "Pipelines without a bubble", "Qi et al. 2024, Tables 3 and 4", "samples a second and GPU",
        "training", "zero_bubble", lambda row: row["id"].removeprefix("zb_").replace("_", " "),
        lambda row, seconds: row["global_batch"] / (seconds * row["hardware"]["gpus"]), "Microbatches are the last number.",
    ),
    "bloom": partial(
        _measured, "What BLOOM's engineers tried before they started", "BigScience, chronicles of the 176B model, 2022",
        "seconds a step", "training", "bloom_prequel", _after("bloom_"), lambda row, seconds: seconds,
        "Slow rows at the end have widths that no line of memory divides (hidden 14400, heads of 108).",
    ),
    "zero-states": zero_states,
    "training-flops": training_runs,
    "llama-hours": llama_hours,
    "bubbles": bubbles,
    "gpt-fast": partial(
        _measured, "Tokens of one user, by gpt-fast", "PyTorch, gpt-fast README, 2023", "tokens a second",
        "inference", "gpt_fast", _after("gptfast_"), lambda row, ms: 1e3 / ms,
    ),
    "inference-arithmetic": partial(
        _measured, "Inference arithmetic", "Chen (kipply) 2022", "ms for 10 tokens after a prompt of 512",
        "inference", "kipply", _after("kipply_"), lambda row, ms: ms,
    ),
    "model-bandwidth": model_bandwidth,
    "first-tokens": first_tokens,
    "static-batches": static_batches,
}  # fmt: skip
