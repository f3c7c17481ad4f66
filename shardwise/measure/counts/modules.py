"""The modules of a rank's network with the cost of each in a step: parameters, FLOPs by pass, bytes saved for the backward pass,
seconds.

FLOPs are `WorkCounter`'s hardware FLOPs, attributed to modules instead of parts, so their sum is exactly the planner's; tokens are
divided evenly over experts. Bytes are those of the storages alive at the end of a stage's forward pass, attributed to the module
that allocated them. Seconds are kernel time on a GPU and operator time on a CPU. Each cost is listed twice: for the module alone,
and with its submodules.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Any

from torch import Tensor, UntypedStorage, nn

from shardwise.data.batches import Batch
from shardwise.ledger import PASSES
from shardwise.measure.counts.memory import (
    StepMemory,
    Storages,
    optimizer_of,
    parameters_of,
    sampling,
    storage_of,
)
from shardwise.measure.counts.work import WorkCounter, uncompiled
from shardwise.measure.dry import even_routing
from shardwise.measure.profiler.tree import add_cost
from shardwise.model.layers import Linear, Norm
from shardwise.model.moe.layer import Experts, Router
from shardwise.model.transformer import Transformer
from shardwise.train.step import TrainState

OPTIMIZER = "(phase optimizer)"
"""The optimizer's name among the modules, as in a trace."""
ROOT = "model"
"""The name of a stage's network itself, for operations between its modules."""


def module_names(train_state: TrainState) -> dict[nn.Module, str]:
    """A rank's modules with their names in the full model. The loss counts as the head, whose GEMM it contains."""
    names: dict[nn.Module, str] = {}
    for model in train_state.parallel.models:
        names |= {module: name or ROOT for name, module in model.named_modules()}
        names[model.loss] = "head"
    return names


class ModuleWork(WorkCounter):
    """Adds up the FLOPs of a train state's steps by module."""

    def __init__(self, train_state: TrainState) -> None:
        super().__init__(train_state)
        self.names = module_names(train_state)
        self.update = OPTIMIZER

    def _deferred_part(self, module: str) -> str:
        return module

    @contextlib.contextmanager
    def recompute(self, module: nn.Module) -> Iterator[None]:
        self.inside.append(self.names[module])
        try:
            yield
        finally:
            self.inside.pop()

    def _watch(self, model: Transformer) -> None:
        self._know_parameters(model)
        for module in model.modules():
            name = self.names[module]
            self._around(module, name)
            if isinstance(module, Linear | Norm | nn.Embedding | Router | Experts) or not list(module.children()):
                self._mark(module, name)

    def _attending(self, backward: bool = False) -> str:
        return self._part_of_node() if backward else self.inside[-1]


class NamedStorages(Storages):
    """Tracks storages, and the module that allocated each."""

    def __init__(self, names: dict[nn.Module, str]) -> None:
        super().__init__()
        self.names = names
        self.inside: list[str] = []
        self.maker: dict[int, str] = {}

    def track(self, storage: UntypedStorage) -> int:
        """Count a storage; a new one was allocated by the running module."""
        number = super().track(storage)
        self.maker.setdefault(number, self.inside[-1] if self.inside else ROOT)
        return number

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Keep track of the running module."""
        with contextlib.ExitStack() as stack:
            for module, name in self.names.items():
                before = module.register_forward_pre_hook(lambda *_, n=name: self.inside.append(n), prepend=True)
                after = module.register_forward_hook(lambda *_: self.inside.pop() and None, always_call=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
            yield


def module_flops(train_state: TrainState, batch: Batch) -> dict[str, dict[str, float]]:
    """FLOPs of one step by module and pass."""
    with ModuleWork(train_state) as counter:
        train_state.train_step(batch)
    return {module: dict(passes) for module, passes in counter.work.flops.items() if sum(passes.values())}


def module_activations(train_state: TrainState, batch: Batch) -> dict[str, int]:
    """Bytes that one microbatch saves for its backward pass, by module, summed over the stages of this rank."""
    storages = NamedStorages(module_names(train_state))
    step = StepMemory(train_state, storages)
    train_state.optimizer.zero_grad()
    persistent: list[Tensor] = [*parameters_of(train_state), *optimizer_of(train_state)]
    persistent += [buffer for model in train_state.parallel.models for buffer in model.buffers()]
    for x in persistent:
        storages.track(storage_of(x))
    with storages, storages.watching(), sampling(step):
        train_state.train_step(batch)
    found: Counter[str] = Counter()
    for (_, microbatch), sizes in step.left.items():
        if microbatch == 0:
            for number, size in sizes.items():
                found[storages.maker[number]] += size
    return dict(found)


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


def own_costs(
    train_state: TrainState, batches: Iterable[Batch], seconds: dict[str, dict[str, float]]
) -> dict[str, Cost]:
    """Costs by module, without submodules, counted in two more steps. `seconds` are a step's seconds by module."""
    found = {name: Cost() for model in train_state.parallel.models for name, _ in model.named_modules() if name}
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


def with_submodules(own: dict[str, Cost]) -> dict[str, Cost]:
    """Costs by module, with submodules. The root covers the full network; phases of the step stay separate."""
    whole: dict[str, Cost] = {ROOT: Cost()}
    for name, cost in own.items():
        if name.startswith("("):
            whole[name] = cost
            continue
        for home in dict.fromkeys([*accumulate(name.split("."), "{}.{}".format), ROOT]):
            add_cost(whole.setdefault(home, Cost()), cost)
    return whole


def as_rows(own: dict[str, Cost]) -> list[dict[str, Any]]:
    """Rows of JSON data: modules in the order of the network, phases last; `own` excludes submodules."""
    rows = []
    for name, cost in with_submodules(own).items():
        alone = own.get(name, Cost())
        rows.append({"module": name, **vars(cost), "own": vars(alone)})
    return rows
