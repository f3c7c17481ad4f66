"""The fitted constants: how well frameworks use chips and links, beyond what the kernel curves say.

Each is a factor on the seconds of one category: a common part, multiplied by one for the chip, the link and the family of
frameworks. `fitted.json` holds their logarithms. A chip or framework that was never seen has the common part alone.
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
"""Every constant. `launch` and `overhead` are seconds, of a kernel and of a step. `jitter` is the share by which a step grows with
each doubling of the machines, `contention` the share of overlapped traffic that slows computing, `exposed` the share of traffic
that could overlap but does not."""

Constants = Mapping[str, float]


def groups_of(job: Job) -> dict[str, str]:
    """What the constants of a job depend on, by name."""
    chip, framework = job.cluster.chip, job.framework
    return {
        "chip": chip.generation,
        "family": framework.family,
        "kernel": "unfused" if framework.attention == "unfused" else kernel_on(chip, framework.attention),
        "kernels": framework.kernels,
        "fabric": f"{8 * job.cluster.inter / 1e9:.0f}",
        "fp8": f"{chip.generation}-fp8" if job.fp8 else "",
    }


@cache
def fitted() -> Mapping[str, Any]:
    """What `fitted.json` holds."""
    return json.loads(resources.files("shardwise.plan").joinpath("fitted.json").read_text())


def interval(kind: str, assumed: int = 0) -> float:
    """Half the width of the 80% interval, in the logarithm; wider with each assumption about a published row."""
    return fitted()["intervals"][kind] * (1.0 + 0.15 * assumed)


def known_chip(job: Job) -> bool:
    """Whether the fit has seen chips of this generation, or this very machine was measured."""
    seen = {name.split(":", 1)[1] for name in fitted()["effects"] if "/chip:" in name}
    return groups_of(job)["chip"] in seen or job.cluster.profile is not None


def effects_without(content: Mapping[str, Any], group: str, *, leave_out: bool) -> dict[str, float]:
    """The fitted effects for rows of one source: fitted without it where it took part and is to be left out."""
    return content.get("without", {}).get(group, content["effects"]) if leave_out else content["effects"]


def scaled(
    names: Mapping[str, tuple[float, tuple[str, ...]]], groups: Mapping[str, str], effects: Mapping[str, float]
) -> dict[str, float]:
    """Constants from their values before fitting and logarithms by "name" and "name/kind:value"."""
    result = {}
    for name, (start, kinds) in names.items():
        total = effects.get(name, 0.0) + sum(effects.get(f"{name}/{kind}:{groups[kind]}", 0.0) for kind in kinds)
        result[name] = start * math.exp(total)
    return result


def constants_of(job: Job, effects: Mapping[str, float] | None = None) -> dict[str, float]:
    """The constants of a job; with the fitted effects unless others are given."""
    result = scaled(NAMES, groups_of(job), fitted()["effects"] if effects is None else effects)
    return result | _measured(job) | ({"overhead": 0.0} if job.framework.runs_ahead else {})


def _measured(job: Job) -> dict[str, float]:
    """What a profile of the machine says instead. All constants were fitted to accelerators, so on a CPU the measured kernels are
    taken as they are."""
    profile, pipeline = job.cluster.profile, job.layout.pipeline
    if profile is None or not profile.launch:
        return {}
    layers = job.model.layers / (pipeline if isinstance(pipeline, int) else 1)  # the search asks for many sizes at once
    result = {"launch": profile.launch, "overhead": profile.overhead + profile.layer_overhead * layers}
    if profile.measures("elementwise", job.dtype):  # the curves hold what the ops take beyond a copy
        result["memory"] = 1.0
    if job.cluster.chip.name == "cpu":
        result |= dict.fromkeys(("matmul", "attention", "memory", "optimizer"), 1.0)
    return result
