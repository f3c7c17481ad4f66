"""Labels on the steps of a trainee while a profile is recorded: actions, phases, modules and messages (`shardwise.labels`).

They are put on from outside and taken off again, so a run without a profiler executes the same code as ever and pays nothing.
A module's label lies around its forward pass with everything that hooks do for it, also where the pass is repeated. Backward,
autograd numbers its nodes as the forward pass made them, which tells their module to a reader of the profile; so only what
no number tells is labelled there: gradients added to those of microbatches before, those of weights that were put off, and
what `fully_shard` gathers and scatters. A compiled block is one label, since a compiler would have to look into others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._profiler import _RecordFunctionFast
from torch.distributed.tensor import DTensor

from shardwise.labels import label
from shardwise.ledger import AXIS_OF
from shardwise.measure.module_work import ROOT, module_names, repeated_modules
from shardwise.measure.traffic import TrafficCounter
from shardwise.model.transformer import Transformer
from shardwise.parallel import pipeline as pipeline_module
from shardwise.parallel.pipeline import DeferredGradient
from shardwise.parallel.shard import sharded_modules
from shardwise.run.derive import compiles
from shardwise.schedules import Action
from shardwise.train import optimizer as optimizer_module
from shardwise.train import step as step_module
from shardwise.train.step import TrainState

SENDING = ("allreduce_", "_allgather_base_", "allgather_", "_reduce_scatter_base_", "alltoall_base_", "send",
           "allgather_coalesced_", "allreduce_coalesced_", "allgather_into_tensor_coalesced_", "alltoall_", "broadcast_",
           "gather_", "reduce_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_", "scatter_")  # fmt: skip
"""Every operator of `c10d` that makes a rank send; the counter refuses those that the trainer does not use."""


def span(kind: str, *words: object) -> Any:
    """A label around what happens while it is open: a microsecond, a tenth of `torch.profiler.record_function`, as there are
    hundreds of them in a pass."""
    return _RecordFunctionFast(label(kind, *words))


@contextlib.contextmanager
def labelled_messages(train_state: TrainState) -> Iterator[TrafficCounter]:
    """While it is open, collectives carry labels and are counted.

    A dispatch mode, as in `TrafficCounter`, would slow every operator and so the step that is recorded. Here the collectives
    alone get a kernel above those of their devices, where autograd's would be if they had one.
    """
    counter = TrafficCounter(train_state.mesh.axes_by_group())
    library = torch.library.Library("c10d", "IMPL")

    def kernel(operator: Any) -> Callable[..., Any]:
        def within(*args: Any) -> Any:
            sent = counter.count(str(operator), args)
            with torch._C._AutoDispatchBelowAutograd():
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
        library._destroy()


def labelled_modules(train_state: TrainState) -> dict[nn.Module, str]:
    """Modules of a rank that get a label, and their names in the whole model."""
    names = module_names(train_state)
    if compiles(train_state.run, gpu=train_state.device.type == "cuda"):
        for model in train_state.parallel.models:
            for block in model.layers.values():
                names = {m: name for m, name in names.items() if m is block or m not in set(block.modules())}
    return names


@contextlib.contextmanager
def labelled(train_state: TrainState) -> Iterator[TrafficCounter]:
    """While it is open, steps of a trainee carry labels; what is given counts what they send."""
    with contextlib.ExitStack() as stack:
        names = labelled_modules(train_state)
        _wrap(train_state.parallel.pipeline, "_execute", _of_action, stack)
        _phases(train_state, stack)
        _modules(names, stack)
        stack.enter_context(repeated_modules(lambda module: span("module", names.get(module, ROOT))))
        _wrap(pipeline_module, "compute_weight_gradient", _of_weight, stack)
        for model in train_state.parallel.models:
            _accumulated(model, stack)
            _sharded(model, names, stack)
        yield stack.enter_context(labelled_messages(train_state))


def _wrap(where: Any, name: str, words: Callable[..., tuple[str, object]], stack: contextlib.ExitStack) -> None:
    """Label the calls of a function or method; `words` makes the label of a call's arguments."""
    inner = getattr(where, name)

    def within(*args: Any, **kwargs: Any) -> Any:
        with span(*words(*args)):
            return inner(*args, **kwargs)

    stack.enter_context(mock.patch.object(where, name, within))


def _always(kind: str, word: str) -> Callable[..., tuple[str, object]]:
    return lambda *_: (kind, word)


def _of_action(action: Action, *_: Any) -> tuple[str, object]:
    return "action", action


def _of_weight(deferred: DeferredGradient) -> tuple[str, object]:
    return "module", deferred.name


def _phases(train_state: TrainState, stack: contextlib.ExitStack) -> None:
    for where, name, phase in (
        (train_state, "_begin_sum", "gradients"),
        (train_state, "microbatches", "data"),
        (train_state.optimizer, "zero_grad", "gradients"),
        (pipeline_module, "reduce_deferred_gradients", "gradients"),
        (step_module, "reduce_partial_gradients", "gradients"),
        (step_module, "squared_norm", "clip"),
        (train_state, "_norm_and_factor", "clip"),
        (optimizer_module, "scale_gradients", "clip"),
        (train_state.optimizer, "step", "optimizer"),
        (train_state, "_add_loads", "optimizer"),
    ):
        _wrap(where, name, _always("phase", phase), stack)
    for router in train_state.routers:
        _wrap(router, "rebalance", _always("phase", "optimizer"), stack)


def _modules(names: dict[nn.Module, str], stack: contextlib.ExitStack) -> None:
    """Around each module's hooks and forward pass."""
    for module, name in names.items():
        opened: list[Any] = []

        def before(*_: Any, name: str = name, opened: list[Any] = opened) -> None:
            opened.append(span("module", name))
            opened[-1].__enter__()

        def after(*_: Any, opened: list[Any] = opened) -> None:
            opened.pop().__exit__(None, None, None)

        stack.callback(module.register_forward_pre_hook(before, prepend=True).remove)
        # Also when a repeated pass leaves the module as soon as it has what it needs.
        stack.callback(module.register_forward_hook(after, always_call=True).remove)


def _sharded(model: Transformer, names: dict[nn.Module, str], stack: contextlib.ExitStack) -> None:
    """What `fully_shard` does in the backward pass."""
    for module, group in _shard_groups(model):
        for method in ("pre_backward", "post_backward"):
            _wrap(group, method, _always("module", names.get(module, ROOT)), stack)


def _shard_groups(model: Transformer) -> Iterator[tuple[nn.Module, Any]]:
    for module in sharded_modules(model):
        assert isinstance(module, nn.Module)
        group = module._get_fsdp_state()._fsdp_param_group
        if group is not None:
            yield module, group


def _accumulated(model: Transformer, stack: contextlib.ExitStack) -> None:
    """What adds a gradient to those of the microbatches before, which is a node of autograd without a number: of each whole
    parameter, which `fully_shard` has made once a pass has run."""
    owners = {module: name for name, module in model.named_modules()}
    whole = {p: name.rpartition(".")[0] for name, p in model.named_parameters() if not isinstance(p, DTensor)}
    for _, group in _shard_groups(model):
        for sharded in group.fsdp_params:
            if getattr(sharded, "_unsharded_param", None) is not None:
                whole[sharded._unsharded_param] = owners[sharded._module_info.module]
    for parameter, name in whole.items():
        if parameter.requires_grad:
            _accumulation(parameter, name or ROOT, stack)


def _accumulation(parameter: Tensor, name: str, stack: contextlib.ExitStack) -> None:
    with torch.enable_grad():
        view = parameter.view_as(parameter).grad_fn
    assert view is not None
    node = view.next_functions[0][0]
    assert node is not None
    opened: list[Any] = []

    def before(*_: Any) -> None:
        opened.append(span("module", name))
        opened[-1].__enter__()

    def after(*_: Any) -> None:
        opened.pop().__exit__(None, None, None)

    stack.callback(str, node)  # the node stays this one for as long as somebody holds it
    stack.callback(node.register_prehook(before).remove)
    stack.callback(node.register_hook(after).remove)
