"""What this project's trainer keeps in the host's memory, and what travels there, to the byte: optimizer states and parameters in
high precision (`train/optimizers/host_adamw.py`). One rank holds all parameters where that is allowed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from shardwise.plan.cost.job import Job
from shardwise.run import ModelConfig
from shardwise.run.parameters import Parameter, first_parameters, last_parameters, layer_parameters

IN_FLIGHT = 1 << 30
"""Bytes of gradients that may wait on the device for their way to the host; more would be more memory there."""
STEP_COUNT = 4
"""Bytes of the count of steps that AdamW keeps with every parameter."""
MOMENTS = 6
"""Elements in high precision that an update reads and writes: the parameter and both moments, each twice."""


class HostBytes(NamedTuple):
    """Of one rank."""

    held: int
    """In the host's memory."""
    moments: int
    """Of those, both moments, which may be in files instead; an update reads and writes them."""
    device: int
    """In the device's, of parameters; as many of gradients travel to the host in a microbatch, and of parameters back in a step."""
    updated: int
    """Read and written by the host in an update."""
    added: int
    """Read and written by the host to add up the gradients of a microbatch; 0 where a step has one."""
    largest: int
    """Bytes of the largest gradient."""


def device_width(entry: Parameter, width: int) -> int:
    """Bytes of an element of a parameter, and of its gradient, on a device whose optimizer is the host's: the matrices of layers
    have the `width` of the arithmetic, the others are in high precision."""
    return width if entry.is_linear else max(4, width)


def _entries(model: ModelConfig) -> Iterator[tuple[int, Parameter]]:
    for moe, layers in ((False, model.layers - model.moe_layers), (True, model.moe_layers)):
        if layers:
            yield from ((layers, entry) for entry in layer_parameters(model, moe))
    yield from ((1, entry) for entry in (*first_parameters(model), *last_parameters(model)))


@cache
def host_bytes(model: ModelConfig, width: int, *, several: bool) -> HostBytes:
    """What the host holds and moves for one rank, in arithmetic of so many bytes; with `several` microbatches it adds them up."""
    held = moments = device = updated = added = largest = 0
    high = max(4, width)
    for count, entry in _entries(model):
        numel, own = count * entry.numel, device_width(entry, width)
        held += numel * (3 * high + own + several * high) + count * STEP_COUNT
        moments += numel * 2 * high
        device += numel * own
        updated += numel * (MOMENTS * high + (high if several else own) + own)
        added += numel * (own + 2 * high) * several
        largest = max(largest, entry.numel * own)
    return HostBytes(held, moments, device, updated, added, largest)


def gradients_in_flight(moved: HostBytes) -> int:
    """Peak bytes of gradients on a device that gives them to the host."""
    return min(moved.device, IN_FLIGHT + moved.largest)


class Link(NamedTuple):
    """GB/s between a device and its host, of the host's own updates, and of its disk."""

    to_host: float
    to_device: float
    update: float
    disk: float


def link_of(job: Job) -> Link:
    """What was measured; else what the run says."""
    profile, memory = job.cluster.profile, job.memory
    to_host = (profile.to_host_gbs if profile else 0.0) or job.host_gbs
    to_device = (profile.to_device_gbs if profile else 0.0) or job.host_gbs
    update = memory.update_gbs or (profile.host_update_gbs if profile else 0.0) or job.host_gbs
    disk = (profile.disk_gbs if profile else 0.0) or job.storage_gbs
    return Link(to_host, to_device, update, disk)
