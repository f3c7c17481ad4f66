"""What the planner's formulas read: a model, a layout, a batch, a precision, the program that runs it and the machines.

A `Job` is made from a `Run`; rows of published measurements make one too, with another stack. The sizes of its layout and
its microbatch may be arrays: then every formula gives arrays, one entry a layout, which is how the search screens many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from shardwise.hardware import Cluster, find_chip, load_profile, make_cluster
from shardwise.plan.cost.frameworks import STACKS, Framework
from shardwise.run import LayoutConfig, ModelConfig, Problem, Run, UserError
from shardwise.run.derive import chunks_loss, compiles, keeps_compute_copies, planned_on_gpu, replays

BYTES = {"float64": 8.0, "float32": 4.0, "bfloat16": 2.0, "float16": 2.0}


@dataclass(frozen=True)
class Job:
    """One step to be accounted for."""

    model: ModelConfig
    layout: LayoutConfig
    seq_len: int
    global_batch: int
    microbatch: Any
    stack: Framework
    cluster: Cluster
    dtype: str = "bfloat16"
    fp8: bool = False
    """Whether matrices are multiplied in 8 bits."""
    fp8_gradients: bool = True
    """Then whether the gradients of weights are too, which keeps inputs in 8 bits alone."""
    headroom: float = 0.05
    muon: bool = False
    """Whether the matrices of the layers are orthogonalised in every step."""
    imbalance: float = 1.0
    """Load of the busiest expert rank over the mean."""

    @property
    def width(self) -> float:
        """Bytes of an activation."""
        return BYTES[self.dtype]

    @property
    def accumulation(self) -> Any:
        """Microbatches of a data rank in a step."""
        return self.global_batch / (self.microbatch * self.layout.replicate * self.layout.shard)

    @property
    def rows(self) -> Any:
        """Tokens of a microbatch on a context rank."""
        return self.microbatch * self.seq_len / self.layout.context

    @property
    def tokens(self) -> int:
        """Tokens of a step over all ranks."""
        return self.global_batch * self.seq_len

    @property
    def zero_ranks(self) -> Any:
        """Ranks that share what is shared: a context rank is one more data rank to the parameters."""
        return self.layout.shard * self.layout.context


def cluster_of(run: Run) -> Cluster:
    """The machines a run names."""
    c = run.cluster
    profile = load_profile(c.profile) if c.profile else None
    chip = find_chip(c.chip or "cpu").name
    if profile is not None and profile.chip not in ("", chip):
        raise UserError(
            Problem(f"was measured on {profile.chip}, and cluster.chip is {chip}", "cluster.profile", c.profile)
        )
    return make_cluster(
        chip,
        c.nodes,
        c.devices_per_node,
        intra_gbs=c.intra_gbs,
        inter_gbs=c.inter_gbs,
        power_w=c.power_w,
        hbm_gbs=c.hbm_gbs,
        domain=c.domain,
        taper=c.taper,
        fabric=c.fabric,
        profile=profile,
    )


def overlapped(job: Job, overlap: bool) -> Job:
    """The job with `async_tensor`: traffic in two pieces, one of which travels while the other is multiplied."""
    return replace(job, stack=replace(job.stack, tensor_overlap=0.5)) if overlap else job


def job_of(run: Run) -> Job:
    """The job of a run, as this project's trainer executes it."""
    train = run.train
    gpu = planned_on_gpu(run)
    stack = STACKS["shardwise-compiled" if compiles(run, gpu=gpu) else "shardwise"]
    wide = BYTES[train.dtype] > 2
    if wide:
        stack = replace(stack, parameter_bytes=BYTES[train.dtype], gradient_bytes=BYTES[train.dtype],
                        optimizer_bytes=2 * BYTES[train.dtype], gather_bytes=BYTES[train.dtype],
                        reduce_bytes=BYTES[train.dtype])  # fmt: skip
    else:
        stack = replace(stack, reduce_bytes=BYTES[train.reduce_dtype])
    stack = replace(stack, chunked_loss=chunks_loss(run, gpu=gpu), replays=replays(run, gpu=gpu))
    waits = train.dtype == "float16" or train.guard == "skip"  # for what a step has come to, before the next
    stack = replace(stack, keeps_compute_copies=keeps_compute_copies(run, gpu=gpu), runs_ahead=gpu and not waits)
    if 0 < run.model.sliding_window < train.seq_len:  # cuDNN's, as PyTorch calls them, know no windows
        stack = replace(stack, attention="flash2")
    job = Job(
        model=run.model,
        layout=run.layout,
        seq_len=train.seq_len,
        global_batch=train.global_batch,
        microbatch=train.microbatch,
        stack=stack,
        cluster=cluster_of(run),
        dtype=train.dtype,
        fp8=train.fp8 != "none",
        fp8_gradients=train.fp8 == "tensorwise",
        headroom=run.cluster.headroom,
        muon=train.optimizer == "muon",
        # An expert takes no more than its room.
        imbalance=min(train.expert_imbalance, run.model.expert_capacity or math.inf) if run.model.experts else 1.0,
    )
    return overlapped(job, run.layout.async_tensor)
