"""The cost of Muon's orthogonalisation: every matrix of the layers is all-gathered, and every rank that holds a slice of it runs
the Newton-Schulz iteration of `train/optimizers/optimizer.py` on the full matrix. Only experts are divided among ranks: each is a
matrix of its own and stays with its rank. With s and l a matrix's shorter and longer side, each of the 5 iterations takes

    x xᵀ        s x s from l        its square   s x s from s        times x   s x l from s        in all 4 s s l + 2 s s s

FLOPs, whatever the layout: ranks that share a matrix all compute the same.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from shardwise.hardware import collective_seconds, gemm_seconds, memory_seconds
from shardwise.plan.cost.job import Job, Number
from shardwise.plan.cost.ops import span
from shardwise.plan.cost.parameters import zero_groups
from shardwise.plan.trainer.rank import PlannedRank
from shardwise.plan.trainer.wire import Wire
from shardwise.run import ModelConfig
from shardwise.run.derive import NEWTON_SCHULZ_ITERATIONS
from shardwise.run.dtypes import DTYPE_BYTES
from shardwise.run.parameters import Parameter, layer_parameters

LAUNCHES = 7.0
"""Launches of a matrix, in launches of the network: some 25 bare kernels, each a quarter of one under autograd and modules."""


def layer_matrices(model: ModelConfig, moe: bool) -> list[Parameter]:
    """The matrices of one layer, experts stacked."""
    return [parameter for parameter in layer_parameters(model, moe) if parameter.is_layer_matrix]


def gemms(matrix: Parameter) -> tuple[tuple[int, int, int], ...]:
    """The GEMMs of one iteration on one matrix: rows, columns and inner dimension."""
    short, long = sorted(matrix.shape[-2:])
    return (short, short, long), (short, short, short), (short, long, short)


def flops(planned: PlannedRank) -> float:
    """FLOPs of a rank in one step."""
    model, total = planned.run.model, 0
    for layer in (layer for stage in planned.stages for layer in stage.layers):
        for matrix in layer_matrices(model, model.is_moe(layer)):
            stacked = model.experts // planned.run.layout.expert if matrix.routed else 1
            total += stacked * NEWTON_SCHULZ_ITERATIONS * sum(2 * m * n * k for m, n, k in gemms(matrix))
    return float(total)


class MuonSeconds(NamedTuple):
    """Seconds a step for a stage's matrices, before the fitted constants, and the kernels launched."""

    gemms: Number = 0.0
    elementwise: Number = 0.0
    """Reads and writes beside the GEMMs."""
    launches: Number = 0.0
    gather_zero: Number = 0.0
    """All-gathering the shards of ZeRO."""
    gather_tensor: Number = 0.0
    """Then all-gathering the slices of the tensor ranks."""


def seconds(job: Job, dense: Number, moe: Number) -> MuonSeconds:
    """Seconds for this many dense and MoE layers; zero where the optimizer is another."""
    if not job.muon:
        return MuonSeconds()
    kinds = [(dense, False), (moe, True)] if job.model.experts else [(dense, False)]
    layers = [(count, _layer(job, is_moe)) for count, is_moe in kinds]
    return MuonSeconds(*(sum(count * part[n] for count, part in layers) for n in range(len(MuonSeconds._fields))))


def iteration_dtype(job: Job) -> str:
    """The dtype of the trainer's iteration: that of the parameters, but on a GPU bfloat16 instead of float32."""
    held = "float64" if job.dtype == "float64" else "float32"
    chip = job.cluster.chip
    return "bfloat16" if held == "float32" and chip.name != "cpu" and "bfloat16" in chip.peak else held


def _layer(job: Job, moe: bool) -> MuonSeconds:
    lay, chip, cluster, dtype = job.layout, job.cluster.chip, job.cluster, iteration_dtype(job)
    held, item = max(4.0, DTYPE_BYTES[job.dtype]), DTYPE_BYTES[dtype]
    zero, expert_zero = zero_groups(job)
    found = MuonSeconds()
    for matrix in layer_matrices(job.model, moe):
        stacked = job.model.experts / lay.expert if matrix.routed else 1.0
        once = sum(gemm_seconds(chip, m, n, k, dtype, count=stacked) for m, n, k in gemms(matrix))
        numel = stacked * matrix.shape[-2] * matrix.shape[-1]
        # The norm, the division by it, and the casts both ways.
        moved = numel * (3 * item + (2 * (item + held) if item < held else 0.0))
        # Keys and values of fewer heads than tensor ranks are not cut, but count as if they were.
        cut = lay.expert_tensor if matrix.routed else matrix.tensor_dim is not None
        ranks, stride = (expert_zero, lay.tensor * lay.expert) if matrix.routed else (zero, lay.tensor)
        local = numel * held / (lay.tensor if cut else 1.0)
        tensor = collective_seconds(cluster, "all_gather", numel * held, *span(job, "tensor")) if cut else 0.0
        found = MuonSeconds(
            found.gemms + NEWTON_SCHULZ_ITERATIONS * once,
            found.elementwise + memory_seconds(chip, moved),
            found.launches + LAUNCHES,
            found.gather_zero + collective_seconds(cluster, "all_gather", local, ranks, stride),
            found.gather_tensor + tensor,
        )
    return found


def update_bytes(planned: PlannedRank) -> int:
    """Peak temporary bytes while one parameter is updated: its slices while they are joined, or the full matrix beside the tensors
    of an iteration."""
    peak, held, tensor = 0, planned.high_width, planned.size("tensor")
    item = 2 if planned.fused and held == 4 and not planned.run.layout.offload else held
    for parameter in {p for _, p in planned.parameters(outer=False) if p.entry.is_layer_matrix}:
        local, whole = parameter.numel, list(parameter.shape)
        ranks, _ = planned.sharding(parameter)
        if ranks > 1:  # a shard, its padded copy, the shards of all ranks, and the slice made of them
            peak = max(peak, ((2 + ranks) * parameter.shard_numel(ranks) + local) * held)
        if parameter.tensor_dim is not None:
            whole[parameter.tensor_dim] *= tensor
            peak = max(peak, 2 * (local + prod(whole)) * held)
        short, long = sorted(whole[-2:])
        numel, square = prod(whole), prod(whole) // long * short
        cast_back = numel * (item + held) if item < held else 0
        peak = max(peak, numel * held + max(2 * (numel + square) * item, cast_back))
    return peak


def gathered_matrices(wire: Wire) -> None:
    """`train/optimizers/optimizer.py`: all-gathers of every matrix of the layers, first its ZeRO shards, then its tensor slices."""
    planned = wire.planned
    for count, parameter in planned.parameters(outer=False):
        if not parameter.entry.is_layer_matrix:
            continue
        if planned.is_sharded:
            shard = parameter.shard_numel(planned.size(parameter.group))
            wire.all_gather(parameter.group, shard * planned.high_width, count)
        if parameter.tensor_dim is not None:
            wire.all_gather("tensor", parameter.numel * planned.high_width, count)
