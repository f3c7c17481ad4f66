"""Labels the steps of a train state while a profile is recorded: actions, phases, modules and messages (`shardwise.labels`).

An observer, hooks and kernels of collectives add the labels and are removed again, so a run without a profiler pays nothing. A
module's label encloses its forward pass and its hooks, also where the pass is recomputed. In the backward pass autograd's nodes
have the sequence numbers of the forward pass, so a reader of the profile knows their module. Only work without such a number is
labelled there: gradient accumulation, deferred weight gradients, and the all-gathers and reduce-scatters of `fully_shard`. A
compiled block is one label, since labels inside of it would be compiled too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.labels import label
from shardwise.ledger import AXIS_OF
from shardwise.measure.counts.modules import ROOT, module_names
from shardwise.measure.counts.traffic import TrafficCounter
from shardwise.model.transformer import Transformer
from shardwise.parallel.observer import Observer
from shardwise.run.derive import compiles
from shardwise.schedules import Action
from shardwise.torch_private import below_autograd, close_library, fast_record_function
from shardwise.torch_private.fully_shard import sharded_backward_inside, sharded_groups, unsharded_parameters
from shardwise.train.step import TrainState

SENDING = ("allreduce_", "_allgather_base_", "allgather_", "_reduce_scatter_base_", "alltoall_base_", "send",
           "allgather_coalesced_", "allreduce_coalesced_", "allgather_into_tensor_coalesced_", "alltoall_", "broadcast_",
           "gather_", "reduce_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_", "scatter_")  # fmt: skip
"""Every operator of `c10d` that makes a rank send; the counter refuses those that the trainer does not use."""


def span(kind: str, *words: object) -> Any:
    """A label around the code that runs while it is open. It takes only a microsecond, a tenth of
    `torch.profiler.record_function`, since a pass has hundreds of them."""
    return fast_record_function(label(kind, *words))


@contextlib.contextmanager
def labelled_messages(train_state: TrainState) -> Iterator[TrafficCounter]:
    """While it is open, collectives carry labels and are counted.

    A dispatch mode, as in `TrafficCounter`, would slow every operator and so the recorded step. Here only the collectives get an
    extra kernel, above their device kernels: at the autograd key, which they do not use.
    """
    counter = TrafficCounter(train_state.mesh.axes_by_group())
    library = torch.library.Library("c10d", "IMPL")

    def kernel(operator: Any) -> Callable[..., Any]:
        def within(*args: Any) -> Any:
            sent = counter.count(str(operator), args)
            with below_autograd():
                if sent is None:
                    return operator(*args)
                axis, operation, size = sent
                with span("message", AXIS_OF.get(axis, axis), operation, size):
                    return operator(*args)

        return within

    try:
        if dist.is_initialized():
            for name in SENDING:
                for device in ("CPU", "CUDA"):
                    library.impl(name, kernel(getattr(torch.ops.c10d, name).default), f"Autograd{device}")
        yield counter
    finally:
        close_library(library)


def labelled_modules(train_state: TrainState) -> dict[nn.Module, str]:
    """The modules of a rank that get a label, with their names in the full model."""
    names = module_names(train_state)
    if compiles(train_state.run, gpu=train_state.device.type == "cuda"):
        for model in train_state.parallel.models:
            for block in model.layers.values():
                names = {m: name for m, name in names.items() if m is block or m not in set(block.modules())}
    return names


@contextlib.contextmanager
def labelled(train_state: TrainState) -> Iterator[TrafficCounter]:
    """While it is open, steps carry labels; yields the counter of their messages."""
    with contextlib.ExitStack() as stack:
        names = labelled_modules(train_state)
        stack.enter_context(train_state.observers.watched_by(Labels(names)))
        _modules(names, stack)
        for model in train_state.parallel.models:
            _accumulated(model, stack)
            _sharded(model, names, stack)
        yield stack.enter_context(labelled_messages(train_state))


class Labels(Observer):
    """Labels around actions, phases, deferred weight gradients and recomputed modules."""

    def __init__(self, names: dict[nn.Module, str]) -> None:
        self.names = names

    def action(self, action: Action) -> Any:
        return span("action", action)

    def phase(self, name: str) -> Any:
        return span("phase", "optimizer" if name == "balance" else name)

    def weight_gradient(self, module: str) -> Any:
        return span("module", module)

    def recompute(self, module: nn.Module) -> Any:
        return span("module", self.names.get(module, ROOT))


def _label_hooks(module: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """Hooks that open and close a module's label."""
    opened: list[Any] = []

    def before(*_: Any) -> None:
        opened.append(span("module", module))
        opened[-1].__enter__()

    def after(*_: Any) -> None:
        opened.pop().__exit__(None, None, None)

    return before, after


def _modules(names: dict[nn.Module, str], stack: contextlib.ExitStack) -> None:
    """Label each module's forward pass and hooks."""
    for module, name in names.items():
        before, after = _label_hooks(name)
        stack.callback(module.register_forward_pre_hook(before, prepend=True).remove)
        # `always_call`: a recomputed pass stops early, with an exception, once it has the tensors it needs.
        stack.callback(module.register_forward_hook(after, always_call=True).remove)


def _sharded(model: Transformer, names: dict[nn.Module, str], stack: contextlib.ExitStack) -> None:
    """Label the all-gathers and reduce-scatters of `fully_shard` in the backward pass."""
    for module, group in sharded_groups(model):
        stack.enter_context(sharded_backward_inside(group, partial(span, "module", names.get(module, ROOT))))


def _accumulated(model: Transformer, stack: contextlib.ExitStack) -> None:
    """Label the nodes that accumulate gradients, which have no sequence number: those of the unsharded parameters, which
    `fully_shard` creates in its first pass."""
    owners = {module: name for name, module in model.named_modules()}
    unsharded: dict[Tensor, str] = {
        p: name.rpartition(".")[0] for name, p in model.named_parameters() if not isinstance(p, DTensor)
    }
    unsharded |= {parameter: owners[module] for module, parameter in unsharded_parameters(model)}
    for parameter, name in unsharded.items():
        if parameter.requires_grad:
            _accumulation(parameter, name or ROOT, stack)


def _accumulation(parameter: Tensor, name: str, stack: contextlib.ExitStack) -> None:
    with torch.enable_grad():
        view = parameter.view_as(parameter).grad_fn
    assert view is not None
    node = view.next_functions[0][0]
    assert node is not None
    before, after = _label_hooks(name)
    stack.callback(str, node)  # autograd keeps this node only while it is referenced
    stack.callback(node.register_prehook(before).remove)
    stack.callback(node.register_hook(after).remove)
