"""What one layer saves for the backward pass of a microbatch, by its operations and what of it is recomputed."""

from __future__ import annotations

from typing import Any

from shardwise.plan.cost.job import Job
from shardwise.plan.cost.operations import layer, residual_bytes
from shardwise.plan.cost.parameters import cast_copies, layer_parameters
from shardwise.plan.cost.passes import recomputed_layers, recomputed_share

Number = Any


def layer_activations(job: Job, *, routed: bool) -> tuple[Number, Number]:
    """Bytes one layer saves for the backward pass of one microbatch; and what its recomputation holds for a moment."""
    ops = layer(job, routed=routed)
    whole = sum(op.saved for op in ops)
    if job.layout.recompute == "none":
        return whole, 0.0
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
    """Bytes one layer without recomputation saves of a microbatch, with the copies of its weights that were cast for it."""
    cast = cast_copies(job, layer_parameters(job, routed=routed))
    return float(layer_activations(job, routed=routed)[0]) + float(cast)
