"""Measures this machine into a hardware profile: kernels, copies, what the host adds to a step, and collectives.

The seconds given are divided among the kinds of points, so a slow machine has fewer points, not a longer wait. Elementwise
operations run as the model has them, beside the bytes the planner counts for them. The host's share of a step is what tiny networks
take beyond the planner's kernels: more microbatches tell what a kernel costs, more layers what the optimizer of one does.
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
from shardwise.measure.bench_kernels import (
    Allowance,
    Point,
    Stopwatch,
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
"""Gets what is being measured, and which share of it is done."""

SHARES = {
    "GEMMs": 0.4,
    "grouped GEMMs": 0.1,
    "attention": 0.2,
    "memory": 0.1,
    "elementwise": 0.1,
    "training's host": 0.1,
}


def measure_kernels(
    device: torch.device, seconds: float, quick: bool = False, progress: Progress = lambda what, share: None
) -> Profile:
    """A profile of a device without its collectives."""
    torch.manual_seed(0)
    watch = Stopwatch(device, samples=3 if quick else 7)
    dtypes = dtypes_of(device)

    def allowance(kind: str) -> Allowance:
        return Allowance(SHARES[kind] * seconds, lambda share: progress(kind, share))

    profile = replace(
        described(device),
        kernel_seconds=kernel_seconds(device),
        memory=tuple(memory_points(watch, allowance("memory"), quick)),
        elementwise=tuple(elementwise_points(watch, allowance("elementwise"), quick)),
        gemm=tuple(gemm_points(watch, allowance("GEMMs"), dtypes, quick)),
        grouped=tuple(grouped_points(watch, allowance("grouped GEMMs"), dtypes, quick)),
        attention=tuple(attention_points(watch, allowance("attention"), dtypes, quick)),
    )
    progress("training's host", 0.0)
    if profile.chip:  # the planner counts a chip's kernels, so it has to know the chip
        profile = host_costs(device, profile, SHARES["training's host"] * seconds)
    progress("training's host", 1.0)
    return profile


def described(device: torch.device) -> Profile:
    """A profile that says what machine this is, and nothing yet of its speed."""
    machine, chip = machine_name(device)
    return Profile(
        machine=machine,
        chip=chip,
        torch=torch.__version__,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        threads=torch.get_num_threads() if device.type == "cpu" else 0,
    )


LAYERS, LENGTH, MORE = 2, 16, 3


def tiny_run(device: torch.device, chip: str, microbatches: int, layers: int) -> Run:
    """A run whose arithmetic takes no time to speak of."""
    model = dict(layers=layers, hidden=64, heads=2, ffn=128, vocab=128)
    dtype = "float32" if device.type == "cpu" else "bfloat16"
    train = dict(steps=100, seq_len=LENGTH, global_batch=microbatches, microbatch=1, dtype=dtype, device=device.type)
    return run_from_dict(dict(model=model, train=train, cluster=dict(chip=chip)))


def step_seconds(run: Run, most: float, fewest: int = 5) -> float:
    """Median seconds of a step on random tokens, within about `most` seconds."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, run.model.vocab, (run.train.global_batch, run.train.seq_len + 1))
    batch = Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy())
    train_state = TrainState(run)
    timed: list[float] = []
    ends = time.perf_counter() + most
    while len(timed) < fewest + 2 or (time.perf_counter() < ends and len(timed) < 50):
        start = time.perf_counter()
        train_state.train_step(batch).loss.item()
        timed.append(time.perf_counter() - start)
    return statistics.median(timed[2:])  # the first steps make the optimizer's state


def host_costs(device: torch.device, profile: Profile, most: float) -> Profile:
    """The profile with the seconds of a launch, of a step and of a layer in it besides, as the planner counts them."""
    shapes = {"plain": (1, LAYERS), "microbatches": (MORE, LAYERS), "layers": (1, MORE * LAYERS)}
    runs = {name: tiny_run(device, profile.chip, *shape) for name, shape in shapes.items()}
    timed = {name: step_seconds(run, most / len(runs)) for name, run in runs.items()}
    jobs = {name: with_profile(job_of(run), profile) for name, run in runs.items()}
    # A GPU works while the host launches; a CPU does one after the other.
    busy = {name: _predicted(job) if device.type == "cpu" else 0.0 for name, job in jobs.items()}
    launches = {name: float(sum(prepare(job).stages[0].launches)) for name, job in jobs.items()}

    def host(name: str) -> float:
        return max(timed[name] - busy[name], 0.0)

    launch = max(host("microbatches") - host("plain"), 1e-9) / ((MORE - 1) * launches["plain"])
    more = host("layers") - host("plain") - launch * (launches["layers"] - launches["plain"])
    layer = max(more, 0.0) / ((MORE - 1) * LAYERS)
    known = launch * launches["plain"] + layer * LAYERS
    # Noise may leave the step less than its parts: then they are taken down to it.
    share = min(1.0, max(host("plain"), 1e-9) / known)
    overhead = max(host("plain") - known, 0.0)
    return replace(profile, launch=share * launch, overhead=overhead, layer_overhead=share * layer)


def with_profile(job: Job, profile: Profile) -> Job:
    """The job on the machine that was measured."""
    return replace(job, cluster=replace(job.cluster, chip=replace(job.cluster.chip, profile=profile), profile=profile))


def _predicted(job: Job) -> float:
    """Seconds of a step without the host."""
    constants = constants_of(job) | {"launch": 0.0, "overhead": 0.0}
    return step_time(prepare(job), constants).seconds


def elementwise_run(device: torch.device, tokens: int, hidden: int, vocab: int) -> Run:
    """A run with a layer of such sizes, in the format that training on this device has."""
    model = dict(layers=1, hidden=hidden, heads=hidden // 32, ffn=3 * hidden, vocab=vocab)
    dtype = "float32" if device.type == "cpu" else "bfloat16"
    train = dict(steps=1, seq_len=tokens, global_batch=1, microbatch=1, dtype=dtype, device=device.type)
    return run_from_dict(dict(model=model, train=train, cluster=dict(chip="cpu")))


def operations(run: Run, device: torch.device) -> dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]]:
    """By the planner's names: an operation of the model, and what it is given."""
    m, tokens = run.model, run.train.seq_len
    dtype = getattr(torch, run.train.dtype)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype).requires_grad_()

    norm = Norm(m.hidden, m.norm_eps).to(device)
    torch.nn.init.ones_(norm.weight)
    rope = rope_cos_sin(m, torch.arange(tokens, device=device)[None], dtype)
    targets = torch.randint(m.vocab, (tokens,), device=device)
    heads = m.heads + m.kv_heads
    return {
        "norm": (norm, (numbers(1, tokens, m.hidden),)),
        "rotary": (lambda x: apply_rope(x, rope), (numbers(1, tokens, heads, m.head_dim),)),
        "activation": (lambda gate, up: F.silu(gate) * up, (numbers(tokens, m.ffn), numbers(tokens, m.ffn))),
        "loss": (
            lambda logits: F.cross_entropy(at_least_float32(logits), targets, reduction="sum"),
            (numbers(tokens, m.vocab),),
        ),
    }


def elementwise_points(watch: Stopwatch, allowance: Allowance, quick: bool) -> list[Point]:
    """Each operation, forward and backward, from little work to much."""
    device = watch.device
    sizes = [(16, 64, 128), (512, 128, 512), (1024, 256, 4096)]
    if device.type == "cuda":
        sizes = [(512, 512, 4096), (4096, 2048, 32768), (16384, 4096, 32768)]
    cases = [
        (size, name) for size in (sizes[:2] if quick else sizes) for name in ("norm", "rotary", "activation", "loss")
    ]
    points: list[Point] = []
    for (size, name), most in allowance.each(cases):
        run = elementwise_run(device, *size)
        job = job_of(run)
        op = next(op for op in (*layer(job, routed=False), *head(job)) if op.name == name)
        work, given = operations(run, device)[name]
        for direction, seconds in _both(watch, work, given, most).items():
            moved = float(op.bytes[direction == "backward"])
            points.append(
                dict(operation=name, direction=direction, dtype=run.train.dtype, bytes=moved, seconds=seconds,
                     gbs=moved / seconds / 1e9)
            )  # fmt: skip
    return points


def _both(watch: Stopwatch, work: Callable[..., Tensor], given: tuple[Tensor, ...], most: float) -> dict[str, float]:
    out = work(*given)
    grad = torch.ones_like(out)
    return {
        "forward": watch.seconds(lambda: work(*given), most / 2),
        "backward": watch.seconds(lambda: torch.autograd.grad(out, given, grad, retain_graph=True), most / 2),
    }
