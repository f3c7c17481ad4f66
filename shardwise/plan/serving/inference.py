"""The constants of published engines, fitted to their published measurements (`benchmarks/fit_inference.py`).

`cost.py` counts the cost of passes, `loads.py` the time that requests wait.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from shardwise.plan.cost.constants import scaled
from shardwise.plan.serving.cost import Serving

NAMES: dict[str, tuple[float, tuple[str, ...]]] = {
    # name: (value before fitting, what it may depend on)
    "read": (1.0, ("chip", "family", "engine", "format")),
    "matmul": (1.0, ("chip", "family", "engine", "format")),
    "experts": (1.0, ("chip", "family", "engine")),
    "grouped": (1.0, ("chip", "family", "engine")),
    "attention": (1.0, ("chip", "family", "engine")),
    "elementwise": (1.0, ("family",)),
    "tensor": (1.0, ("chip", "family")),
    "wait": (1.0, ("family",)),
    "gap": (1.0e-6, ("family",)),
    "launch": (1.0, ("family",)),
    "step": (1.0, ("family", "engine")),
    "stall": (0.2, ()),
    "load": (1.0, ()),
    "arrive": (1.0, ("engine",)),
    "queue": (0.05, ("engine",)),
}
"""Factors on the seconds of a kind of work: GEMMs of decode (`read`) and of prefill (`matmul`), the same for those of experts
(`experts` and `grouped`), attention, elementwise kernels, collectives; on an engine's waits, launches, steps and arrivals; on a run
under full load. `gap` is the seconds between the kernels of a CUDA graph. `stall` is the share of the other replicas' prompts that
an attention replica waits for at the experts. `queue` is the share of the other clients' prompts that a client waits for: a
twentieth if all clients start at once and each sends ten requests, as benchmarks do."""


@cache
def fitted_inference() -> Mapping[str, Any]:
    """The content of `fitted.json`."""
    return json.loads(resources.files("shardwise.plan.serving").joinpath("fitted.json").read_text("utf-8"))


def groups_of(s: Serving) -> dict[str, str]:
    """The groups that the constants depend on, by name."""
    return {
        "chip": s.chip.name.split("-")[0],
        "family": s.engine.family,
        "engine": s.engine.name,
        "format": s.weights.name if s.weights.bytes < 2 else "",
    }


def constants_of(s: Serving, effects: Mapping[str, float]) -> dict[str, float]:
    """The constants of a serving setup; `effects` are logarithms by "name" and "name/kind:value"."""
    return scaled(NAMES, groups_of(s), effects)
