"""Records a few steps of a run with PyTorch's profiler, on all ranks or some, together with what a reader needs to explain them:
the run, its plan, the schedule, the process groups of each axis, the traffic, and clock readings that align the ranks.

The steps are those of `shardwise train`, on the run's own data. With GRPO, rollouts are generated between the steps, in spans named
`rollouts`. A profile is a folder:

    profile.json            what was recorded (`manifest`)
    run.toml, plan.json     the run, resolved, and its plan
    ranks/rank-00000.json.gz     Kineto traces, one for each recorded rank
    memory/rank-00000.json.gz    bytes by owner in one more step; on GPUs also the allocator's blocks and their history
    modules.json            the cost of each module, on request
"""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from shardwise import __version__
from shardwise.data.batches import Batch
from shardwise.hardware.chips import chip_of_driver_name
from shardwise.ledger import AXIS_OF
from shardwise.measure.allocator import allocator_history
from shardwise.measure.counts.memory import measure_memory
from shardwise.measure.counts.modules import as_rows, own_costs
from shardwise.measure.counts.traffic import TrafficCounter
from shardwise.measure.labelled import labelled, span
from shardwise.measure.module_time import module_times
from shardwise.plan.cost.flops import CONVENTION, training_flops
from shardwise.plan.plan import plan
from shardwise.plan.trainer.work import CONVENTION as HARDWARE
from shardwise.run import Problem, Run, UserError, counted, to_dict, to_toml
from shardwise.train.batches.source import Source
from shardwise.train.progress.speed import peak_flops
from shardwise.train.step import TrainState
from shardwise.tune.source import source_of

VERSION = 1
CLOCK_READINGS = 5
"""Barriers after which ranks read their clocks, both before and after the recorded steps."""

Progress = Callable[[str], None]
"""Called with a description of the next phase."""


@dataclass(frozen=True)
class Recording:
    """The settings of a recording."""

    steps: int = 3
    warmup: int = 3
    """Unrecorded steps at the start: the first ones allocate buffers, build buckets and compile kernels."""
    ranks: tuple[int, ...] | None = None
    """The ranks to record; None for all. The others run the same steps unrecorded."""
    modules: bool = False
    """Also count costs by module, in two more steps."""

    def has(self, rank: int) -> bool:
        """Whether a rank is recorded."""
        return self.ranks is None or rank in self.ranks


def rank_file(folder: Path, kind: str, rank: int) -> Path:
    """The file of a rank's trace or memory."""
    return folder / kind / f"rank-{rank:05d}.json.gz"


def prepare_folder(folder: Path) -> None:
    """Create the folder of a profile, or clear that of an older one."""
    if folder.exists() and not folder.is_dir():
        raise UserError(Problem(f"{folder} is a file; a profile is a folder", "--out", "command line"))
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "profile.json").exists():
        reason = f"{folder} holds something that is not a profile; choose another folder, or an empty one"
        raise UserError(Problem(reason, "--out", "command line"))
    (folder / "profile.json").unlink(missing_ok=True)
    for kind in ("ranks", "memory"):
        shutil.rmtree(folder / kind, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    # Marks the folder as a profile even if the recording is interrupted.
    (folder / "profile.json").write_text(json.dumps({"version": VERSION, "complete": False}))


def record(run: Run, folder: Path, recording: Recording, progress: Progress = lambda what: None) -> TrainState:
    """Record the run into a folder that `prepare_folder` created. Every rank calls this."""
    source = source_of(run)
    train_state = TrainState(run)
    source.attach(train_state, progress, lambda done: None)
    rank = train_state.mesh.rank
    first, last = recording.warmup + 1, recording.warmup + recording.steps
    remaining = source.batches(last + (3 if recording.modules else 1))
    progress(f"{counted(recording.warmup, 'step')} to warm up")
    for _ in range(recording.warmup - 1):
        _step(train_state, next(remaining))
    clocks = _read_clocks(train_state)
    progress(f"{counted(recording.steps, 'step')} under the profiler")
    measured = _record_steps(train_state, remaining, folder, recording, source)
    clocks += _read_clocks(train_state)
    progress("one more step to count memory")
    owners = measure_memory(train_state, next(remaining))
    if recording.has(rank):
        path = rank_file(folder, "memory", rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(path, "wt", encoding="utf-8") as file:
            json.dump(dict(owners=owners, allocator=measured.allocator), file)
    mine = dict(
        nanoseconds=measured.nanoseconds,
        clocks=clocks,
        device=device_name(train_state.device),
        host=socket.gethostname(),
        groups=_groups(train_state),
        traffic=measured.traffic,
        modules=None,
    )
    if recording.modules:
        progress("two more to count operations and activations by module")
        mine["modules"] = as_rows(own_costs(train_state, remaining, measured.module_seconds))
    every = _all_gather(train_state, mine)
    if rank == 0:
        (folder / "run.toml").write_text(to_toml(run), encoding="utf-8")
        (folder / "plan.json").write_text(json.dumps(planned(run, train_state.device)))
        described = manifest(train_state, recording, first, every)
        if any(measured.figures):
            described["batches"] = measured.figures
        if recording.modules:
            known = ("pipeline_ranks", "peak_flops", "peak_source", "model_flops", "step_nanoseconds")
            shared = {key: described[key] for key in known}
            rows = {"convention": HARDWARE, **shared, "ranks": [each["modules"] for each in every]}
            (folder / "modules.json").write_text(json.dumps(rows))
        (folder / "profile.json").write_text(json.dumps(described, indent=1))
    if run.layout.world > 1:
        dist.barrier()  # no rank reads before all is written
    return train_state


def _step(train_state: TrainState, batch: Batch) -> int:
    """Run a step as the training loop does, until its loss is on the host; returns its nanoseconds."""
    start = time.perf_counter_ns()
    result = train_state.train_step(batch)
    result.loss.item(), result.grad_norm.item()
    return time.perf_counter_ns() - start


@dataclass
class RankRecord:
    """A rank's measurements of its recorded steps, besides the trace."""

    nanoseconds: list[int] = field(default_factory=list)
    traffic: list[dict[str, Any]] | None = None
    """Messages sent; None on a rank that was not recorded."""
    allocator: dict[str, Any] = field(default_factory=dict)
    module_seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    """Seconds of a step, by module and direction."""
    figures: list[dict[str, Any]] = field(default_factory=list)
    """For each step, figures of its batch: for rollouts, their rewards and how fast they were generated."""


def _record_steps(
    train_state: TrainState, remaining: Iterator[Batch], folder: Path, recording: Recording, source: Source
) -> RankRecord:
    """Run the last warm-up step, with labels and the profiler already on, and the recorded steps."""
    measured, path = RankRecord(), rank_file(folder, "ranks", train_state.mesh.rank)
    recorded = recording.has(train_state.mesh.rank)
    with contextlib.ExitStack() as stack:
        if recorded:
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler = stack.enter_context(_profiler(train_state.device, recording.steps))
            counter = stack.enter_context(labelled(train_state))
            measured.allocator = stack.enter_context(allocator_history(train_state))
        for number in range(recording.steps + 1):
            with span("phase", "rollouts" if train_state.run.objective.kind == "grpo" else "data"):
                batch = next(remaining)
            nanoseconds = _step(train_state, batch)
            if number:
                measured.nanoseconds.append(nanoseconds)
                measured.figures.append(source.figures())
            elif recorded:
                counter.reset()
            if recorded:
                profiler.step()
    if recorded:
        profiler.export_chrome_trace(str(path))
        measured.traffic = _traffic(counter)
        if recording.modules:
            times = module_times(profiler.events() or ())
            measured.module_seconds = {m: {k: v / recording.steps for k, v in t.items()} for m, t in times.items()}
    return measured


def _profiler(device: torch.device, steps: int) -> profile:
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    return profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
        record_shapes=True,
        profile_memory=True,
    )


def _read_clocks(train_state: TrainState) -> list[int]:
    """This rank's clock after each of several barriers."""
    times = []
    for _ in range(CLOCK_READINGS if train_state.run.layout.world > 1 else 0):
        dist.barrier()
        times.append(time.time_ns())
    return times


def _all_gather(train_state: TrainState, mine: dict[str, Any]) -> list[dict[str, Any]]:
    every: list[Any] = [mine]
    if train_state.run.layout.world > 1:
        every = [None] * train_state.run.layout.world
        dist.all_gather_object(every, mine)
    return every


def _groups(train_state: TrainState) -> dict[str, dict[str, Any]]:
    """This rank's process groups by name: their axis and their ranks."""
    if train_state.run.layout.world == 1:
        return {}
    names = {group_name: AXIS_OF.get(axis, axis) for group_name, axis in train_state.mesh.axes_by_group().items()}
    made = dist.distributed_c10d._world.pg_map
    ranks: dict[str, list[int]] = {group.group_name: dist.get_process_group_ranks(group) for group in made}
    return {name: dict(axis=axis, ranks=ranks[name]) for name, axis in names.items()}


def _traffic(counter: TrafficCounter) -> list[dict[str, Any]]:
    """Bytes and messages sent in the recorded steps. Bytes may be fractions, as in an all-reduce over three ranks."""
    return [
        dict(
            axis=AXIS_OF.get(group, group),
            collective=operation,
            bytes=str(size),
            messages=counter.messages[group, operation],
        )
        for (group, operation), size in counter.traffic.items()
    ]


def device_name(device: torch.device) -> str:
    """The name of a rank's device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def planned(run: Run, device: torch.device) -> dict[str, Any]:
    """The plan of a run; if the run names no chip, for the one it runs on."""
    chip = chip_of_driver_name(device_name(device)) if device.type == "cuda" else None
    if not run.cluster.chip and not run.cluster.profile and chip is not None:
        run = replace(run, cluster=replace(run.cluster, chip=chip.name))
    return plan(run).as_dict()


def manifest(train_state: TrainState, recording: Recording, first: int, every: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of `profile.json`; its keys are stable."""
    run, pipeline = train_state.run, train_state.parallel.pipeline
    peak, source = peak_flops(train_state.device, train_state.dtype)
    listed = pipeline.schedule
    return {
        "version": VERSION,
        "complete": True,
        "shardwise": __version__,
        "torch": torch.__version__,
        "name": run.name,
        "world": run.layout.world,
        "ranks": [rank for rank in range(run.layout.world) if recording.has(rank)],
        "layout": to_dict(run)["layout"],
        "first_step": first,
        "steps": recording.steps,
        "tokens": run.batch_tokens,
        "model_flops": training_flops(run.model, run.train.seq_len, run.adapter) * run.batch_tokens,
        "flops_convention": CONVENTION,
        "peak_flops": peak,
        "peak_source": source,
        "schedule": {
            "name": listed.name,
            "microbatches": listed.microbatches,
            "placement": list(listed.placement),
            "actions": [[str(action) for action in actions] for actions in listed.ranks],
        },
        # The pipeline is the outermost axis.
        "pipeline_ranks": [rank * run.layout.pipeline // run.layout.world for rank in range(run.layout.world)],
        "devices": [each["device"] for each in every],
        "hosts": [each["host"] for each in every],
        "groups": [each["groups"] for each in every],
        "step_nanoseconds": [each["nanoseconds"] for each in every],
        "traffic": [each["traffic"] for each in every],
        "clocks": [each["clocks"] for each in every],
    }
