"""Rehearses one rank of a job of any size on this machine and compares it with the plan of that rank: real kernels, memory and
launches, with stand-ins for the collectives (`stand_in.py`).

The rank trains on random tokens, routed evenly over experts. It runs enough microbatches to reach peak memory, and the plan it is
compared with is for a step of that many. Without `hold`, stand-ins take almost no time, so the measured time is the rank's own
work. With `hold`, each stand-in keeps its stream busy for the collective's planned time, so exposed communication shows. Kernels
are classified by their names, as `shardwise trace` does; device-to-device copies are the stand-ins' own, and left out. Compute
time is the time in which any kernel runs; times by kind are sums, in which kernels that run beside others count once more. The plan
of the compute time is for a chip that rests as much as it did here, since one at its limit of power clocks higher then.

A rehearsal also gives a hardware profile: the GEMMs and attention of the rank, timed inside its step, with the step's effects on
the chip's caches, less what the planner counts beside its curves. It corrects its curves with these points near their shapes.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from shardwise.hardware import Profile, collective_seconds
from shardwise.hardware.chips import chip_of_driver_name
from shardwise.hardware.power import slowed_in
from shardwise.ledger import Difference
from shardwise.measure.bench.machine import empty_profile
from shardwise.measure.counts.memory import gradients_of, optimizer_of, parameters_of, unique_bytes
from shardwise.measure.counts.rounds import microbatches_at_peak, with_microbatches
from shardwise.measure.dry import even_routing
from shardwise.measure.stand_in import KERNELS, Hold, stand_in_collectives
from shardwise.measure.verify import random_batch
from shardwise.model.device import choose_device
from shardwise.parallel.mesh import PIPELINE_GROUPS, Mesh
from shardwise.plan.cost.constants import constants_of
from shardwise.plan.cost.job import Job, job_of
from shardwise.plan.cost.passes import WORK
from shardwise.plan.time.step import rank_time
from shardwise.plan.trainer.memory import memory_of_rank
from shardwise.run import Problem, Run, UserError
from shardwise.run.ranks.coordinates import GROUPS, RankCoordinates, group_span
from shardwise.trace.kernel_names import category_of
from shardwise.trace.spans.intervals import total, union
from shardwise.train import cuda_graph, tune_gemms
from shardwise.train.step import TrainState

TOLERANCE = {"time compute": 0.07, "memory peak": 0.03}
"""Relative difference between plan and rehearsal that counts as agreement; other quantities are shown but not judged."""
WITHOUT_GPU = {"memory parameters": 0.0, "memory optimizer": 0.0}
"""The same without a GPU, where there are no kernels to time and the allocator reports no peak."""
GEMMS = {"aten::mm": (0, 1), "aten::addmm": (1, 2), "shardwise::gemm": (0, 1), "shardwise::gemm_onto": (0, 1)}
"""Operators that multiply two matrices, and the argument positions of the two."""
ATTENTION = {
    "aten::_scaled_dot_product_cudnn_attention": ("flash3", "forward", 0),
    "aten::_scaled_dot_product_flash_attention": ("flash2", "forward", 0),
    "aten::_scaled_dot_product_flash_attention_for_cpu": ("flash2", "forward", 0),
    "aten::_scaled_dot_product_cudnn_attention_backward": ("flash3", "backward", 1),
    "aten::_scaled_dot_product_flash_attention_backward": ("flash2", "backward", 1),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": ("flash2", "backward", 1),
}
"""Fused attention operators: the planner's kernel name, the direction, and the argument position of the queries; keys follow."""

SETTLED = 1.0
"""Seconds of steps after which a GPU's clock is taken for that of training."""

Say = Callable[[str], None]
Collectives = Callable[[int, int, Hold | None], contextlib.AbstractContextManager[None]]
"""Makes this process one rank of a world whose other ranks do not exist: its rank, the world size, and seconds of a collective."""


@dataclass(frozen=True)
class Rehearsal:
    """One rank, planned and measured in a rehearsal."""

    rank: int
    microbatches: int
    """The number of microbatches that were run, out of `of` in a step."""
    of: int
    quantities: tuple[Difference, ...]
    """The plan's value first; seconds of a step, bytes, and numbers of kernels."""
    step_seconds: tuple[float, ...]
    gpu: bool = True
    """Whether there was a GPU. Without one, kernel counts, kernel times and peak memory are not among the quantities."""

    @property
    def tolerance(self) -> dict[str, float]:
        """The judged quantities and their allowed relative difference."""
        return TOLERANCE if self.gpu else WITHOUT_GPU

    @property
    def agrees(self) -> bool:
        """Whether every judged quantity matches the plan."""
        return all(abs(d.relative) <= self.tolerance.get(d.name, float("inf")) for d in self.quantities)

    def beyond_curves(self, run: Run) -> dict[str, Any]:
        """How many times as long GEMMs and attention took here as a plan's curves say, as far as the plan knows why: by the chip's
        clock, and by its constants."""
        took = {d.name.removeprefix("time "): d.second for d in self.quantities if d.account == "time"}
        if not self.gpu:
            return dict.fromkeys(WORK, 1.0)
        job = job_of(run)
        constants = constants_of(job)
        work = dict(matmul=took["matmul"], attention=took["attention"], memory=took["memory and optimizer"])
        slower = slowed_in(job.cluster.chip, work, min(1.0, took["compute"] / took["step"]))
        return {kind: factor * constants[kind] for kind, factor in slower.items()}

    def as_dict(self) -> dict[str, Any]:
        """The rehearsal as JSON data; names are stable."""
        return {
            "agrees": self.agrees,
            "rank": self.rank,
            "microbatches": self.microbatches,
            "of_microbatches": self.of,
            "step_seconds": list(self.step_seconds),
            "quantities": [
                {"name": d.name, "plan": d.first, "run": d.second, "relative": d.relative if d.first else None}
                for d in self.quantities
            ],
        }


def rehearse(
    run: Run,
    rank: int,
    *,
    hold: bool = False,
    tune: bool = False,
    collectives: Collectives = stand_in_collectives,
    steps: int = 5,
    warmup: int = 3,
    trace: Path | None = None,
    read: Callable[[profile], None] = lambda recorded: None,
    say: Say = lambda text: None,
) -> Rehearsal:
    """Rehearse a rank. `tune` first finds the fastest GEMM algorithms, as training does in its first steps; otherwise those known
    from earlier runs are used. The profile of a step is passed to `read` and, if `trace` is a path, written there for
    `shardwise trace`."""
    world = run.layout.world
    if not 0 <= rank < world:
        raise UserError(Problem(f"{rank} is not a rank of a layout of {world}", "--rank", "command line"))
    device = choose_device(run.train.device)
    run = _for_chip(run, device)
    count = microbatches_at_peak(run, rank)
    short = with_microbatches(run, count)
    job = replace(job_of(short), imbalance=1.0)  # as tokens are routed here
    say(f"building rank {rank} of {world}, to rehearse {count} of {run.accumulation} microbatches")
    seconds = planned_seconds(short, job) if hold else None
    with collectives(rank, world, seconds) if world > 1 else contextlib.nullcontext():
        train_state = TrainState(short, Mesh(short.layout, device.type))
        with even_routing(train_state):
            measured = _measure(train_state, steps, warmup, tune, trace, read, say)
    quantities = tuple(_beside(short, job, rank, measured))
    return Rehearsal(rank, count, run.accumulation, quantities, measured.seconds, device.type == "cuda")


def _for_chip(run: Run, device: torch.device) -> Run:
    """The run on this machine's chip, if it names none."""
    chip = chip_of_driver_name(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    kind = "cuda" if device.type == "cuda" else "cpu"
    run = replace(run, train=replace(run.train, device=kind))  # type: ignore[arg-type]
    if run.cluster.chip or run.cluster.profile:
        return run
    return replace(run, cluster=replace(run.cluster, chip=chip.name if chip is not None else "cpu"))


def planned_seconds(run: Run, job: Job) -> Hold:
    """Returns a function for the planned seconds of a collective of a group."""

    def seconds(group: str, operation: str, ranks: int, size: int) -> float:
        if operation in ("recv", "broadcast"):
            return 0.0
        name = "pipeline" if group in PIPELINE_GROUPS else group
        stride = (
            group_span(run.layout, name)[1]
            if name in (*GROUPS, "secondary", "expert_secondary") and name != "world"
            else 1
        )
        whole = size * ranks if operation == "all_gather" else size
        return float(collective_seconds(job.cluster, operation, whole, ranks, stride))  # type: ignore[arg-type]

    return seconds


@dataclass
class _Measured:
    seconds: tuple[float, ...]
    parts: Counter[str]
    """Seconds of a step's kernels by category."""
    kernels: int
    busy: float
    """Seconds of a step in which a kernel runs."""
    owners: dict[str, int]
    allocated: tuple[int, int] | None
    """The allocator's peak of requested and of reserved bytes; None without a GPU."""


def _measure(
    train_state: TrainState,
    steps: int,
    warmup: int,
    tune: bool,
    trace: Path | None,
    read: Callable[[profile], None],
    say: Say,
) -> _Measured:
    batch, device = random_batch(train_state.run, train_state.mesh.data_index), train_state.device
    tune_gemms.attach(train_state)
    cuda_graph.attach(train_state)
    while tune and train_state.tuner is not None and not train_state.tuner.done:
        say(f"step {train_state.step} of those that find the fastest GEMMs")
        train_state.train_step(batch)
    if train_state.tuner is not None:
        train_state.tuner.stop()
    cuda = device.type == "cuda"
    say(f"{warmup} steps to warm up")
    for _ in range(warmup):
        train_state.train_step(batch)
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(device)
    say(f"{steps} steps to measure, and one under the profiler")
    seconds = _timed(train_state, batch, steps)
    allocated = (torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)) if cuda else None
    profiler = profiled(train_state, batch, math.ceil(SETTLED / statistics.median(seconds)) if cuda else 0)
    read(profiler)
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    parts, kernels, busy = kernels_of(profiler.events() or () if cuda else ())
    owners = dict(
        parameters=unique_bytes(parameters_of(train_state)),
        gradients=unique_bytes(gradients_of(train_state)),
        optimizer=unique_bytes(optimizer_of(train_state)),
    )
    return _Measured(seconds, parts, kernels, busy, owners, allocated)


def profiled(train_state: TrainState, batch: Any, behind: int) -> profile:
    """A step that is profiled right behind others that are not: a GPU that has just idled clocks higher than one that trains."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if train_state.device.type == "cuda" else [])]
    when = schedule(wait=0, warmup=behind, active=1) if behind else None
    with profile(activities=activities, record_shapes=True, schedule=when) as profiler:
        for number in range(behind):
            step = train_state.train_step(batch)
            if number == behind - 1:
                step.read()  # waits, so that no kernel of this step is recorded with the next
            profiler.step()
        train_state.train_step(batch).read()
    return profiler


def _timed(train_state: TrainState, batch: Any, steps: int) -> tuple[float, ...]:
    """Seconds of each step. On a GPU, from the end of one to the end of the next: as in training, the host launches the next step
    while one runs."""
    if train_state.device.type != "cuda":
        return tuple(_host_seconds(lambda: train_state.train_step(batch).read()) for _ in range(steps))
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 2)]
    for end in ends:
        train_state.train_step(batch)
        end.record()
    torch.cuda.synchronize()
    # Before the first the device was idle, so the host was not ahead of the second yet.
    return tuple(1e-3 * before.elapsed_time(after) for before, after in pairwise(ends[1:]))


def _host_seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def kernels_of(events: Iterable[Any]) -> tuple[Counter[str], int, float]:
    """Seconds by category and number of the kernels of a step, without copies, and the seconds in which any of them runs: those of
    several streams slow each other down while they run at once."""
    parts: Counter[str] = Counter()
    spans: list[tuple[float, float]] = []
    for event in events:
        if event.device_type.name != "CUDA" or event.name.startswith(("Memcpy", "Memset")):
            continue
        if "spin" in event.name or event.name in KERNELS or event.is_user_annotation:
            continue
        parts[category_of(event.name)] += event.device_time * 1e-6
        spans.append((event.time_range.start, event.time_range.end))
    start, end = (1e3 * np.array(spans).reshape(-1, 2)).round().astype(np.int64).T
    return parts, len(spans), 1e-9 * total(union(start, end))


def _beside(run: Run, job: Job, rank: int, measured: _Measured) -> Iterator[Difference]:
    """Plan and rehearsal compared, quantity by quantity."""
    place = RankCoordinates(run.layout, rank)
    took, done = statistics.median(measured.seconds), measured.busy
    # A rank whose host is slower than planned idles, and a chip that idles clocks higher.
    planned = rank_time(job, place.index("pipeline"), load=min(1.0, done / took) if done else None)
    parts = planned.parts
    owners = memory_of_rank(run, job, rank)
    # Libraries' memory and the allocator's waste are reserved, but never requested from the allocator.
    memory = {name: size for name, size in owners.items() if name != "workspace"}
    compute = sum(parts[name] for name in WORK) + parts["optimizer"]
    exposed = {name: value for name, value in parts.items() if name not in (*WORK, "optimizer")}
    step = compute + sum(exposed.values())
    if measured.allocated is None:
        yield Difference("time", "time step", step, took)
        yield from _held(memory, measured)
        return
    peak, reserved = measured.allocated
    yield Difference("time", "time compute", compute, done)
    for name in ("matmul", "attention"):
        yield Difference("time", f"time {name}", parts[name], measured.parts[name])
    yield Difference(
        "time", "time memory and optimizer", parts["memory"] + parts["optimizer"], measured.parts["memory"]
    )
    yield Difference("time", "time exposed and waiting", sum(exposed.values()), max(0.0, took - done))
    yield Difference("time", "time step", step, took)
    yield Difference("memory", "memory peak", sum(memory.values()), float(peak))
    yield Difference("memory", "memory reserved", sum(owners.values()), float(reserved))
    yield from _held(memory, measured)
    held = sum(memory.values()) - sum(memory.get(name, 0.0) for name in ("parameters", "optimizer"))
    rest = peak - measured.owners["parameters"] - measured.owners["optimizer"]
    yield Difference("memory", "memory beside parameters and optimizer", held, float(rest))
    yield Difference("launches", "kernels", planned.launches, float(measured.kernels))


def _held(memory: Mapping[str, float], measured: _Measured) -> Iterator[Difference]:
    for name, size in measured.owners.items():
        yield Difference("memory", f"memory {name}", memory.get(name, 0.0), float(size))


def rehearsed_profile(run: Run, rank: int, say: Say) -> Profile:
    """Rehearse a rank and read the times of its GEMMs and its attention from the profile."""
    gemms: dict[tuple[Any, ...], list[float]] = {}
    attention: dict[tuple[Any, ...], list[float]] = {}

    def read(recorded: profile) -> None:
        for event in recorded.events() or ():
            seconds = (event.device_time_total if on_gpu else event.cpu_time_total) * 1e-6
            if not seconds or not event.input_shapes:
                continue
            if event.name in GEMMS:
                first, second = (event.input_shapes[place] for place in GEMMS[event.name])
                if len(first) == len(second) == 2:
                    gemms.setdefault((first[0], second[1], first[1]), []).append(seconds)
            elif event.name in ATTENTION:
                kernel, direction, at = ATTENTION[event.name]
                (batch, heads, queries, width), keys = event.input_shapes[at], event.input_shapes[at + 1][2]
                attention.setdefault((batch, heads, queries, keys, width, kernel, direction), []).append(seconds)

    device = choose_device(run.train.device)
    on_gpu = device.type == "cuda"
    found = rehearse(run, rank, steps=1, read=read, say=say)
    beyond = found.beyond_curves(_for_chip(run, device))
    if not gemms:
        raise UserError("the rehearsal ran no GEMM that the profiler saw; no profile was written")
    dtype = run.train.dtype
    return replace(
        empty_profile(device),
        gemm=tuple(
            dict(m=m, n=n, k=k, dtype=dtype, seconds=seconds, tflops=2.0 * m * n * k / seconds / 1e12)
            for (m, n, k), times in gemms.items()
            for seconds in (statistics.median(times) / beyond["matmul"],)
        ),
        attention=tuple(
            dict(batch=batch, heads=heads, queries=queries, keys=keys, head_dim=width, causal=queries == keys,
                 kernel=kernel, direction=direction, dtype=dtype, seconds=statistics.median(times) / beyond["attention"])
            for (batch, heads, queries, keys, width, kernel, direction), times in attention.items()
        ),
    )  # fmt: skip
