"""Seconds to shard, replicate and update the parameters of a stage, before any overlap."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwise.hardware import Collective, collective_seconds, memory_seconds
from shardwise.plan.cost.compression import exchange_seconds, quantized_width, replica_seconds
from shardwise.plan.cost.job import Job, Number
from shardwise.plan.cost.ops import span
from shardwise.plan.cost.parameters import LocalNumel, ends_parameters, uncut_parameters, zero_groups
from shardwise.plan.time.copies import copy_seconds
from shardwise.plan.trainer.muon import seconds as muon_seconds

TENSORS = 8.0
"""Matrices and vectors of a layer, where each is a message of its own."""


class DataSeconds(NamedTuple):
    """Seconds of data-parallel traffic and of the optimizer for the parameters of one stage, before the fitted constants."""

    forward: Number
    """In every microbatch: ZeRO-3's all-gathers."""
    backward: Number
    """Likewise, with the gradients' reduce-scatter where that is done every microbatch."""
    once: Number
    """Once a step: gradients."""
    gather_once: Number
    """Once a step: updated parameters."""
    optimizer: Number
    """Reading and writing the optimizer state."""
    muon_gemms: Number = 0.0
    muon_passes: Number = 0.0
    muon_launches: Number = 0.0
    muon_shards: Number = 0.0
    muon_parts: Number = 0.0
    """Of Muon: the fields of `MuonSeconds`, in order."""
    apart: Number = 0.0
    """Once a step, after the passes: what replicas exchange where PyTorch's wrappers do not all-reduce it."""
    mirrored: Number = 0.0
    """Likewise: gradients of two pipeline ranks that hold the same stages."""
    uncut: Number = 0.0
    """Likewise: gradients of parameters that the tensor axis does not cut, summed over its ranks (`parallel/gradients.py`)."""
    tied: Number = 0.0
    """Likewise: the gradient of a tied embedding, summed over the first and the last stage; negative on the last, so that the two
    cancel on a rank that holds both and sends nothing."""
    copied_forward: Number = 0.0
    copied_backward: Number = 0.0
    copied_once: Number = 0.0
    copied_several: Number = 0.0
    """Of `fully_shard`'s casts, copies and sums: the fields of `CopySeconds`, in order."""


def data_seconds(
    job: Job, held: LocalNumel, layers: tuple[Number, Number], ends: tuple[Number, Number] = (0.0, 0.0)
) -> DataSeconds:
    """Seconds of traffic to shard and replicate the parameters of a stage with this many dense and MoE layers, before any overlap;
    and seconds to update them. `ends`: whether it has the embedding, and whether the head."""
    lay, framework, cluster = job.layout, job.framework, job.cluster
    zero, expert_zero = zero_groups(job)

    # A message for each layer and one for the ends: many ranks that gather small layers wait for the latency of each.
    messages = (layers[0] + layers[1] + 1.0) * (TENSORS if framework.tensors_apart else 1.0)

    def sharded(
        kind: Collective,
        width: float,
        ranks: Number = zero,
        of_experts: Number = expert_zero,
        dense: Number = held.dense,
    ) -> Number:
        """Seconds of a collective over the ranks of a ZeRO group, for dense and for expert parameters."""
        seconds = messages * collective_seconds(cluster, kind, dense * width / messages, ranks, lay.tensor)
        if job.model.experts:
            stride, size = lay.tensor * lay.expert, held.experts * width / messages
            seconds = seconds + messages * collective_seconds(cluster, kind, size, of_experts, stride)
        return seconds

    own = held.dense / zero + held.experts / expert_zero
    learned, reduced = job.learned, framework.reduce_bytes * job.learned
    apart = exchange_seconds(job, own * learned)
    mirrored = mirror_seconds(job, own * learned * max(4.0, job.width))
    replicas = replica_seconds(job, own * reduced)
    width = quantized_width(lay.compress_weights, job.gathered_bytes)
    gather = sharded("all_gather", width)
    if lay.compress_shards == "none":
        scatter = sharded("reduce_scatter", reduced)
        if np.any(job.exchanges_gradients):
            sent = sharded("all_to_all", framework.gather_bytes * learned)
            scatter = np.where(job.exchanges_gradients, sent, scatter)
    else:
        scatter = sharded("all_to_all", quantized_width(lay.compress_shards, 0.0) * learned)
    update = memory_seconds(cluster.chip, own * learned * framework.update_bytes), *muon_seconds(job, *layers)
    every = scatter if job.reduces_each_microbatch else 0.0 * scatter
    once = replicas + scatter - every
    beside = apart, mirrored, *partial_seconds(job, layers, ends), *copy_seconds(job, held, messages)
    if lay.gathers_each_pass:
        few, same = lay.secondary_shard, lay.expert_secondary_shard
        ranks = few, same * (same > 1) + expert_zero * (same <= 1)
        again = held.dense - gathered_once(job, ends)
        if few > 1:
            near = sharded("all_gather", job.gathered_bytes, *ranks, dense=again)
        else:
            near = sharded("all_gather", width, dense=again)
        return DataSeconds(gather, near + every, once, 0.0 * gather, *update, *beside)
    return DataSeconds(0.0 * gather, every, once, gather, *update, *beside)


def gathered_once(job: Job, ends: tuple[Number, Number]) -> Number:
    """Parameters that ZeRO-3 gathers for the forward pass alone: without a pipeline those outside of the layers
    (`parallel/shard.py`), which stay gathered until the backward pass or are not read in it."""
    if job.framework.family != "shardwise" or job.layout.pipeline > 1:
        return 0.0
    first, last = ends_parameters(job)
    return ends[0] * first + ends[1] * last * (not job.model.tied_embeddings)


def mirror_seconds(job: Job, size: Number) -> Number:
    """Seconds in which two pipeline ranks that hold the same stages all-reduce this many bytes of gradients; 0 where none do."""
    return 0.0 * size if job.layout.directions == 1 else _between_ends(job, size)


def partial_seconds(job: Job, layers: tuple[Number, Number], ends: tuple[Number, Number]) -> tuple[Number, Number]:
    """Seconds in which this trainer sums gradients that are partial on several ranks: `uncut` and `tied` of `DataSeconds`."""
    if job.framework.family != "shardwise":
        return 0.0, 0.0
    width, (zero, expert_zero) = max(4.0, job.width) * job.learned, zero_groups(job)
    uncut = uncut_parameters(job, layers, ends)
    size = (uncut.dense / zero + uncut.experts / expert_zero) * width
    whole = collective_seconds(job.cluster, "all_reduce", size, *span(job, "tensor"))
    if not job.model.tied_embeddings or job.adapter.used or job.layout.pipeline == 1:
        return whole, 0.0
    matrix = job.model.head_rows * job.model.hidden / job.layout.tensor / zero * width
    return whole, (ends[0] - ends[1]) * _between_ends(job, matrix)


def _between_ends(job: Job, size: Number) -> Number:
    """Seconds in which two pipeline ranks all-reduce this many bytes. Those at the two ends are the farthest apart."""
    ranks, stride = span(job, "pipeline")
    return collective_seconds(job.cluster, "all_reduce", size, 2, stride * (ranks - 1))
