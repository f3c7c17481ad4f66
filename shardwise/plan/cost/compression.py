"""The time that replicas take to exchange compressed gradients (`parallel/compress`): nothing overlaps with it. Sizes may be
arrays.

Of PowerSGD's factors only how many values there are for each of the gradients' is taken, by the widths of a layer's matrices;
`trainer/compression.py` has the bytes to the last one.
"""

from __future__ import annotations

import numpy as np

from shardwise.hardware import Collective, collective_seconds, memory_seconds
from shardwise.plan.cost.job import Job, Number
from shardwise.plan.cost.ops import span
from shardwise.run.compression import BITS, BLOCK, INDEX, block_bytes

PASSES = {"int8": 8.0, "fp8": 8.0, "int4": 8.0, "onebit": 14.0, "topk": 10.0, "powersgd": 8.0}
"""How often a gradient is read or written while it is compressed and added up, about; as written in `parallel/compress`."""


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
    else:
        m = job.model
        other = m.expert_ffn if m.experts else m.ffn / lay.tensor
        share = lay.compress_rank / m.hidden, lay.compress_rank / other
        seconds = sent("all_reduce", numel * share[0] * width) + sent("all_reduce", numel * share[1] * width)
    return (seconds + work) * (np.asarray(lay.replicate) > 1)
