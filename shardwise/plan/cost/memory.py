"""Memory of each pipeline rank at its peak, by owner: quick formulas for any framework, and for many layouts at once.

Parameters, gradients and optimizer state follow from what ZeRO shards. Activations are the saved tensors of the ops, times the
microbatches in flight, which are counted on the schedule's own action list. For a GPT layer with dropout and unfused attention that
is the 34 + 5 heads x sequence / hidden bytes a token and hidden unit of Korthikanti et al. (2022). For a run of this project's
trainer, `trainer/memory.py` replaces the estimates by exact bytes where these are known.
"""

from __future__ import annotations

import numpy as np

from shardwise.ledger import Memory
from shardwise.plan.cost.job import GIB, Job, Number
from shardwise.plan.cost.operations import embedding, layer, residual_bytes
from shardwise.plan.cost.parameters import LocalNumel, cast_copies, layer_parameters, stage_parameters, zero_groups
from shardwise.plan.cost.passes import recomputed_layers, recomputed_share
from shardwise.plan.cost.rematerialization import within_budget
from shardwise.run.axes import HOLDS_ALL
from shardwise.run.compression import values_kept
from shardwise.schedules import cached_schedule, peak_activations, rounds_to_play, versions_kept


def states(job: Job, held: LocalNumel) -> dict[str, Number]:
    """Bytes of parameters, gradients and optimizer state of a rank that holds these parameters before ZeRO shards them."""
    framework, stage, between = job.framework, job.layout.zero, not job.layout.gathers_each_pass
    zero, expert_zero = zero_groups(job)
    whole, sharded = held.total, held.dense / zero + held.experts / expert_zero
    if job.layout.offload:  # they are in the host's memory
        gathered = whole * framework.gather_bytes * between
        return {"parameters": 0.0, "gradients": 0.0, "optimizer": 0.0, "gathered": gathered}
    if job.memory.hosts_optimizer:  # the layers' matrices in 16 bits; the other parameters are few
        return {"parameters": whole * job.width, "gradients": 0.0, "optimizer": 0.0, "gathered": 0.0}
    # A framework with master copies keeps full 16-bit parameters beside them. One that casts in the all-gather holds
    # shards; its full copies are `gathered`, and below ZeRO-3 they stay.
    casts = framework.parameter_bytes > framework.gather_bytes
    learned, lay = job.learned, job.layout
    values = 2 if lay.sync_every > 1 else values_kept(lay.compress, lay.compress_momentum)
    unsent = values * (lay.replicate > 1) * framework.gradient_bytes
    frozen = job.frozen_bytes
    return {
        "parameters": (whole if between and not casts else sharded) * (framework.parameter_bytes * learned + frozen),
        "gradients": (sharded if stage >= 2 else whole) * framework.gradient_bytes * learned,
        "optimizer": sharded * (framework.optimizer_bytes + unsent) * learned,
        "gathered": whole * framework.gather_bytes * (zero > 1) * between if casts else 0.0,
    }


def standing_casts(job: Job, recompute: str) -> float:
    """The share of the cast weights that is held at a time: all until the backward pass, unless every layer is recomputed."""
    return 1.0 / job.model.layers if recompute == "full" and job.layout.recompute_every == 1 else 1.0


def gathered_layers(job: Job) -> Number:
    """ZeRO-3: bytes of the layers gathered at one time, and of the unsharded gradient of the layer that is ending. The experts'
    gradients are reduced before the layer's others, not beside them, and when the tensors that the experts saved are freed."""
    gathered = (1 + job.layout.prefetch) * gathered_layer(job)
    if not job.model.experts or job.framework.family != "shardwise":
        return gathered + reduced_layer(job)
    m, (dense, experts) = job.model, _sharded_numels(job)
    each = job.framework.reduce_bytes * job.learned
    freed = job.rows / job.layout.tensor * m.experts_per_token * (m.hidden + (2.0 + m.gated) * m.expert_ffn) * job.width
    return gathered + np.maximum(dense * each, experts * each - freed)


def gathered_layer(job: Job) -> Number:
    """Bytes of one of them. The buffer of the last all-gather stays, also where no layer is at work."""
    return sum(_sharded_numels(job)) * job.framework.gather_bytes


def reduced_layer(job: Job) -> Number:
    """ZeRO-2 and 3: bytes of the unsharded gradient of the layer that is ending, as it is reduced."""
    return sum(_sharded_numels(job)) * job.framework.reduce_bytes * job.learned


def _sharded_numels(job: Job) -> tuple[Number, Number]:
    """Elements of a layer that other ranks have shards of, without the experts, and of the experts; those that one rank holds whole
    are not among them."""
    held, (zero, expert_zero) = layer_parameters(job, routed=bool(job.model.experts)), zero_groups(job)
    return held.dense * (zero > 1), held.experts * (expert_zero > 1)


def buffers(job: Job) -> Number:
    """Send and receive buffers of tensor, context and pipeline traffic."""
    residual, lay = job.rows * job.model.hidden * job.width, job.layout
    messages = residual * (2.0 * (lay.tensor > 1) + 2.0 * (lay.pipeline > 1) / lay.tensor + 2.0 * (lay.context > 1))
    return messages + job.framework.bucket_bytes


def loss_bytes(job: Job) -> Number:
    """Bytes that the loss holds at its peak: the logits and the tensors made from them; of a chunked loss one chunk of logits, and
    the gradients of the head and of its input."""
    columns = job.model.head_rows / job.layout.tensor
    whole = job.rows * columns * job.framework.logit_bytes
    matrix = 0.0 if job.adapter.used else columns * job.model.hidden * 4.0
    gradients = matrix + job.rows * job.model.hidden * job.width
    logits = job.rows * columns * job.width
    chunk = logits / np.ceil(logits / job.chunk_bytes) + gradients
    return chunk if job.framework.chunked_loss else whole


def workspace(job: Job, owners: dict[str, float]) -> float:
    """Bytes of the device context, and those that the allocator wastes, as a share of the bytes that come and go within a step."""
    moving = owners["activations"] + owners["logits"] + owners["gathered"] + owners["buffers"]
    return job.framework.context_gib * GIB + job.framework.fragmentation * moving


def memory(job: Job) -> Memory:
    """The memory of every pipeline rank of one layout."""
    lay, layers, routed = job.layout, job.stage_layers, bool(job.model.experts)
    held = stage_parameters(job, layers)  # type: ignore[arg-type]
    nothing = (0.0, 0.0)
    dense = layer_activations(job, routed=False) if not routed or job.model.dense_layers else nothing
    moe = layer_activations(job, routed=True) if routed else nothing
    saved = [float(d * dense[0] + r * moe[0]) for d, r in layers]
    for n in range(len(layers)):
        if lay.has_ends(n)[0]:
            saved[n] += float(sum(op.saved for op in embedding(job)))
    if lay.pipeline > 1:
        count, _ = rounds_to_play(lay.pipeline, job.microbatches)
        schedule = cached_schedule(lay.schedule, lay.pipeline, count, lay.stages_per_rank)
        placement, peaks = schedule.placement, peak_activations(schedule, saved)
        if lay.schedule in HOLDS_ALL:  # these hold every microbatch, also the unplayed ones
            peaks = tuple(peak * job.microbatches / count for peak in peaks)
    else:
        placement, peaks = (0,) * len(layers), (sum(saved),)
    recomputed = max(float(dense[1]), float(moe[1]))
    ranks = []
    for rank in range(lay.pipeline):
        mine = [n for n, home in enumerate(placement) if home == rank]
        own = LocalNumel(sum(held[n].dense for n in mine), sum(held[n].experts for n in mine))
        owners = {name: float(value) for name, value in states(job, own).items()}
        if lay.asynchronous:
            behind = lay.pipeline - 1 - rank
            owners["parameters"] *= 1 + versions_kept(lay.schedule, behind, job.microbatches)
        owners["gathered"] += float(cast_copies(job, own)) * standing_casts(job, lay.recompute)
        owners["activations"] = peaks[rank] + recomputed
        owners["logits"] = float(loss_bytes(job)) if any(lay.has_ends(n)[1] for n in mine) else 0.0
        if lay.gathers_each_pass:
            owners["gathered"] += float(gathered_layers(job))
        owners["buffers"] = float(buffers(job))
        owners["workspace"] = workspace(job, owners)
        ranks.append(owners)
    return Memory(tuple(ranks), float(job.cluster.chip.memory) * (1.0 - job.headroom))


def layer_activations(job: Job, *, routed: bool) -> tuple[Number, Number]:
    """Bytes that one layer saves for the backward pass of one microbatch; and temporary bytes of its recomputation."""
    ops = layer(job, routed=routed)
    whole = sum(op.saved for op in ops)
    if job.layout.recompute == "none" and not job.memory.swaps:
        return whole, 0.0
    if job.layout.recompute == "optimal" or job.memory.swaps:
        taken = within_budget(job, ops, float(whole + cast_copies(job, layer_parameters(job, routed=routed))))
        return whole - sum(c.spared for c in taken) / len(taken), max(c.spared for c in taken)
    if job.layout.recompute in ("full", "budget"):
        saved, recomputed = residual_bytes(job), whole
    elif job.layout.recompute == "attention" and job.framework.recompute_saves:
        m, units = job.model, job.framework.recompute_saves
        widths = units[0] * m.hidden + units[1] * m.kv_heads * m.head_dim + units[2] * m.ffn
        saved = job.rows / job.layout.tensor * widths * job.width
        recomputed = whole - saved
    else:
        saved = sum(op.saved - recomputed_share(job, op) * (op.saved - op.saved_inputs) for op in ops)
        recomputed = whole - saved
    share = recomputed_layers(job, ops)
    return share * saved + (1 - share) * whole, recomputed


def layer_saved(job: Job, *, routed: bool) -> float:
    """Bytes that one layer without recomputation saves for a microbatch, including the cast copies of its weights."""
    cast = cast_copies(job, layer_parameters(job, routed=routed))
    return float(layer_activations(job, routed=routed)[0]) + float(cast)
