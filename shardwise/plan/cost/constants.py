"""The fitted constants: how well programs use chips and links, beyond what the kernel curves say.

Each is a factor on the seconds of one category, made of a common part and one for the chip, the link and the family of
programs, multiplied: `fitted.json` holds their logarithms. A chip or program that was never seen has the common part alone.
`benchmarks/fit_rows.py` fits them to the published measurements and writes the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from shardwise.hardware import kernel_on
from shardwise.plan.cost.job import Job

NAMES: dict[str, tuple[float, tuple[str, ...]]] = {
    # name: (value before fitting, what it may depend on)
    "matmul": (1.0, ("chip", "family", "fp8")),
    "attention": (1.0, ("chip", "kernel", "family")),
    "memory": (1.0, ("chip", "family")),
    "tensor": (1.0, ("chip", "family")),
    "context": (1.0, ("chip",)),
    "expert": (1.0, ("chip", "family")),
    "data": (1.0, ("fabric", "family")),
    "pipeline": (1.0, ("fabric",)),
    "optimizer": (1.0, ("family",)),
    "launch": (12e-6, ("kernels",)),
    "overhead": (5e-3, ("family",)),
    "jitter": (0.005, ("fabric",)),
    "contention": (0.1, ("family",)),
    "exposed": (0.1, ("family",)),
}
"""Every constant. `launch` and `overhead` are seconds, of a kernel and of a step; `jitter` is the share a step grows by with
each doubling of the machines; `contention` the share of hidden traffic that slows computing; `exposed` the share of traffic
that could hide but does not."""

Constants = Mapping[str, float]


def groups_of(job: Job) -> dict[str, str]:
    """What the constants of a job depend on, by name."""
    chip, stack = job.cluster.chip, job.stack
    return {
        "chip": chip.generation,
        "family": stack.family,
        "kernel": "unfused" if stack.attention == "unfused" else kernel_on(chip, stack.attention),
        "kernels": stack.kernels,
        "fabric": f"{8 * job.cluster.inter / 1e9:.0f}",
        "fp8": f"{chip.generation}-fp8" if job.fp8 else "",
    }


@cache
def fitted() -> Mapping[str, Any]:
    """What `fitted.json` holds."""
    return json.loads(resources.files("shardwise.plan").joinpath("fitted.json").read_text())


def constants_of(job: Job, effects: Mapping[str, float] | None = None) -> dict[str, float]:
    """The constants of a job; `effects` are logarithms by "name" and "name/kind:value", as fitted unless given."""
    effects = fitted()["effects"] if effects is None else effects
    groups = groups_of(job)
    result = {}
    for name, (start, kinds) in NAMES.items():
        total = effects.get(name, 0.0) + sum(effects.get(f"{name}/{kind}:{groups[kind]}", 0.0) for kind in kinds)
        result[name] = start * math.exp(total)
    return result | measured(job) | ({"overhead": 0.0} if job.stack.runs_ahead else {})


def measured(job: Job) -> dict[str, float]:
    """What a profile of the machine says instead. All that was fitted was fitted to accelerators: a CPU's measured kernels
    speak for themselves."""
    profile, pipeline = job.cluster.profile, job.layout.pipeline
    if profile is None or not profile.launch:
        return {}
    layers = job.model.layers / (pipeline if isinstance(pipeline, int) else 1)  # the search asks for many sizes at once
    result = {"launch": profile.launch, "overhead": profile.overhead + profile.layer_overhead * layers}
    if profile.measures("elementwise", job.dtype):  # what the operations take beyond a copy is in their curves
        result["memory"] = 1.0
    if job.cluster.chip.name == "cpu":
        result |= dict.fromkeys(("matmul", "attention", "memory", "optimizer"), 1.0)
    return result
