"""Memory of each pipeline rank at its fullest moment, by owner.

Parameters, gradients and optimizer follow from what ZeRO shares; activations are what the operations keep for the backward
pass, times the microbatches in flight, which are counted on the schedule's own list. For a layer of GPT with dropout and
unfused attention that is the 34 + 5 heads x sequence / hidden bytes a token and hidden unit of Korthikanti et al. (2022).
These are the quick formulas, for any stack and for many layouts at once; the plan of a run of this project's trainer takes what
`held.py` knows to the byte.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shardwise.ledger import Memory
from shardwise.plan.cost.job import Job
from shardwise.plan.cost.layer_memory import layer_activations
from shardwise.plan.cost.operations import chunked_share, embedding
from shardwise.plan.cost.parameters import LocalNumel, cast_copies, layer_parameters, stage_parameters, zero_groups
from shardwise.plan.time.step import layers_by_stage, played
from shardwise.run.derive import CHUNK_BYTES
from shardwise.schedules import high_water
from shardwise.schedules.rounds import cached_schedule

Number = Any
GIB = 2.0**30


def _embedding_activations(job: Job) -> Number:
    return sum(entry.saved for entry in embedding(job).entries)


def states(job: Job, held: LocalNumel) -> dict[str, Number]:
    """Parameters, gradients and optimizer of a rank that holds these parameters before sharing."""
    stack, stage = job.stack, job.layout.zero
    zero, expert_zero = zero_groups(job)
    whole = held.dense + held.experts
    shared = held.dense / zero + held.experts / expert_zero
    # A program that holds master copies apart keeps whole 16-bit parameters beside them; one that casts when it gathers
    # holds shares, and its whole copies are `gathered`.
    casts = stack.parameter_bytes > stack.gather_bytes
    parameters = shared if casts or stage == 3 else whole
    if job.layout.offload:  # they stand in the host's memory
        return {
            "parameters": 0.0,
            "gradients": 0.0,
            "optimizer": 0.0,
            "gathered": whole * stack.gather_bytes * (stage < 3),
        }
    return {
        "parameters": parameters * stack.parameter_bytes,
        "gradients": (shared if stage >= 2 else whole) * stack.gradient_bytes,
        "optimizer": shared * stack.optimizer_bytes,
        "gathered": _whole_copies(job, whole, zero) if casts else 0.0,
    }


def _whole_copies(job: Job, whole: Number, zero: Number) -> Number:
    """Parameters whole in the dtype of the products, which stay gathered below ZeRO-3."""
    return whole * job.stack.gather_bytes * (zero > 1) * (job.layout.zero < 3)


def casts_kept(job: Job, recompute: str) -> float:
    """Which share of those stands at a time: all are kept for the backward pass, unless each layer is computed again."""
    return 1.0 / job.model.layers if recompute == "full" and job.layout.recompute_every == 1 else 1.0


def gathered_layers(job: Job, *, routed: bool) -> Number:
    """ZeRO-3: layers gathered at one time, and the whole gradient of the one that is being finished."""
    held = layer_parameters(job, routed=routed)
    whole = held.dense + held.experts
    return whole * (job.stack.gather_bytes * (1 + job.layout.prefetch) + job.stack.reduce_bytes) * (job.zero_ranks > 1)


def buffers(job: Job) -> Number:
    """Receive and send buffers of tensor, context and pipeline traffic."""
    stream = job.rows * job.model.hidden * job.width
    lay = job.layout
    exchanged = stream * (2.0 * (lay.tensor > 1) + 2.0 * (lay.pipeline > 1) / lay.tensor + 2.0 * (lay.context > 1))
    return exchanged + job.stack.bucket_bytes


def loss_bytes(job: Job) -> Number:
    """What the loss holds at its fullest: the scores and what is made of them; in chunks some of them, and the gradients of
    the head and of its input."""
    columns = job.model.vocab / job.layout.tensor
    whole = job.rows * columns * job.stack.logits_kept
    gradients = columns * job.model.hidden * 4.0 + job.rows * job.model.hidden * job.width
    scores = job.rows * columns * job.width
    some = scores / np.ceil(scores / CHUNK_BYTES) + gradients
    return np.where(chunked_share(job), some, whole)


def memory(job: Job) -> Memory:
    """Every pipeline rank of one layout."""
    lay = job.layout
    layers = layers_by_stage(job)
    held = stage_parameters(job, layers)  # type: ignore[arg-type]
    routed = bool(job.model.experts)
    dense_kept, dense_again = (
        layer_activations(job, routed=False) if not routed or job.model.dense_layers else (0.0, 0.0)
    )
    mixed_kept, mixed_again = layer_activations(job, routed=True) if routed else (0.0, 0.0)
    whole = [float(d * dense_kept + r * mixed_kept) for d, r in layers]
    whole[0] += float(_embedding_activations(job))
    microbatches = max(1, round(float(job.accumulation)))
    if lay.pipeline > 1:
        count = played(job, microbatches)[0]
        schedule = cached_schedule(lay.schedule, lay.pipeline, count, lay.stages_per_rank)
        placement = schedule.placement
        peaks = high_water(schedule, whole)
        if lay.schedule in ("gpipe", "breadth-first"):  # these hold every microbatch, also those that are not played
            peaks = tuple(peak * microbatches / count for peak in peaks)
    else:
        placement, peaks = (0,) * len(layers), (sum(whole),)
    last = len(layers) - 1
    again = max(float(dense_again), float(mixed_again))
    ranks = []
    for rank in range(lay.pipeline):
        mine = [n for n, home in enumerate(placement) if home == rank]
        own = LocalNumel(sum(held[n].dense for n in mine), sum(held[n].experts for n in mine))
        owners = {name: float(value) for name, value in states(job, own).items()}
        owners["gathered"] += float(cast_copies(job, own)) * casts_kept(job, lay.recompute)
        owners["activations"] = peaks[rank] + again
        owners["logits"] = 0.0
        if last in mine:
            owners["logits"] = float(loss_bytes(job))
        if lay.zero == 3:
            owners["gathered"] += float(gathered_layers(job, routed=routed))
        owners["buffers"] = float(buffers(job))
        moving = owners["activations"] + owners["logits"] + owners["gathered"] + owners["buffers"]
        owners["workspace"] = job.stack.context_gib * GIB + job.stack.fragmentation * moving
        ranks.append(owners)
    return Memory(tuple(ranks), float(job.cluster.chip.memory) * (1.0 - job.headroom))
