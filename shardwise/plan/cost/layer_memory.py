"""What one layer saves for the backward pass of a microbatch, by its operations and what of it is recomputed."""

from __future__ import annotations

from typing import Any

from shardwise.plan.cost.job import Job
from shardwise.plan.cost.operations import layer, pieces
from shardwise.plan.cost.parameters import cast_copies, layer_parameters
from shardwise.plan.cost.passes import repeated, repeated_layers

Number = Any


def layer_activations(job: Job, *, routed: bool) -> tuple[Number, Number]:
    """Bytes one layer saves for the backward pass of one microbatch; and what its recomputation holds for a moment."""
    tally = layer(job, routed=routed)
    residual = pieces(job) * job.model.hidden * job.width
    whole = sum(entry.saved for entry in tally.entries)
    if job.layout.recompute == "none":
        return whole, 0.0
    if job.layout.recompute in ("full", "budget"):
        saved, recomputed = residual, whole
    elif job.layout.recompute == "attention" and job.stack.recompute_keeps:
        m, units = job.model, job.stack.recompute_keeps
        widths = units[0] * m.hidden + units[1] * m.kv_heads * m.head_dim + units[2] * m.ffn
        saved = job.rows / job.layout.tensor * widths * job.width
        recomputed = whole - saved
    else:
        saved = sum(entry.saved - repeated(job, entry) * (entry.saved - entry.kept) for entry in tally.entries)
        recomputed = whole - saved
    share = repeated_layers(job, tally)
    return share * saved + (1 - share) * whole, recomputed


def layer_saved(job: Job, *, routed: bool) -> float:
    """Bytes one layer without recomputation saves of a microbatch, with the copies of its weights that were cast for it."""
    cast = cast_copies(job, layer_parameters(job, routed=routed))
    return float(layer_activations(job, routed=routed)[0]) + float(cast)
