"""A run's plan: whether it fits, how fast it is, where the time goes, and what it costs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.ledger import Account, Memory, as_dict
from shardwise.plan.cost.constants import classes_of, interval, known_chip
from shardwise.plan.cost.flops import CONVENTION, training_flops
from shardwise.plan.cost.host import host_bytes, link_of
from shardwise.plan.cost.job import GIB, Job, job_of
from shardwise.plan.cost.operations import embedding, head, layer
from shardwise.plan.cost.parameters import checkpoint_bytes
from shardwise.plan.time.goodput import JobCost, data_stall, job_cost
from shardwise.plan.time.step import Step, prepare, step_time
from shardwise.plan.trainer.memory import memory_of
from shardwise.plan.trainer.rank import planned_rank
from shardwise.plan.trainer.state import activations_away
from shardwise.plan.trainer.traffic import traffic
from shardwise.plan.trainer.work import work
from shardwise.run import AXES, LayoutConfig, ModelConfig, Run, to_dict
from shardwise.run.ranks.coordinates import group_span
from shardwise.run.vocabulary import INDEX, vocabulary_of

RANKED = ("zero", "schedule", "chunks", "recompute", "recompute_budget", "context_method")
SHOWN = (*AXES, *RANKED, "async_tensor", "expert_tensor", "offload")
"""The keys of a layout that a ranking shows."""
ARITHMETIC_BOUND = 0.8
"""A step that computes for more than this share of its time counts as limited by arithmetic, whatever else it waits for."""


@dataclass(frozen=True)
class Plan:
    """What to expect of a run."""

    run: Run
    job: Job
    account: Account
    low: float
    high: float
    """The step's seconds lie between `low` and `high` in 8 of 10 cases."""
    mfu: float
    cost: JobCost
    binds: str
    """What limits it."""
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether the run fits into the memory of every rank."""
        return self.account.memory.fits

    @property
    def over_network(self) -> tuple[str, ...]:
        """The axes whose groups span several fast-link domains, so that they use the network between machines."""
        spans = {axis: group_span(self.run.layout, axis) for axis in AXES}
        return tuple(axis for axis, (size, stride) in spans.items() if self.job.cluster.spans(size, stride) > 1)

    def as_dict(self) -> dict[str, Any]:
        """The plan for other programs to read; the keys are stable."""
        account = self.account
        return {
            "layout": layout_dict(self.run.layout) | {"microbatch": self.run.train.microbatch},
            "devices": self.run.layout.world,
            "over_network": list(self.over_network),
            "fits": self.fits,
            "step_seconds": account.step_seconds,
            "step_seconds_low": self.low,
            "step_seconds_high": self.high,
            "tokens_per_s": account.tokens_per_second,
            "mfu": self.mfu,
            "peak_flops": mfu_peak(self.job)[1],
            "flops": as_dict(account.work.flops),
            "bytes_moved": as_dict(account.work.bytes),
            "flops_convention": CONVENTION,
            "memory": {
                "capacity": account.memory.capacity,
                "peak": account.memory.peak,
                "stages": as_dict(account.memory.ranks),
            },
            "traffic": as_dict(account.traffic.bytes),
            "breakdown": dict(account.breakdown),
            "cost": as_dict(self.cost),
            "binds": self.binds,
            "notes": list(self.notes),
            "run": to_dict(self.run),
        }


def layout_dict(layout: LayoutConfig) -> dict[str, Any]:
    """A layout's keys and values, axes first."""
    return {name: getattr(layout, name) for name in SHOWN}


def plan(run: Run) -> Plan:
    """The plan of a run whose layout is given."""
    return plan_job(run, job_of(run))


def plan_job(run: Run, job: Job, step: Step | None = None, memory: Memory | None = None) -> Plan:
    """The plan of a run as this job. Its step and memory are computed unless they are passed in."""
    step, memory = step or step_time(prepare(job)), memory or memory_of(run, job)
    stall = data_stall(run, job.cluster, step.seconds)
    step = replace(step, seconds=step.seconds + stall, breakdown={**step.breakdown, "data": stall})
    done = replace(work(run), bytes=bytes_moved(job, step))
    account = Account("plan", step.seconds, step_tokens(run), step.breakdown, done, memory, traffic(run))
    devices = run.layout.world
    mfu = job.tokens * training_flops(job.model, job.seq_len, job.adapter) / (step.seconds * devices * mfu_peak(job)[1])
    cost = job_cost(run, job.cluster, step.seconds, devices, checkpoint_bytes(job))
    width = interval(classes_of(job))
    low, high = step.seconds * math.exp(-width), step.seconds * math.exp(width)
    notes = *notes_of(job), *swap_notes(run, job), *assumed(run)
    return Plan(run, job, account, low, high, mfu, cost, what_binds(account, job), notes)


def prompt_tokens(run: Run) -> int:
    """The mean length of a run's prompts, where its datasets are present; else the tokens of a row that completions leave."""
    from shardwise.data.shards import read_index  # imports all of `data/`, which no other plan needs

    most = run.train.seq_len - run.objective.completion_tokens
    found = [read_index(folder) for folder in run.data.sets if (Path(folder) / INDEX).is_file()]
    documents = sum(index.documents for index in found)
    return max(1, min(most, round(sum(index.tokens for index in found) / documents))) if documents else most


def step_tokens(run: Run) -> int:
    """Tokens of a step that are not padding; completions count at their full length."""
    if run.objective.kind != "grpo":
        return run.batch_tokens
    return run.train.global_batch * (prompt_tokens(run) + run.objective.completion_tokens)


def mfu_peak(job: Job) -> tuple[str, float]:
    """The peak that the MFU is relative to: its name, and FLOP/s of a device. It is the peak of the training dtype, even where some
    GEMMs run in fp8."""
    peaks = job.cluster.chip.peak
    name = job.dtype if job.dtype in peaks else max(peaks, key=lambda dtype: peaks[dtype])
    return f"{job.cluster.chip.name}'s {name} peak", peaks[name]


def bytes_moved(job: Job, step: Step) -> dict[str, dict[str, float]]:
    """Bytes that elementwise operations read and write in a step, on the pipeline rank with the most work, by part and pass."""
    stages = [n for n, home in enumerate(step.placement) if home == step.slowest]
    layers = job.stage_layers
    dense, moe = (float(sum(layers[n][kind] for n in stages)) for kind in (0, 1))
    modules = [(dense, layer(job, routed=False))] if dense else []
    modules += [(moe, layer(job, routed=True))] if moe else []
    first, last = (any(job.layout.has_ends(n)[end] for n in stages) for end in (0, 1))
    modules += [(1.0, embedding(job))] if first else []
    modules += [(1.0, head(job))] if last else []
    moved: dict[str, dict[str, float]] = {}
    microbatches = float(job.accumulation) / job.layout.directions
    for times, ops in modules:
        for op in ops:
            for name, size in zip(("forward", "backward_input", "backward_weight"), op.bytes, strict=True):
                if np.any(size):
                    passes = moved.setdefault(op.part, {})
                    passes[name] = passes.get(name, 0.0) + times * microbatches * float(size)
    return moved


def swap_notes(run: Run, job: Job) -> list[str]:
    """How many saved activations are offloaded from the device, and how fast they move."""
    if not job.memory.swaps:
        return []
    link, on_disk = link_of(job), job.memory.activations == "disk"
    there, back = (link.disk, link.disk) if on_disk else (link.to_host, link.to_device)
    place = "to files" if on_disk else "to the host's memory"
    size = activations_away(planned_rank(run, 0)) / GIB
    return [f"{size:.1f} GiB of saved activations are offloaded {place}: {there:.0f} GB/s out, {back:.0f} GB/s back"]


def notes_of(job: Job) -> list[str]:
    """What makes the prediction less certain."""
    notes = []
    cluster = job.cluster
    if cluster.per_node > cluster.chip.devices_per_node and cluster.chip.name != "cpu":
        machines = -(-cluster.per_node // cluster.chip.devices_per_node)
        notes.append(
            f"{cluster.per_node} devices in one machine, where machines of {cluster.chip.name} have "
            f"{cluster.chip.devices_per_node}: for {machines} machines set cluster.nodes = {machines}"
        )
    if not known_chip(job):
        notes.append(
            f"no published training run on {job.cluster.chip.name} was fitted: the prediction rests on its kernel curves alone; "
            "`shardwise bench` measures the machine it runs on, and cluster.profile uses that"
        )
    if job.memory.hosts_optimizer:
        several = job.microbatches > 1
        every = host_bytes(job.model, int(job.width), several=several)
        held = every.held - every.moments * job.memory.on_disk
        link, how = link_of(job), "as cluster.host_gbs and memory.update_gbs say; `shardwise bench` measures them"
        if job.cluster.profile is not None and job.cluster.profile.host_update_gbs > 0:
            how = "as measured"
        notes.append(
            f"the host holds {held / GIB:.1f} GiB; it updates at {link.update:.0f} GB/s, gradients leave at {link.to_host:.0f} and "
            f"parameters come back at {link.to_device:.0f} GB/s, {how}"
        )
        if job.memory.on_disk:
            notes.append(
                f"{every.moments / GIB:.1f} GiB of moments are in files, read and written at {link.disk:.1f} GB/s"
            )
    if job.layout.offload:
        notes.append("moving parameters and gradients between host and device is not part of the predicted time")
        if job.muon:
            notes.append("Muon's GEMMs are planned as if the device made them; with layout.offload the host does")
    if job.fp8 and job.cluster.chip.peak.get("fp8", 0) == 0:
        notes.append(f"{job.cluster.chip.name} has no fp8 arithmetic; planned in 16 bits")
    return notes


def assumed(run: Run) -> list[str]:
    """The default assumed for the vocabulary size, where the dataset is not here to read it from."""
    size, sets = run.model.vocab, run.data.sets
    if not sets or size != ModelConfig().vocab or vocabulary_of(sets):
        return []
    return [f"{sets[0]} is not here to say the size of its tokenizer: planned with model.vocab = {size}, the default"]


def what_binds(account: Account, job: Job) -> str:
    """One sentence: what limits this layout most."""
    memory = account.memory
    if not memory.fits:
        rank = max(range(len(memory.ranks)), key=lambda r: memory.totals[r])
        owner = max(memory.ranks[rank], key=lambda name: memory.ranks[rank][name])
        return (
            f"memory: pipeline rank {rank} needs {memory.peak / GIB:.1f} GiB of {memory.capacity / GIB:.1f}, "
            f"most of it {owner} ({memory.ranks[rank][owner] / GIB:.1f} GiB)"
        )
    total = account.step_seconds
    computing = sum(account.breakdown.get(name, 0.0) for name in ("matmul", "attention", "memory"))
    waits = {k: v for k, v in account.breakdown.items() if k not in ("matmul", "attention", "memory")}
    worst = max(waits, key=lambda name: waits[name])
    what = {
        "bubble": "waiting for the pipeline",
        "host": "launching kernels from the host",
        "other": "what does not scale with the work",
        "optimizer": "Muon's GEMMs" if job.muon else "the optimizer's memory traffic",
        "pipeline": "sending between stages",
        "data": "reading the batches",
        "offload": "offloading activations",
    }.get(worst, f"traffic of the {worst} axis")
    share = f"{waits[worst] / total:.0%}"
    moved = account.breakdown.get("memory", 0.0)
    if computing > ARITHMETIC_BOUND * total:
        if moved > computing / 2:
            return f"memory bandwidth: {moved / total:.0%} of the step reads and writes what is not multiplied"
        following = f", next is {what}, {share} of the step" if share != "0%" else ""
        return f"arithmetic: {computing / total:.0%} of the step computes{following}"
    return f"{what}: {share} of the step"
