"""Every call of PyTorch that is not public, in one place. Each says what is needed and cannot be had otherwise; a new version of
PyTorch is checked here. All were checked with 2.11, 2.12 and 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch._C._profiler import _RecordFunctionFast
from torch.distributed.fsdp import FSDPModule

# A span of a profile that takes a microsecond, a tenth of `torch.profiler.record_function`.
fast_record_function = _RecordFunctionFast


# Autograd: which pass runs, and which node.


def in_backward() -> bool:
    """Whether autograd's engine runs this: a forward pass is recomputation then."""
    return torch._C._current_graph_task_id() != -1


def autograd_sequence() -> int:
    """The number that the next node made by this thread's forward pass will have; the profiler and nodes tell the same."""
    return torch._C._autograd._get_sequence_nr()


def autograd_node() -> tuple[str, int] | None:
    """Name and number of the node that runs; None outside of a backward pass."""
    node = torch._C._current_autograd_node()
    return None if node is None else (node.name(), node._sequence_nr())


# The dispatcher.


def below_autograd() -> AbstractContextManager[None]:
    """Calls go to the kernels of devices, past those that were put above them: a kernel put there needs it to call the operator."""
    return torch._C._AutoDispatchBelowAutograd()


def close_library(library: torch.library.Library) -> None:
    """Take kernels off that a library has put on operators; it otherwise keeps them as long as it is referenced."""
    library._destroy()


# Storages.


@contextlib.contextmanager
def observed_resizes(resized: Callable[[UntypedStorage], Any]) -> Iterator[None]:
    """While it is open, `resized` is called after storages change their size, by which `fully_shard` frees memory: no operator is
    dispatched for it. Storages have no hooks, so the method is replaced."""
    resize = UntypedStorage.resize_

    def observed(storage: UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        resized(storage)
        return result

    UntypedStorage.resize_ = observed  # type: ignore[method-assign]
    try:
        yield
    finally:
        UntypedStorage.resize_ = resize  # type: ignore[method-assign]


# fully_shard: what it holds, and when it communicates.


def sharded_groups(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """The modules whose parameters `fully_shard` gathers together, with its `FSDPParamGroup`: what is gathered or waits to be
    reduced is not public."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            if group is not None:
                yield module, group


def unsharded_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, Tensor]]:
    """Whole parameters, which `fully_shard` makes in the first pass, with the modules they belong to."""
    for _, group in sharded_groups(model):
        for sharded in group.fsdp_params:
            if getattr(sharded, "_unsharded_param", None) is not None:
                yield sharded._module_info.module, sharded._unsharded_param


@contextlib.contextmanager
def sharded_backward_inside(group: Any, context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """While it is open, a group gathers and reduces for the backward pass inside of a context. It has hooks for neither, so its
    methods are replaced."""
    methods = ("pre_backward", "post_backward")
    for name in methods:
        inner = getattr(group, name)

        def within(*args: Any, inner: Callable[..., Any] = inner, **kwargs: Any) -> Any:
            with context():
                return inner(*args, **kwargs)

        setattr(group, name, within)
    try:
        yield
    finally:
        for name in methods:
            delattr(group, name)
