"""The fitted constants: how well frameworks use chips and links, beyond what the kernel curves say.

Each is a factor on the seconds of one category: a common factor, times one each for the chip, the link and the framework family.
`fitted.json` holds their logarithms. A chip or framework that the fit has not seen has the common factor alone.
`benchmarks/fit_rows.py` fits them to the published measurements and writes the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from shardwise.hardware import kernel_on
from shardwise.plan.cost.job import Job

NAMES: dict[str, tuple[float, tuple[str, ...]]] = {
    # name: (value before fitting, what it may depend on)
    "matmul": (1.0, ("chip", "part", "family", "fp8")),
    "attention": (1.0, ("chip", "kernel", "family")),
    "memory": (1.0, ("chip", "family")),
    "tensor": (1.0, ("chip", "family")),
    "context": (1.0, ("chip",)),
    "expert": (1.0, ("chip", "dispatcher")),
    "data": (1.0, ("fabric", "family")),
    "pipeline": (1.0, ("fabric",)),
    "optimizer": (1.0, ("family",)),
    "launch": (13e-6, ("kernels", "family")),
    "overhead": (5e-3, ("family",)),
    "jitter": (0.004, ("fabric",)),
    "contention": (0.12, ("family",)),
    "exposed": (0.1, ("family",)),
}
"""Every constant. `launch` and `overhead` are seconds, of a kernel and of a step. `jitter` is the share by which a step grows with
each doubling of the machines, `contention` the share of overlapped traffic that slows computing, `exposed` the share of traffic
that could overlap but does not."""

BOUNDS = {"contention": (0.05, 0.25)}
"""Constants with physical limits. Overlapped traffic slows computing only by the SMs and the memory bandwidth that its kernels
take, whatever else may be wrong with a prediction (`benchmarks/gpu/contention.py` measures it)."""

BY_SOURCE = ("matmul", "attention", "memory", "tensor", "expert", "data", "launch", "overhead")

OWN_SOURCE = {"h200-sxm": "shardwise_h200"}
"""The source of this trainer's own measurements on a chip. Its runs there are planned as further rows of it."""

Constants = Mapping[str, float]


def kinds_of(name: str) -> tuple[str, ...]:
    """What a constant may depend on. Those in `BY_SOURCE` may also differ a little from source to source, as machines, containers
    and people do. What is known of a source is used only for its other rows."""
    return (*NAMES[name][1], "source") if name in BY_SOURCE else NAMES[name][1]


def groups_of(job: Job, source: str = "") -> dict[str, str]:
    """The values that a job's constants depend on, by kind; `source` is that of a published row, if it may be used."""
    chip, framework = job.cluster.chip, job.framework
    return {
        "chip": chip.generation,
        "part": chip.name,
        "family": framework.family,
        "kernel": "unfused" if framework.attention == "unfused" else kernel_on(chip, framework.attention),
        "kernels": framework.kernels,
        "dispatcher": framework.dispatcher if job.model.experts else "",
        "fabric": f"{8 * job.cluster.inter / 1e9:.0f}",
        "fp8": f"{chip.generation}-fp8" if job.fp8 else "",
        "source": source,
    }


@cache
def fitted() -> Mapping[str, Any]:
    """The content of `fitted.json`: the effects, and the widths of intervals."""
    return json.loads(resources.files("shardwise.plan").joinpath("fitted.json").read_text())


@cache
def left_out() -> Mapping[str, Any]:
    """`fitted`, and the effects fitted without each source and without each program, which only validation needs."""
    text = resources.files("shardwise.plan").joinpath("left_out.json").read_text()
    return {**fitted(), **json.loads(text)}


EIGHT_IN_TEN = 1.2816
"""Standard deviations on each side of a normal distribution that hold 80% of it."""
MORE_PER_ASSUMPTION = 0.1


def interval(classes: Sequence[str], assumed: int = 0, spread: float = 0.0) -> float:
    """Half the width of the 80% interval, in the logarithm: that of the first of these classes that was calibrated, widened with
    each assumption about a published row and with the `spread` over what its program may do."""
    calibrated = fitted()["intervals"]
    return widened(next(calibrated[name] for name in classes if name in calibrated), assumed, spread)


def widened(width: float, assumed: int, spread: float) -> float:
    """The interval width of a class, widened for one prediction."""
    return math.hypot(width * (1.0 + MORE_PER_ASSUMPTION * assumed), EIGHT_IN_TEN * spread)


def classes_of(job: Job, *, known_program: bool = True, source: str = "") -> tuple[str, ...]:
    """The classes of predictions that a job belongs to, the narrowest first. Each has its own interval, calibrated on rows whose
    source was left out of the fit. For unseen programs and chips, the row's program or chip generation was left out; for further
    rows of a `source` in the fit, a fifth of the rows."""
    kind = "experts" if job.model.experts else "dense"
    if source and any(name.endswith(f"/source:{source}") for name in fitted()["effects"]):
        return (f"{kind}, known source", f"{kind} on {job.cluster.chip.generation}", kind)
    if not known_chip(job):
        return (f"{kind}, unseen chip", "unseen chip")
    if not known_program:
        return (f"{kind}, unseen program", "unseen program")
    return (f"{kind} on {job.cluster.chip.generation}", kind)


def known_chip(job: Job) -> bool:
    """Whether the fit has seen chips of this generation, or this very machine was measured."""
    seen = {name.split(":", 1)[1] for name in fitted()["effects"] if "/chip:" in name}
    return groups_of(job)["chip"] in seen or job.cluster.profile is not None


def effects_without(content: Mapping[str, Any], group: str, *, leave_out: bool, program: str = "") -> dict[str, float]:
    """The fitted effects for rows of one source: with `leave_out`, those fitted without this source, if it took part; with a
    `program`, those fitted without any row of that program."""
    if program:
        return content.get("without_program", {}).get(program, content["effects"])
    return content.get("without", {}).get(group, content["effects"]) if leave_out else content["effects"]


def scaled(
    names: Mapping[str, tuple[float, tuple[str, ...]]], groups: Mapping[str, str], effects: Mapping[str, float]
) -> dict[str, float]:
    """Constants from their values before fitting and the fitted logarithms, by "name" and "name/kind:value"."""
    result = {}
    for name, (start, kinds) in names.items():
        total = effects.get(name, 0.0) + sum(effects.get(f"{name}/{kind}:{groups[kind]}", 0.0) for kind in kinds)
        result[name] = start * math.exp(total)
        if name in BOUNDS:
            low, high = BOUNDS[name]
            odds = (start - low) / (high - start) * math.exp(total)
            result[name] = low + (high - low) * odds / (1.0 + odds)
    return result


def constants_of(job: Job, effects: Mapping[str, float] | None = None, source: str = "") -> dict[str, float]:
    """The constants of a job; with the fitted effects unless others are given."""
    if effects is None and job.framework.family == "shardwise":
        source = OWN_SOURCE.get(job.cluster.chip.name, "")
    names = {name: (start, kinds_of(name)) for name, (start, _) in NAMES.items()}
    result = scaled(names, groups_of(job, source), fitted()["effects"] if effects is None else effects)
    return result | _measured(job) | ({"overhead": 0.0} if job.framework.runs_ahead else {})


def _measured(job: Job) -> dict[str, float]:
    """The constants that a profile of the machine replaces. All constants were fitted to accelerators, so on a CPU the measured
    kernels are used unscaled."""
    profile, pipeline = job.cluster.profile, job.layout.pipeline
    if profile is None or not profile.launch:
        return {}
    layers = job.model.layers / (pipeline if isinstance(pipeline, int) else 1)  # in a search it is an array of sizes
    result = {"launch": profile.launch, "overhead": profile.overhead + profile.layer_overhead * layers}
    if profile.measures("elementwise", job.dtype):  # the curves include what the ops take beyond a copy
        result["memory"] = 1.0
    if job.cluster.chip.name == "cpu":
        result |= dict.fromkeys(("matmul", "attention", "memory", "optimizer"), 1.0)
    return result
