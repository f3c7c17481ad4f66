"""Mean seconds a step that replicas take to exchange compressed gradients (`parallel/compress`), or weight changes once in
`sync_every` steps (`parallel/outer.py`). Nothing overlaps with it unless the layout asks for that. Sizes may be arrays.

The size of PowerSGD's factors is taken as a ratio to that of the gradients, from the widths of a layer's matrices;
`trainer/compression.py` has the exact bytes.
"""

from __future__ import annotations

import numpy as np

from shardwise.hardware import Collective, collective_seconds, memory_seconds
from shardwise.plan.cost.job import Job, Number
from shardwise.plan.cost.ops import span
from shardwise.run.compression import BITS, BLOCK, INDEX, block_bytes
from shardwise.run.ranks.coordinates import group_span

FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20
"""Bytes after which DistributedDataParallel closes a bucket."""
SUM = 8
"""Bytes each of the loss, the squared norm, the token count and the stop request, which are float64."""
PASSES = {"none": 9.0, "int8": 8.0, "fp8": 8.0, "int4": 8.0, "onebit": 14.0, "topk": 10.0, "powersgd": 8.0}
"""About how often a gradient is read or written while it is compressed and summed, as implemented in `parallel/compress`; "none" is
the uncompressed exchange of `parallel/outer.py`."""


def replica_seconds(job: Job, size: Number) -> Number:
    """Seconds of PyTorch's all-reduce of this many bytes of gradients over replicas. DistributedDataParallel sends them in buckets,
    several at a time: the latency of one is hidden by another."""
    if job.layout.replicas_apart:
        return 0.0 * size
    return collective_seconds(job.cluster, "all_reduce", size, *span(job, "replicate"))


def exchange_seconds(job: Job, numel: Number) -> Number:
    """Seconds to exchange this many gradients of a rank; 0 where PyTorch's wrappers all-reduce them instead."""
    lay, width = job.layout, max(4.0, job.width)
    if not lay.replicas_apart:
        return 0.0 * numel

    def sent(kind: Collective, size: Number) -> Number:
        return collective_seconds(job.cluster, kind, size, *span(job, "replicate"))

    work = memory_seconds(job.cluster.chip, numel * width * PASSES[lay.compress])
    if lay.compress in BITS:
        size = numel * (block_bytes(lay.compress) / BLOCK[lay.compress])
        seconds = sent("all_to_all", size) + sent("all_gather", size)
    elif lay.compress == "topk":
        count = numel * lay.compress_density * lay.replicate
        seconds = sent("all_gather", count * width) + sent("all_gather", count * INDEX)
    elif lay.compress == "powersgd":
        m = job.model
        other = m.expert_ffn if m.experts else m.ffn / lay.tensor
        share = lay.compress_rank / m.hidden, lay.compress_rank / other
        seconds = sent("all_reduce", numel * share[0] * width) + sent("all_reduce", numel * share[1] * width)
        seconds = seconds + sent("all_reduce", m.layers * m.hidden * width)  # vectors, uncompressed
    else:
        seconds = sent("all_reduce", numel * width)
    if lay.sync_every > 1:
        seconds = seconds + sent("all_reduce", SUM)  # the stop request
    return (seconds + work) * (np.asarray(lay.replicate) > 1) / lay.sync_every


def agreement_seconds(job: Job) -> Number:
    """Seconds that ranks wait for each other's loss and norm, where their machines are far apart; elsewhere this is part of the
    constant overhead of a step. Replicas that synchronize rarely do not wait for each other."""
    lay = job.layout
    if not job.cluster.far:
        return 0.0
    group = "replica" if lay.sync_every > 1 else "world"
    return collective_seconds(job.cluster, "all_reduce", 2 * SUM, *group_span(lay, group))


def quantized_width(method: str, plain: float) -> float:
    """Mean bytes of a value that is sent between ZeRO shards."""
    return plain if method == "none" else block_bytes(method) / BLOCK[method]


def hidden_seconds(job: Job, passes: Number) -> Number:
    """Mean seconds a step of such an exchange that training can hide, where the passes of a microbatch take `passes` seconds: those
    of `sync_overlap` steps for each fragment."""
    lay = job.layout
    if not lay.sync_overlap:
        return 0.0 * passes
    # A search that has not settled the size of a microbatch counts one microbatch, which hides less.
    many = job.accumulation if np.all(job.microbatch) else 1.0
    return many * passes * lay.sync_fragments * lay.sync_overlap / lay.sync_every
