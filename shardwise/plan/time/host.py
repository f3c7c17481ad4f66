"""The time of the host's work for a device: it holds the optimizer state and updates it (`train/optimizers/host_adamw.py`).

Gradients leave the device during the backward pass. The update begins when that has ended and goes through the layers in forward
order, and the next forward pass follows it layer by layer: the slower of the two sets the pace, and the other is late by a layer.
"""

from __future__ import annotations

from shardwise.plan.cost.host import host_bytes, link_of
from shardwise.plan.cost.job import Job
from shardwise.plan.cost.passes import Passes


def exposed_update(job: Job, own: Passes) -> float:
    """Seconds of a step that the device waits for the host, given the passes of a microbatch."""
    link, many, memory = link_of(job), job.microbatches, job.memory
    moved = host_bytes(job.model, int(job.width), several=many > 1)
    backward = float(own.backward_input + own.backward_weight)
    leaves = max(moved.device / link.to_host, moved.added / link.update) / 1e9
    late = max(many * (leaves - backward), 0.0)
    update = max(moved.updated / link.update, moved.device / link.to_device) / 1e9
    if memory.on_disk:  # moments are read and written
        update = max(update, 2 * moved.moments / link.disk / 1e9)
    forward, layers = float(own.forward), job.model.layers
    return late + max(update + forward / layers, forward + update / layers) - forward
