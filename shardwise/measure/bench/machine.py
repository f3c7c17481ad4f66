"""Measures this machine into a hardware profile: kernels, copies, the host overhead of a step, and collectives.

The time budget is divided among the kinds of points, so a slow machine measures fewer points and takes no longer. Elementwise
operations run the model's own code; their bytes are as the planner counts them. Host overhead is the time that a step of a tiny
network takes beyond the kernels that the planner predicts: more microbatches show the cost of a launch, more layers the optimizer's
cost for a layer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.data.batches import Batch
from shardwise.hardware import Profile
from shardwise.measure.bench.host import with_host
from shardwise.measure.bench.kernels import (
    Point,
    Stopwatch,
    TimeBudget,
    attention_points,
    dtypes_of,
    gemm_points,
    grouped_points,
    kernel_seconds,
    machine_name,
    memory_points,
)
from shardwise.model.layers import Norm, at_least_float32
from shardwise.model.rope import apply_rope, rope_cos_sin
from shardwise.plan.cost.constants import constants_of
from shardwise.plan.cost.job import Job, job_of
from shardwise.plan.cost.operations import head, layer
from shardwise.plan.time.step import prepare, step_time
from shardwise.run import Run, run_from_dict
from shardwise.train.step import TrainState

Progress = Callable[[str, float], None]
"""Called with the name of the measurement, and the fraction of it that is done."""

SHARES = {
    "GEMMs": 0.35,
    "grouped GEMMs": 0.1,
    "attention": 0.2,
    "memory": 0.1,
    "elementwise": 0.1,
    "host overhead": 0.1,
    "host": 0.05,
}


def measure_kernels(
    device: torch.device, seconds: float, quick: bool = False, progress: Progress = lambda what, share: None
) -> Profile:
    """A profile of a device without its collectives."""
    torch.manual_seed(0)
    watch = Stopwatch(device, samples=3 if quick else 7)
    dtypes = dtypes_of(device)

    def budget(kind: str) -> TimeBudget:
        return TimeBudget(SHARES[kind] * seconds, lambda share: progress(kind, share))

    profile = replace(
        empty_profile(device),
        kernel_seconds=kernel_seconds(device),
        memory=tuple(memory_points(watch, budget("memory"), quick)),
        elementwise=tuple(elementwise_points(watch, budget("elementwise"), quick)),
        gemm=tuple(gemm_points(watch, budget("GEMMs"), dtypes, quick)),
        grouped=tuple(grouped_points(watch, budget("grouped GEMMs"), dtypes, quick)),
        attention=tuple(attention_points(watch, budget("attention"), dtypes, quick)),
    )
    progress("host overhead", 0.0)
    if profile.chip:  # the planner counts a chip's kernels, so the chip must be known
        profile = with_host_overhead(device, profile, SHARES["host overhead"] * seconds)
    progress("host overhead", 1.0)
    return with_host(device, profile, SHARES["host"] * seconds, quick)


def empty_profile(device: torch.device) -> Profile:
    """A profile that names this machine, without measurements."""
    machine, chip = machine_name(device)
    return Profile(
        machine=machine,
        chip=chip,
        torch=torch.__version__,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        threads=torch.get_num_threads() if device.type == "cpu" else 0,
    )


LAYERS, LENGTH, MORE = 2, 16, 3


def small_run(device: torch.device, chip: str, tokens: int, microbatches: int = 1, **model: int) -> Run:
    """A run of a small model, in the dtype of training on this device."""
    dtype = "float32" if device.type == "cpu" else "bfloat16"
    train = dict(steps=100, seq_len=tokens, global_batch=microbatches, microbatch=1, dtype=dtype, device=device.type)
    return run_from_dict(dict(model=model, train=train, cluster=dict(chip=chip)))


def tiny_run(device: torch.device, chip: str, microbatches: int, layers: int) -> Run:
    """A run so small that its compute takes almost no time."""
    return small_run(device, chip, LENGTH, microbatches, layers=layers, hidden=64, heads=2, ffn=128, vocab=128)


def step_seconds(run: Run, budget: float) -> float:
    """Median seconds of a step on random tokens, measured in about `budget` seconds."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, run.model.vocab, (run.train.global_batch, run.train.seq_len + 1))
    batch = Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy())
    train_state = TrainState(run)
    timed: list[float] = []
    ends = time.perf_counter() + budget
    while len(timed) < 7 or (time.perf_counter() < ends and len(timed) < 50):
        start = time.perf_counter()
        train_state.train_step(batch).loss.item()
        timed.append(time.perf_counter() - start)
    return statistics.median(timed[2:])  # the first steps allocate the optimizer's state


def with_host_overhead(device: torch.device, profile: Profile, budget: float) -> Profile:
    """The profile with the host overhead of a launch, a step and a layer, as the planner counts them."""
    shapes = {"plain": (1, LAYERS), "microbatches": (MORE, LAYERS), "layers": (1, MORE * LAYERS)}
    runs = {name: tiny_run(device, profile.chip, *shape) for name, shape in shapes.items()}
    timed = {name: step_seconds(run, budget / len(runs)) for name, run in runs.items()}
    jobs = {name: with_profile(job_of(run), profile) for name, run in runs.items()}
    # On a GPU kernels overlap with launches; on a CPU they do not.
    busy = {name: _predicted(job) if device.type == "cpu" else 0.0 for name, job in jobs.items()}
    launches = {name: float(sum(prepare(job).stages[0].launches)) for name, job in jobs.items()}

    def host(name: str) -> float:
        return max(timed[name] - busy[name], 0.0)

    launch = max(host("microbatches") - host("plain"), 1e-9) / ((MORE - 1) * launches["plain"])
    more = host("layers") - host("plain") - launch * (launches["layers"] - launches["plain"])
    layer = max(more, 0.0) / ((MORE - 1) * LAYERS)
    known = launch * launches["plain"] + layer * LAYERS
    # Noise may make the parts exceed the whole step; then they are scaled down to it.
    share = min(1.0, max(host("plain"), 1e-9) / known)
    overhead = max(host("plain") - known, 0.0)
    return replace(profile, launch=share * launch, overhead=overhead, layer_overhead=share * layer)


def with_profile(job: Job, profile: Profile) -> Job:
    """The job on the measured machine."""
    return replace(job, cluster=replace(job.cluster, chip=replace(job.cluster.chip, profile=profile), profile=profile))


def _predicted(job: Job) -> float:
    """Predicted seconds of a step without host overhead."""
    constants = constants_of(job) | {"launch": 0.0, "overhead": 0.0}
    return step_time(prepare(job), constants).seconds


def operations(run: Run, device: torch.device) -> dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]]:
    """Operations of the model with their inputs, by the planner's names."""
    m, tokens = run.model, run.train.seq_len
    dtype = getattr(torch, run.train.dtype)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype).requires_grad_()

    norm = Norm(m.hidden, m.norm_eps).to(device)
    torch.nn.init.ones_(norm.weight)
    rope = rope_cos_sin(m, torch.arange(tokens, device=device)[None], dtype)
    targets = torch.randint(m.vocab, (tokens,), device=device)
    heads = m.heads + m.kv_heads
    return {
        "norm": (norm, (random(1, tokens, m.hidden),)),
        "rotary": (lambda x: apply_rope(x, rope), (random(1, tokens, heads, m.head_dim),)),
        "activation": (lambda gate, up: F.silu(gate) * up, (random(tokens, m.ffn), random(tokens, m.ffn))),
        "loss": (
            lambda logits: F.cross_entropy(at_least_float32(logits), targets, reduction="sum"),
            (random(tokens, m.vocab),),
        ),
    }


def elementwise_points(watch: Stopwatch, budget: TimeBudget, quick: bool) -> list[Point]:
    """Each operation, forward and backward, in increasing sizes."""
    device = watch.device
    sizes = [(16, 64, 128), (512, 128, 512), (1024, 256, 4096)]
    if device.type == "cuda":
        sizes = [(512, 512, 4096), (4096, 2048, 32768), (16384, 4096, 32768)]
    cases = [
        (size, name) for size in (sizes[:2] if quick else sizes) for name in ("norm", "rotary", "activation", "loss")
    ]
    points: list[Point] = []
    for (size, name), seconds_each in budget.each(cases):
        tokens, hidden, vocab = size
        run = small_run(device, "cpu", tokens, layers=1, hidden=hidden, heads=hidden // 32, ffn=3 * hidden, vocab=vocab)
        job = job_of(run)
        op = next(op for op in (*layer(job, routed=False), *head(job)) if op.name == name)
        work, inputs = operations(run, device)[name]
        for direction, seconds in _forward_backward(watch, work, inputs, seconds_each).items():
            moved = float(op.bytes[direction == "backward"])
            points.append(
                dict(operation=name, direction=direction, dtype=run.train.dtype, bytes=moved, seconds=seconds,
                     gbs=moved / seconds / 1e9)
            )  # fmt: skip
    return points


def _forward_backward(
    watch: Stopwatch, work: Callable[..., Tensor], inputs: tuple[Tensor, ...], budget: float
) -> dict[str, float]:
    out = work(*inputs)
    grad = torch.ones_like(out)
    return {
        "forward": watch.seconds(lambda: work(*inputs), budget / 2),
        "backward": watch.seconds(lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True), budget / 2),
    }
