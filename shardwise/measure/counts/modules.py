"""The modules of a rank's network with the cost of each in a step: parameters, FLOPs by pass, bytes saved, seconds.

Each cost is listed twice: for the module alone, and with its submodules. FLOPs are hardware FLOPs, counted with tokens divided
evenly over experts; seconds are kernel time on a GPU and operator time on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any

from shardwise.data.batches import Batch
from shardwise.measure.counts.module_work import ROOT, module_activations, module_flops
from shardwise.measure.counts.work import uncompiled
from shardwise.measure.dry import even_routing
from shardwise.train.step import TrainState

PASSES = ("forward", "recompute", "backward_input", "backward_weight", "optimizer")


@dataclass
class Cost:
    """The cost of a module."""

    parameters: int = 0
    """Elements in the full model."""
    held: int = 0
    """Elements on this rank."""
    flops: dict[str, float] = field(default_factory=dict)
    """FLOPs of a step by pass."""
    activations: int = 0
    """Bytes that one microbatch saves for its backward pass."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of a step, `forward` and `backward`; the latter includes recomputation."""

    def add(self, other: Cost) -> None:
        """Add another cost to this one."""
        self.parameters += other.parameters
        self.held += other.held
        self.activations += other.activations
        for mine, others in ((self.flops, other.flops), (self.seconds, other.seconds)):
            for key, value in others.items():
                mine[key] = mine.get(key, 0.0) + value


def own_costs(
    train_state: TrainState, batches: Iterable[Batch], seconds: dict[str, dict[str, float]]
) -> dict[str, Cost]:
    """Costs by module, without submodules, counted in two more steps. `seconds` are a step's seconds by module."""
    found: dict[str, Cost] = {name: Cost() for name in _names(train_state)}
    remaining = iter(batches)
    with even_routing(train_state), uncompiled(train_state):
        flops = module_flops(train_state, next(remaining))
        activations = module_activations(train_state, next(remaining))
    for name, passes in flops.items():
        found.setdefault(name, Cost()).flops = {key: passes.get(key, 0.0) for key in PASSES}
    for name, size in activations.items():
        found.setdefault(name, Cost()).activations = size
    for name, times in seconds.items():
        found.setdefault(name, Cost()).seconds = times
    for each in train_state.parallel.parameters:
        cost = found.setdefault(each.name.rpartition(".")[0] or ROOT, Cost())
        parameter = each.parameter
        cost.held += (parameter.to_local() if hasattr(parameter, "to_local") else parameter).numel()
        cost.parameters += 0 if each.copy_of_other_stage else prod(each.whole)
    return found


def _names(train_state: TrainState) -> Iterable[str]:
    return (name for model in train_state.parallel.models for name, _ in model.named_modules() if name)


def with_submodules(own: dict[str, Cost]) -> dict[str, Cost]:
    """Costs by module, with submodules. The root covers the full network; phases of the step stay separate."""
    whole: dict[str, Cost] = {ROOT: Cost()}
    for name, cost in own.items():
        if name.startswith("("):
            whole[name] = cost
            continue
        above = name.split(".") if name != ROOT else []
        for depth in range(1, len(above) + 1):
            whole.setdefault(".".join(above[:depth]), Cost()).add(cost)
        whole[ROOT].add(cost)
    return whole


def as_rows(own: dict[str, Cost]) -> list[dict[str, Any]]:
    """Rows of JSON data: modules in the order of the network, phases last; `own` excludes submodules."""
    rows = []
    for name, cost in with_submodules(own).items():
        alone = own.get(name, Cost())
        rows.append({"module": name, **vars(cost), "own": vars(alone)})
    return rows
