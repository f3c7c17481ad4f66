"""The time in which ranks of a BPipe pipeline hand saved activations to their partners."""

from __future__ import annotations

from shardwise.hardware import collective_seconds
from shardwise.plan.cost.job import Job
from shardwise.plan.cost.memory import layer_activations
from shardwise.plan.cost.ops import span
from shardwise.plan.cost.parameters import cast_copies, stage_parameters


def handing_seconds(job: Job) -> float:
    """Seconds in which partners of BPipe hand over what a microbatch saved on the first stage, without what went on from it."""
    if job.layout.schedule != "bpipe" or job.layout.pipeline < 4:  # fewer ranks have nothing to even out
        return 0.0
    dense, moe = job.stage_layers[0]
    saved = dense * layer_activations(job, routed=False)[0] + (moe and moe * layer_activations(job, routed=True)[0])
    held = stage_parameters(job, job.stage_layers)[0]  # type: ignore[arg-type]
    size = max(float(saved) + float(cast_copies(job, held)) - float(job.pipeline_bytes), 0.0)
    return float(collective_seconds(job.cluster, "send", size, *span(job, "pipeline")))
