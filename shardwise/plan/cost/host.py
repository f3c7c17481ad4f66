"""Exact bytes that this project's trainer keeps in the host's memory and sends there: optimizer state and parameters in high
precision (`train/optimizers/host_adamw.py`). This is allowed only where one rank holds all parameters."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from shardwise.plan.cost.flops import counted_parameters
from shardwise.plan.cost.job import Job
from shardwise.run import ModelConfig
from shardwise.run.parameters import Parameter

IN_FLIGHT = 1 << 30
"""Bytes of gradients that may wait on the device for their transfer to the host; a higher limit would take more device memory."""
STEP_COUNT = 4
"""Bytes of the step count that AdamW keeps with every parameter."""
MOMENTS = 6
"""High-precision elements that an update moves for each parameter: the parameter and both moments, each read and written."""


class HostBytes(NamedTuple):
    """Bytes of one rank."""

    held: int
    """Held in the host's memory."""
    moments: int
    """Of those, both moments, which may be in files instead; an update reads and writes them."""
    device: int
    """Parameters on the device. Gradients of the same size go to the host each microbatch, and parameters come back each step."""
    updated: int
    """Read and written by the host in an update."""
    added: int
    """Read and written by the host to accumulate the gradients of a microbatch; 0 where a step has one microbatch."""
    largest: int
    """Bytes of the largest gradient."""


def device_width(entry: Parameter, width: int) -> int:
    """Bytes of an element of a parameter, and of its gradient, on a device whose optimizer runs on the host: the matrices of layers
    have the `width` of the compute dtype, the others are in high precision."""
    return width if entry.is_linear else max(4, width)


@cache
def host_bytes(model: ModelConfig, width: int, *, several: bool) -> HostBytes:
    """Bytes that the host holds and moves for one rank; `width`: of the compute dtype; `several` microbatches are accumulated."""
    held = moments = device = updated = added = largest = 0
    high = max(4, width)
    for count, entry in counted_parameters(model):
        numel, own = count * entry.numel, device_width(entry, width)
        held += numel * (3 * high + own + several * high) + count * STEP_COUNT
        moments += numel * 2 * high
        device += numel * own
        updated += numel * (MOMENTS * high + (high if several else own) + own)
        added += numel * (own + 2 * high) * several
        largest = max(largest, entry.numel * own)
    return HostBytes(held, moments, device, updated, added, largest)


def gradients_in_flight(moved: HostBytes) -> int:
    """Peak bytes of gradients on a device that sends them to the host."""
    return min(moved.device, IN_FLIGHT + moved.largest)


class Link(NamedTuple):
    """GB/s between a device and its host, of the host's own updates, and of its disk."""

    to_host: float
    to_device: float
    update: float
    disk: float


def link_of(job: Job) -> Link:
    """The measured rates, else the run's; `memory.update_gbs` takes precedence over a measurement."""
    profile, memory = job.cluster.profile, job.memory
    to_host = (profile.to_host_gbs if profile else 0.0) or job.host_gbs
    to_device = (profile.to_device_gbs if profile else 0.0) or job.host_gbs
    update = memory.update_gbs or (profile.host_update_gbs if profile else 0.0) or job.host_gbs
    disk = (profile.disk_gbs if profile else 0.0) or job.storage_gbs
    return Link(to_host, to_device, update, disk)
