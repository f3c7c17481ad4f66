"""What Muon's orthogonalisation costs: every matrix inside of the layers, brought together from its parts, goes through the
Newton-Schulz iteration of `train/optimizer.py` whole, on every rank that holds a part of it. Only different experts are different
matrices, which stay with their ranks. With s and l a matrix's shorter and longer side, each of the 5 iterations takes

    x xᵀ        s x s from l        its square   s x s from s        times x   s x l from s        in all 4 s s l + 2 s s s

operations, whatever the layout: ranks that share a matrix all compute it alike.
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any, NamedTuple

from shardwise.hardware import collective_seconds, gemm_seconds, memory_seconds
from shardwise.plan.cost.job import BYTES, Job
from shardwise.plan.cost.ops import span
from shardwise.plan.cost.parameters import zero_groups
from shardwise.plan.trainer.rank import Place, Weight
from shardwise.run import ModelConfig, Run

Number = Any
ITERATIONS = 5
"""Of the quintic, as Jordan et al. (2024) apply it; the trainer reads it here."""
LAUNCHES = 7.0
"""Of a matrix, in those of the network: some 25 bare kernels, each a quarter of one that autograd and modules stand around."""


@cache
def layer_matrices(model: ModelConfig, routed: bool) -> tuple[Weight, ...]:
    """The matrices of one layer as they are when nothing is cut, experts stacked."""
    return tuple(w for w in Place(Run(model=model), 0).layer_weights(routed) if len(w.shape) > 1)


def products(matrix: Weight) -> tuple[tuple[int, int, int], ...]:
    """Those of one iteration on one matrix: rows, columns and inner side."""
    short, long = sorted(matrix.shape[-2:])
    return (short, short, long), (short, short, short), (short, long, short)


def flops(place: Place) -> float:
    """Operations of a rank in one step."""
    model, total = place.run.model, 0
    for layer in (layer for stage in place.stages for layer in stage.layers):
        for matrix in layer_matrices(model, place.routed(layer)):
            stacked = model.experts // place.run.layout.expert if matrix.routed else 1
            total += stacked * ITERATIONS * sum(2 * m * n * k for m, n, k in products(matrix))
    return float(total)


class Orthogonalised(NamedTuple):
    """Seconds of a stage's matrices before the constants, once a step, and kernels launched."""

    products: Number = 0.0
    passes: Number = 0.0
    """What is read and written beside the products."""
    launches: Number = 0.0
    shards: Number = 0.0
    """Bringing the shards of ZeRO together."""
    parts: Number = 0.0
    """Then the parts of the tensor ranks."""


def seconds(job: Job, dense: Number, routed: Number) -> Orthogonalised:
    """Of so many layers; none where the optimizer is another."""
    if not job.muon:
        return Orthogonalised()
    kinds = [(dense, False), (routed, True)] if job.model.experts else [(dense, False)]
    layers = [(count, _layer(job, mixed)) for count, mixed in kinds]
    return Orthogonalised(*(sum(count * part[n] for count, part in layers) for n in range(len(Orthogonalised._fields))))


def arithmetic(job: Job) -> str:
    """The dtype that the trainer iterates in: that of the parameters, but bfloat16 on a GPU in the place of float32."""
    held = "float64" if job.dtype == "float64" else "float32"
    chip = job.cluster.chip
    return "bfloat16" if held == "float32" and chip.name != "cpu" and "bfloat16" in chip.peak else held


def _layer(job: Job, routed: bool) -> Orthogonalised:
    lay, chip, cluster, dtype = job.layout, job.cluster.chip, job.cluster, arithmetic(job)
    wide, item = max(4.0, BYTES[job.dtype]), BYTES[dtype]
    zero, expert_zero = zero_groups(job)
    found = Orthogonalised()
    for matrix in layer_matrices(job.model, routed):
        stacked = job.model.experts / lay.expert if matrix.routed else 1.0
        once = sum(gemm_seconds(chip, m, n, k, dtype, count=stacked) for m, n, k in products(matrix))
        numbers = stacked * matrix.shape[-2] * matrix.shape[-1]
        # The norm, the division by it, and the casts to and fro.
        moved = numbers * (3 * item + (2 * (item + wide) if item < wide else 0.0))
        # Keys and values of fewer heads than tensor ranks are not cut, but count as if they were.
        cut = lay.expert_tensor if matrix.routed else matrix.cut is not None
        ranks, stride = (expert_zero, lay.tensor * lay.expert) if matrix.routed else (zero, lay.tensor)
        part = numbers * wide / (lay.tensor if cut else 1.0)
        found = Orthogonalised(
            found.products + ITERATIONS * once,
            found.passes + memory_seconds(chip, moved),
            found.launches + LAUNCHES,
            found.shards + collective_seconds(cluster, "all_gather", part, ranks, stride),
            found.parts
            + (collective_seconds(cluster, "all_gather", numbers * wide, *span(job, "tensor")) if cut else 0.0),
        )
    return found


def held(place: Place) -> int:
    """The most bytes that updating one parameter holds for a moment, besides what stays: its parts while they are joined, or the
    whole beside the numbers of an iteration."""
    most, wide = 0, place.wide
    item = 2 if place.fused and wide == 4 and not place.run.layout.offload else wide
    for weight in {weight for _, weight in place.weights(outer=False) if len(weight.shape) > 1}:
        part, whole = weight.numbers, list(weight.shape)
        ranks = place.sizes["expert_shard" if weight.routed else "zero"] if place.shared else 1
        if ranks > 1:  # a shard, the same with padding, all of those, and the part made of them
            most = max(most, ((2 + ranks) * weight.shard(ranks) + part) * wide)
        if weight.cut is not None and place.sizes["tensor"] > 1:
            whole[weight.cut] *= place.sizes["tensor"]
            most = max(most, 2 * (part + prod(whole)) * wide)
        short, long = sorted(whole[-2:])
        numbers, square = prod(whole), prod(whole) // long * short
        cast_back = numbers * (item + wide) if item < wide else 0
        most = max(most, numbers * wide + max(2 * (numbers + square) * item, cast_back))
    return most
