"""The time that replicas take to exchange compressed gradients (`parallel/compress`), or what they learned once in a while
(`parallel/outer.py`), in the mean of a step: nothing overlaps with it unless that is asked for. Sizes may be arrays.

Of PowerSGD's factors only how many values there are for each of the gradients' is taken, by the widths of a layer's matrices;
`trainer/compression.py` has the bytes to the last one.
"""

from __future__ import annotations

import numpy as np

from shardwise.hardware import Collective, collective_seconds, memory_seconds
from shardwise.plan.cost.job import Job, Number
from shardwise.plan.cost.ops import span
from shardwise.run.compression import BITS, BLOCK, INDEX, block_bytes
from shardwise.run.coordinates import group_span

FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20
"""Bytes after which DistributedDataParallel closes a bucket."""
SUM = 8
"""Bytes of the loss, the squared norm, the count of tokens and the wish to stop, which are float64."""
PASSES = {"none": 9.0, "int8": 8.0, "fp8": 8.0, "int4": 8.0, "onebit": 14.0, "topk": 10.0, "powersgd": 8.0}
"""How often a gradient is read or written while it is compressed and added up, about; as written in `parallel/compress`, and with
"none" what is exchanged once in a while, as in `parallel/outer.py`."""


def replica_seconds(job: Job, size: Number) -> Number:
    """Seconds of the all-reduce of so many bytes of gradients over replicas that PyTorch's wrappers add up. Where machines are far
    apart each message counts, and there is one for each of DistributedDataParallel's buckets."""
    if job.layout.replicas_apart:
        return 0.0 * size
    seconds = collective_seconds(job.cluster, "all_reduce", size, *span(job, "replicate"))
    if not job.cluster.far:
        return seconds
    more = np.ceil(np.maximum(size - FIRST_BUCKET, 0.0) / BUCKET)
    return seconds + more * collective_seconds(job.cluster, "all_reduce", 1.0, *span(job, "replicate"))


def exchange_seconds(job: Job, numel: Number) -> Number:
    """Seconds of the exchange of so many gradients of a rank; 0 where replicas do not compress."""
    lay, width = job.layout, max(4.0, job.width)
    if not lay.replicas_apart:
        return 0.0 * numel

    def sent(kind: Collective, size: Number) -> Number:
        return collective_seconds(job.cluster, kind, size, *span(job, "replicate"))

    work = memory_seconds(job.cluster.chip, numel * width * PASSES[lay.compress])
    if lay.compress in BITS:
        size = numel * (block_bytes(lay.compress) / BLOCK)
        seconds = sent("all_to_all", size) + sent("all_gather", size)
    elif lay.compress == "topk":
        count = numel * lay.compress_density * lay.replicate
        seconds = sent("all_gather", count * width) + sent("all_gather", count * INDEX)
    elif lay.compress == "powersgd":
        m = job.model
        other = m.expert_ffn if m.experts else m.ffn / lay.tensor
        share = lay.compress_rank / m.hidden, lay.compress_rank / other
        seconds = sent("all_reduce", numel * share[0] * width) + sent("all_reduce", numel * share[1] * width)
        seconds = seconds + sent("all_reduce", m.layers * m.hidden * width)  # vectors, as they are
    else:
        seconds = sent("all_reduce", numel * width)
    if lay.sync_every > 1:
        seconds = seconds + sent("all_reduce", SUM)  # the wish to stop
    return (seconds + work) * (np.asarray(lay.replicate) > 1) / lay.sync_every


def agreement_seconds(job: Job) -> Number:
    """Seconds that ranks wait to learn of each other's loss and norm, where their machines are far apart; elsewhere they are among
    what does not scale with the work. Replicas that rarely speak do not wait for each other."""
    lay = job.layout
    if not job.cluster.far:
        return 0.0
    group = "replica" if lay.sync_every > 1 else "world"
    return collective_seconds(job.cluster, "all_reduce", 2 * SUM, *group_span(lay, group))


def quantized_width(method: str, plain: float) -> float:
    """Bytes of a value between shards, in the mean."""
    return plain if method == "none" else block_bytes(method) / BLOCK


def hidden_seconds(job: Job, passes: Number) -> Number:
    """Of such an exchange, seconds of a step that training may go on for meanwhile, where the passes of a microbatch take so long:
    those of `sync_overlap` steps for each fragment, in the mean of all steps."""
    lay = job.layout
    if not lay.sync_overlap:
        return 0.0 * passes
    # A search that has not settled the microbatch counts one of them: it hides less.
    many = job.accumulation if np.all(job.microbatch) else 1.0
    return many * passes * lay.sync_fragments * lay.sync_overlap / lay.sync_every
