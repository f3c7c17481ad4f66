"""The measurements of a module as a tree: each submodule alone, and with its own submodules."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from torch import nn

from shardwise.measure.profiler.watch import OUTSIDE, PASSES, Watch

CONVENTION = (
    "model FLOPs: matrix products, convolutions, attention by the pairs its mask allows; a multiply-add is two; "
    "recomputation out"
)
IN_KERNELS = "recompute_in_kernels"


@dataclass
class Cost:
    """The cost of a module, over everything that ran."""

    parameters: int = 0
    flops: dict[str, float] = field(default_factory=dict)
    """By pass; `recompute_in_kernels` are the FLOPs that fused attention recomputes inside of its backward kernels."""
    activations: float = 0.0
    """Bytes that autograd saves in one forward pass of the full module."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By pass."""


def add_cost(total: Any, cost: Any) -> None:
    """Add every field of a cost, a number or numbers by name, to another's."""
    for name, amount in vars(cost).items():
        if isinstance(amount, dict):
            sums = getattr(total, name)
            sums |= {key: sums.get(key, 0.0) + each for key, each in amount.items()}
        else:
            setattr(total, name, getattr(total, name) + amount)


@dataclass
class Node:
    """A module of the tree."""

    name: str
    """Dotted; empty for the full module."""
    kind: str
    """Its class."""
    calls: int
    own: Cost
    whole: Cost
    """With its submodules."""

    def as_dict(self) -> dict[str, Any]:
        """The node as JSON data."""
        return {"module": self.name, "type": self.kind, "calls": self.calls, **vars(self.whole), "own": vars(self.own)}


def tree_of(module: nn.Module, watch: Watch) -> list[Node]:
    """The modules in the order of `named_modules`, then the operators outside of them."""
    nodes: dict[str, Node] = {}
    counted: set[int] = set()
    passes = max(1, watch.calls[""])
    for name, each in (*module.named_modules(), (OUTSIDE, None)):
        own = Cost(
            0 if each is None else _parameters(each, counted),
            {which: float(watch.flops[name, which]) for which in PASSES if watch.flops[name, which]},
            watch.saved[name] / passes,
            {which: watch.clock.seconds[name, which] for which in PASSES if (name, which) in watch.clock.seconds},
        )
        if watch.fused[name]:
            own.flops[IN_KERNELS] = float(watch.fused[name])
        kind = "" if each is None else type(each).__name__
        nodes[name] = Node(name, kind, watch.calls[name], own, Cost())
    for name, node in nodes.items():
        homes = [] if name == OUTSIDE else ["", *accumulate(name.split("."), "{}.{}".format)]
        for home in dict.fromkeys(homes or [name]):
            add_cost(nodes[home].whole, node.own)
    return list(nodes.values())


def _parameters(module: nn.Module, counted: set[int]) -> int:
    """Elements of a module's own parameters; a shared parameter counts where it appears first."""
    found = 0
    for parameter in module.parameters(recurse=False):
        if id(parameter) not in counted:
            counted.add(id(parameter))
            found += parameter.numel()
    return found
