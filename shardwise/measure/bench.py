"""Measures this machine into a hardware profile: kernels, copies, what the host adds to a step, and collectives.

The seconds given are shared out over the kinds of points, so a slow machine has fewer points, not a longer wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

import torch

from shardwise.hardware import Profile
from shardwise.measure.bench_elementwise import elementwise_points
from shardwise.measure.bench_host import host_costs
from shardwise.measure.bench_kernels import (
    Allowance,
    Stopwatch,
    attention_points,
    dtypes_of,
    gemm_points,
    grouped_points,
    kernel_seconds,
    machine_name,
    memory_points,
)

Progress = Callable[[str, float], None]
"""Gets what is being measured, and which share of it is done."""

SHARES = {
    "products": 0.4,
    "grouped products": 0.1,
    "attention": 0.2,
    "memory": 0.1,
    "between products": 0.1,
    "training's host": 0.1,
}


def measure_kernels(
    device: torch.device, seconds: float, quick: bool = False, progress: Progress = lambda what, share: None
) -> Profile:
    """A profile of a device without its collectives."""
    torch.manual_seed(0)
    watch = Stopwatch(device, samples=3 if quick else 7)
    dtypes = dtypes_of(device)

    def allowance(kind: str) -> Allowance:
        return Allowance(SHARES[kind] * seconds, lambda share: progress(kind, share))

    profile = replace(
        described(device),
        kernel_seconds=kernel_seconds(device),
        memory=tuple(memory_points(watch, allowance("memory"), quick)),
        elementwise=tuple(elementwise_points(watch, allowance("between products"), quick)),
        gemm=tuple(gemm_points(watch, allowance("products"), dtypes, quick)),
        grouped=tuple(grouped_points(watch, allowance("grouped products"), dtypes, quick)),
        attention=tuple(attention_points(watch, allowance("attention"), dtypes, quick)),
    )
    progress("training's host", 0.0)
    if profile.chip:  # the planner counts a chip's kernels, so it has to know the chip
        profile = host_costs(device, profile, SHARES["training's host"] * seconds)
    progress("training's host", 1.0)
    return profile


def described(device: torch.device) -> Profile:
    """A profile that says what machine this is, and nothing yet of its speed."""
    machine, chip = machine_name(device)
    return Profile(
        machine=machine,
        chip=chip,
        torch=torch.__version__,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        threads=torch.get_num_threads() if device.type == "cpu" else 0,
    )
