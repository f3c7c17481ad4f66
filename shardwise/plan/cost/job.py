"""The input of the planner's formulas: a model, a layout, a batch, a precision, the framework that runs it and the machines.

A `Job` is made from a `Run`; rows of published measurements make one too, with another framework. The sizes of its layout and its
microbatch may be arrays. Then every formula returns arrays, one entry a layout: that is how the search screens many at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwise.hardware import Cluster, find_chip, load_profile, make_cluster
from shardwise.plan.cost.flops import forward_flops, frozen_width, learned_share
from shardwise.plan.cost.frameworks import FRAMEWORKS, QLORA_HOST, Framework
from shardwise.plan.cost.stages import stage_counts
from shardwise.run import AdapterConfig, LayoutConfig, MemoryConfig, ModelConfig, Problem, Run, UserError
from shardwise.run.derive import (
    CHUNK_BYTES,
    chunk_bytes,
    chunks_loss,
    compiles,
    forward_passes,
    fresh_and_near,
    gathers_in_place,
    keeps_compute_copies,
    may_exchange,
    planned_on_gpu,
    replays,
)
from shardwise.run.dtypes import DTYPE_BYTES
from shardwise.run.second_models.teacher import teacher_model
from shardwise.run.sections.adapter import NO_ADAPTER
from shardwise.run.sections.memory import ALL_ON_DEVICE
from shardwise.run.sections.objective import FACTS, facts_of

Number = Any
"""A number, or an array with one entry a layout."""
GIB = 2.0**30


@dataclass(frozen=True)
class Job:
    """One training step to be accounted for."""

    model: ModelConfig
    layout: LayoutConfig
    seq_len: int
    global_batch: int
    microbatch: Number
    framework: Framework
    cluster: Cluster
    dtype: str = "bfloat16"
    fp8: bool = False
    """Whether GEMMs run in fp8."""
    fp8_gradients: bool = True
    """With fp8, whether the GEMMs of weight gradients do too, so that inputs are saved only in fp8."""
    headroom: float = 0.05
    muon: bool = False
    """Whether the layers' matrices are orthogonalised in every step."""
    logprobs: bool = False
    """Whether the loss is computed from log-probabilities, whose logits are recomputed in the backward pass."""
    forward_passes: float = 0.0
    """Extra forward passes of networks of this size in a step, such as those of a frozen reference."""
    imbalance: float = 1.0
    """Load of the busiest expert rank over the mean."""
    adapter: AdapterConfig = NO_ADAPTER
    """What is trained beside frozen weights."""
    chunk_bytes: int = CHUNK_BYTES
    """Bytes of the logits that a chunked loss holds at a time."""
    memory: MemoryConfig = ALL_ON_DEVICE
    """What the device does not hold."""
    host_gbs: float = 20.0
    """GB/s between a device and its host's memory, where that was not measured."""
    storage_gbs: float = 1.0
    """Likewise of the machine's disk."""
    layers_of_rank: int = 0
    """Layers of the pipeline rank in question, which share its recompute budget; 0: those of a mean rank."""
    sharded: tuple[Number, Number] | None = None
    """Whether `fully_shard` handles the dense parameters, and whether it handles experts; None: the layout's sizes decide."""

    @property
    def fully_sharded(self) -> tuple[Number, Number]:
        """`sharded`, with None resolved; 0 for other programs, and with replicas alone, which DistributedDataParallel handles."""
        if not self.framework.fully_shard:
            return 0.0, 0.0
        return sharded_parts(self.layout, self.layout.world) if self.sharded is None else self.sharded

    @property
    def learned(self) -> float:
        """Trained parameters as a share of the network's, which do not include the adapters': 1 without adapters."""
        return learned_share(self.model, self.adapter)

    @property
    def frozen_bytes(self) -> float:
        """Mean bytes of a frozen parameter of the network; 0 where all are trained."""
        return frozen_width(self.model, self.adapter, self.framework.gather_bytes)

    @property
    def gathered_bytes(self) -> float:
        """Mean bytes of a parameter as ZeRO all-gathers it; frozen ones are gathered as they are held."""
        return self.frozen_bytes if self.adapter.used else self.framework.gather_bytes

    @property
    def width(self) -> float:
        """Bytes of an element of an activation."""
        return DTYPE_BYTES[self.dtype]

    @property
    def accumulation(self) -> Number:
        """Microbatches of a data rank in a step."""
        return self.global_batch / (self.microbatch * self.layout.replicate * self.layout.shard)

    @property
    def microbatches(self) -> int:
        """`accumulation` of a single layout, as an integer."""
        return max(1, round(float(self.accumulation)))

    @property
    def stage_microbatches(self) -> int:
        """Microbatches of a step that pass through each stage of a rank."""
        return max(1, self.microbatches // self.layout.directions)

    @property
    def reduces_each_microbatch(self) -> bool:
        """Whether shards are reduced after every microbatch. This trainer's split backward passes leave that to a step's end."""
        often = self.framework.reduce_every_microbatch and self.layout.zero >= 2
        return often and not (self.framework.family == "shardwise" and self.layout.splits_backward)

    @property
    def exchanges_gradients(self) -> Number:
        """1 where shards send each other gradients of 16 bits and add them up, 0 where they reduce-scatter them."""
        near = self.reduces_each_microbatch & np.asarray(fresh_and_near(self.layout, self.cluster.per_node))
        return 1.0 * (self.framework.exchanges_gradients & near)

    @property
    def rank_layers(self) -> Number:
        """Layers that share a recompute budget."""
        return self.layers_of_rank or self.model.layers / self.layout.pipeline

    @property
    def rows(self) -> Number:
        """Tokens of a microbatch on a context rank."""
        return self.microbatch * self.seq_len / self.layout.context

    @property
    def tokens(self) -> int:
        """Tokens of a step over all ranks."""
        return self.global_batch * self.seq_len

    @property
    def zero_ranks(self) -> Number:
        """Ranks over which ZeRO shards: for parameters a context rank is one more data rank."""
        return self.layout.shard * self.layout.context

    @property
    def pipeline_bytes(self) -> Number:
        """Bytes that a rank sends to the next stage, of one microbatch."""
        return self.rows / self.layout.tensor * self.model.hidden * self.width

    @property
    def stage_layers(self) -> list[tuple[int, int]]:
        """Dense and MoE layers of each pipeline stage."""
        m, result, start = self.model, [], 0
        for count in stage_counts(m, self.layout, self.seq_len):
            dense = count if not m.experts else max(0, min(m.dense_layers - start, count))
            result.append((dense, count - dense))
            start += count
        return result * self.layout.directions


def sharded_parts(layout: LayoutConfig, world: Number) -> tuple[Number, Number]:
    """1 where `fully_shard` handles this trainer's dense parameters, and 1 where it handles experts (`parallel/shard.py`)."""
    zero = layout.shard * layout.context
    return 1.0 * layout.is_sharded(zero, world), 1.0 * layout.is_sharded(zero // layout.expert, world)


def cluster_of(run: Run) -> Cluster:
    """The machines that a run names."""
    c = run.cluster
    profile = load_profile(c.profile) if c.profile else None
    chip = find_chip(c.chip or "cpu")
    if profile is not None and profile.chip not in ("", chip.name):
        raise UserError(
            Problem(f"was measured on {profile.chip}, and cluster.chip is {chip.name}", "cluster.profile", c.profile)
        )
    names = ("intra_gbs", "inter_gbs", "latency_ms", "power_w", "hbm_gbs", "domain", "taper", "fabric", "sharp")
    return make_cluster(chip, c.nodes, c.devices_per_node, **{n: getattr(c, n) for n in names}, profile=profile)


def overlapped(job: Job, overlap: bool) -> Job:
    """The job with `async_tensor`: tensor traffic in two halves, one of which is sent during the GEMM of the other."""
    return replace(job, framework=replace(job.framework, tensor_overlap=0.5)) if overlap else job


def _forward_passes(run: Run) -> float:
    """Extra forward passes in a step, in units of the trained network: a teacher counts by its FLOPs."""
    passes = float(sum(forward_passes(run)))
    if not passes or not facts_of(run.objective).teacher:
        return passes
    return passes * forward_flops(teacher_model(run), run.train.seq_len) / forward_flops(run.model, run.train.seq_len)


def job_of(run: Run) -> Job:
    """The job of a run, as this project's trainer executes it."""
    train, gpu = run.train, planned_on_gpu(run)
    waits = train.dtype == "float16" or train.guard == "skip"  # each step for the result of the previous one
    facts: dict[str, Any] = dict(
        chunked_loss=chunks_loss(run, gpu=gpu),
        replays=replays(run, gpu=gpu),
        gathers_in_place=gathers_in_place(run, gpu=gpu),
        exchanges_gradients=may_exchange(run, gpu=gpu),
        keeps_compute_copies=keeps_compute_copies(run, gpu=gpu),
        runs_ahead=gpu and not waits,
        reduce_bytes=DTYPE_BYTES[train.reduce_dtype],
    )
    if run.adapter.kind == "qlora" and gpu and not compiles(run, gpu=gpu):
        facts["host"] = QLORA_HOST
    width = DTYPE_BYTES[train.dtype]
    if width > 2:
        facts |= dict.fromkeys(("parameter_bytes", "gradient_bytes", "gather_bytes", "reduce_bytes"), width)
        facts["optimizer_bytes"] = 2 * width
    if 0 < run.model.sliding_window < train.seq_len:  # cuDNN's kernels, as PyTorch calls them, have no windows
        facts["attention"] = "flash2"
    if train.fp8 != "none":
        facts["fp8_recipe"] = train.fp8
    job = Job(
        model=run.model,
        layout=run.layout,
        seq_len=train.seq_len,
        global_batch=train.global_batch,
        microbatch=train.microbatch,
        framework=replace(FRAMEWORKS["shardwise-compiled" if compiles(run, gpu=gpu) else "shardwise"], **facts),
        cluster=cluster_of(run),
        dtype=train.dtype,
        fp8=train.fp8 != "none",
        fp8_gradients=train.fp8 == "tensorwise",
        headroom=run.cluster.headroom,
        muon=train.optimizer == "muon",
        logprobs=FACTS[run.objective.kind].logprobs,
        forward_passes=_forward_passes(run),
        adapter=run.adapter,
        chunk_bytes=chunk_bytes(run),
        memory=run.memory,
        host_gbs=run.cluster.host_gbs,
        storage_gbs=run.cluster.storage_gbs,
        imbalance=_imbalance(run),
    )
    return overlapped(job, run.layout.async_tensor)


def _imbalance(run: Run) -> float:
    """Rows of the busiest expert over the mean. An expert takes no more than its capacity, and each token once at most; where every
    token goes to every expert, all have the same."""
    m = run.model
    if not m.experts:
        return 1.0
    return min(run.train.expert_imbalance, m.expert_capacity or math.inf, m.experts / m.experts_per_token)
