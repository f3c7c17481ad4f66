"""Traffic between two pipeline ranks beside the residual stream: saved activations of BPipe's partners, and gradients of ranks that
hold the same stages."""

from __future__ import annotations

from shardwise.hardware import collective_seconds
from shardwise.plan.cost.job import Job, Number
from shardwise.plan.cost.memory import layer_activations
from shardwise.plan.cost.ops import span
from shardwise.plan.cost.parameters import cast_copies, stage_parameters


def handing_seconds(job: Job) -> float:
    """Seconds in which BPipe's partners hand over a microbatch's saved tensors of the first stage, without its output."""
    if job.layout.schedule != "bpipe" or job.layout.pipeline < 4:  # fewer ranks have nothing to even out
        return 0.0
    dense, moe = job.stage_layers[0]
    saved = dense * layer_activations(job, routed=False)[0] + (moe and moe * layer_activations(job, routed=True)[0])
    held = stage_parameters(job, job.stage_layers)[0]  # type: ignore[arg-type]
    size = max(float(saved) + float(cast_copies(job, held)) - float(job.pipeline_bytes), 0.0)
    return float(collective_seconds(job.cluster, "send", size, *span(job, "pipeline")))


def mirror_seconds(job: Job, size: Number) -> Number:
    """Seconds in which two pipeline ranks that hold the same stages all-reduce this many bytes of gradients; 0 where none do. The
    ranks at the two ends are the farthest apart."""
    if job.layout.directions == 1:
        return 0.0 * size
    ranks, stride = span(job, "pipeline")
    return collective_seconds(job.cluster, "all_reduce", size, 2, stride * (ranks - 1))
