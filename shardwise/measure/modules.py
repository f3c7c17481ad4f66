"""A rank's network as a list of modules with what each costs in a step: parameters, operations by pass, bytes saved, seconds.

Costs are given twice: of a module itself, and of all modules inside of it. Operations are hardware FLOPs, counted with tokens
divided evenly over experts; seconds are those of kernels on a GPU and of operators on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any

from shardwise.data.batches import Batch
from shardwise.measure.dry import even_routing
from shardwise.measure.module_work import ROOT, module_activations, module_flops
from shardwise.measure.work import as_written
from shardwise.train.step import TrainState

PASSES = ("forward", "recompute", "backward_input", "backward_weight", "optimizer")


@dataclass
class Cost:
    """What a module costs."""

    parameters: int = 0
    """In the whole model."""
    held: int = 0
    """Elements of them on this rank."""
    flops: dict[str, float] = field(default_factory=dict)
    """Operations of a step by pass."""
    activations: int = 0
    """Bytes that one microbatch saves for its backward pass."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Of a step, `forward` and `backward`; what is recomputed is part of the backward pass."""

    def add(self, other: Cost) -> None:
        """Take another's numbers to one's own."""
        self.parameters += other.parameters
        self.held += other.held
        self.activations += other.activations
        for mine, others in ((self.flops, other.flops), (self.seconds, other.seconds)):
            for key, value in others.items():
                mine[key] = mine.get(key, 0.0) + value


def own_costs(
    train_state: TrainState, batches: Iterable[Batch], seconds: dict[str, dict[str, float]]
) -> dict[str, Cost]:
    """By module, without what stands below it; counts in two more steps. `seconds` are those of a step by module."""
    found: dict[str, Cost] = {name: Cost() for name in _names(train_state)}
    coming = iter(batches)
    with even_routing(train_state), as_written(train_state):
        flops = module_flops(train_state, next(coming))
        activations = module_activations(train_state, next(coming))
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


def with_all_below(own: dict[str, Cost]) -> dict[str, Cost]:
    """By module, with what stands below it; the root has everything of the network, phases of the step stay apart."""
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
    """For programs: modules in the order of the network, phases last; `own` is without what stands below."""
    rows = []
    for name, cost in with_all_below(own).items():
        alone = own.get(name, Cost())
        rows.append({"module": name, **vars(cost), "own": vars(alone)})
    return rows
