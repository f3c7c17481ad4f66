"""`fully_shard`: its tensors, and when and how it communicates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def local_shard(x: Tensor) -> Tensor:
    """This rank's shard of a DTensor, without the autograd node that `to_local` creates."""
    return x._local_tensor if hasattr(x, "_local_tensor") else x


def sharded_groups(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """The modules whose parameters `fully_shard` gathers together, each with its `FSDPParamGroup`, which knows the gathered
    state."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            if group is not None:
                yield module, group


def unsharded_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, Tensor]]:
    """Unsharded parameters, which `fully_shard` creates in the first pass, with their modules."""
    for _, group in sharded_groups(model):
        for sharded in group.fsdp_params:
            if getattr(sharded, "_unsharded_param", None) is not None:
                yield sharded._module_info.module, sharded._unsharded_param


@contextlib.contextmanager
def sharded_backward_inside(group: Any, context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """While it is open, a group's all-gathers and reduce-scatters of the backward pass run inside a context. The group has hooks
    for neither, so its methods are replaced."""
    methods = ("pre_backward", "post_backward")
    before = {name: vars(group)[name] for name in methods if name in vars(group)}  # of `communicate_in_place`
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
        vars(group).update(before)


def reduce_sharded_gradients(model: nn.Module) -> None:
    """Start the reduction of gradients that were completed outside of the backward passes that `fully_shard` observes, and wait for
    it, as PyTorch's own pipelining does."""
    from torch.distributed.fsdp import fully_shard

    state = fully_shard.state(model)  # type: ignore[attr-defined]
    for each in state._state_ctx.all_states:
        if each._fsdp_param_group:
            for parameter in each._fsdp_param_group.fsdp_params:
                # Gradients deferred to the very end are in low precision, next to others already cast for the sum.
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()
            each._fsdp_param_group.post_backward()
    state._root_post_backward_final_callback()


def keep_secondary_shards(module: Any, mesh: Any) -> None:
    """Keep a module's parameters sharded over the second dimension of a mesh between a forward pass and its backward pass. The
    public way (`reshard_after_forward` with a number) creates process groups for each module, in calls that all ranks must
    make."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

    group = module._get_fsdp_state()._fsdp_param_group
    group.post_forward_mesh_info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    for parameter in group.fsdp_params:
        parameter.post_forward_mesh_info = group.post_forward_mesh_info
        parameter._init_sharded_post_forward_param_metadata(torch.empty(parameter._orig_size, device="meta"))


def not_read_in_backward(module: Any) -> None:
    """Let backward passes not gather a module's parameters. Not every version has the public setter."""
    group = module._get_fsdp_state()._fsdp_param_group
    if group is not None:
        group.unshard_in_backward = False


def forget_forward_passes(model: nn.Module) -> None:
    """Clear the order of the forward passes that no backward pass follows. `fully_shard` clears it behind a backward pass, and
    would prefetch the layer that ran last in such a pass during the next backward pass, where nothing reads it."""
    for _, group in sharded_groups(model):
        group.comm_ctx.post_forward_order.clear()
        group._post_forward_indices.clear()


def gathered_tensors(group: Any) -> Iterator[Tensor]:
    """A group's gathered (unsharded) parameters, secondary shards, and the buffers of its all-gathers."""
    for parameter in group.fsdp_params:
        yield from parameter.all_gather_outputs
        kept = (getattr(parameter, name, None) for name in ("_sharded_post_forward_param_data", "_unsharded_param"))
        yield from (x for x in kept if x is not None)
    ahead = getattr(group.comm_ctx, "all_gather_state", None)  # exists once a pass has run
    for result in (group._all_gather_result, ahead.all_gather_result if ahead is not None else None):
        yield from (x for x in tree_leaves(result and tuple(result)) if isinstance(x, Tensor))


def unreduced_gradients(group: Any) -> Iterator[Tensor | None]:
    """Gradients that wait for a reduction: unsharded ones, and shards that replicas have yet to all-reduce."""
    yield group._partial_reduce_output
    for parameter in group.fsdp_params:
        yield parameter.unsharded_accumulated_grad
        whole = getattr(parameter, "_unsharded_param", None)
        yield whole.grad if whole is not None else None


class ShardedParameter(NamedTuple):
    """A parameter of a module that `fully_shard` has sharded."""

    module: nn.Module
    name: str
    shape: tuple[int, ...]
    shard: Tensor
    extend: Callable[[], None]
    """Call it once the shard has its own all-gather methods, which `fully_shard` looks for."""
    allocate: Callable[[torch.device], Tensor]
    """Allocates memory for a shard on the meta device, on a device or on the host if it is offloaded, and returns it."""
    memory: Callable[[], Tensor]
    """All of the shard's memory, padding included, as it is gathered."""


def sharded_parameters(module: Any) -> Iterator[ShardedParameter]:
    """The parameters that are gathered together for a module."""
    group = module._get_fsdp_state()._fsdp_param_group
    for parameter in group.fsdp_params if group is not None else ():
        info = parameter._module_info
        named = info.module, info.param_name, tuple(parameter._orig_size), parameter._sharded_local_tensor
        made = partial(_allocate_shard, parameter), partial(getattr, parameter, "_sharded_param_data")
        yield ShardedParameter(*named, parameter._init_extensions, *made)


def _allocate_shard(parameter: Any, device: torch.device) -> Tensor:
    """In the first pass `fully_shard` would copy a shard to pad or pin it, when optimizers already hold it; so allocate it so."""
    host = parameter.offload_to_cpu
    size, dtype, pin = parameter.padded_sharded_param_size, parameter.sharded_param.dtype, host and parameter.pin_memory
    padded = torch.empty(size, dtype=dtype, device="cpu" if host else device, pin_memory=pin)
    length = parameter.sharded_size[dim := parameter.fsdp_placement.dim]
    padded.narrow(dim, length, padded.shape[dim] - length).zero_()
    shard = padded.narrow(dim, 0, length)
    parameter._sharded_param_data = padded.view(-1)
    parameter.sharded_param = nn.Parameter(parameter.to_sharded_dtensor(shard), parameter.sharded_param.requires_grad)
    parameter._setattr_on_modules(parameter.sharded_param)
    return shard


class Collectives(Protocol):
    """How the tensors of a module are cast and sent."""

    def cast(self, sources: list[Tensor], targets: list[Tensor]) -> None:
        """Write each tensor to the one at the same place of the second list, of another dtype."""

    def add(self, sources: list[Tensor], targets: list[Tensor]) -> None:
        """Add each tensor to the one at the same place of the second list, of the dtype of sums."""

    def gather(self, shards: list[Tensor], gathered: list[Tensor]) -> None:
        """All-gather each tensor of the first list, which is this rank's part of the one at the same place of the second, into
        that one."""

    def prepared(self, gradients: list[Tensor]) -> list[Tensor]:
        """What is sent of whole gradients."""
        raise NotImplementedError

    def reduced(self, sent: list[Tensor]) -> list[Tensor]:
        """This rank's shard of the sum over ranks of each gradient, padded, with one dimension."""
        raise NotImplementedError


def communicate_in_place(module: Any, collectives: Collectives, *, reduces: bool) -> None:
    """Let a module's parameters be all-gathered where the passes read them and, if it `reduces`, its gradients be summed from where
    they are prepared. `fully_shard` copies both through a buffer around its collectives, and has hooks for these alone; so methods
    of its group are replaced. The next module must be prefetched before a module's pass: gathered memory is used again as soon as
    the pass that read it is done."""
    group = module._get_fsdp_state()._fsdp_param_group
    if group is None:
        return
    group.unshard = partial(_gather, group, collectives)
    group.wait_for_unshard = partial(_wait_for_gather, group)
    group._to_sharded = partial(_free, group)
    group.post_backward = partial(_reduce, group, collectives, reduces)


@torch.no_grad()
def _gather(group: Any, collectives: Collectives, async_op: bool = False) -> None:
    """`FSDPParamGroup.unshard`."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult

    skipped = not group.unshard_in_backward and group._training_state.name == "PRE_BACKWARD"
    if group._all_gather_result is not None or group.is_unsharded or skipped:
        return
    _, stream = group.comm_ctx.get_all_gather_streams(async_op, group._training_state)
    ranks, rank = group._all_gather_process_group.size(), group._all_gather_process_group.rank()
    shards: list[Tensor] = []
    gathered: list[Tensor] = []
    casts: list[tuple[Tensor, Tensor]] = []
    with group.device_handle.stream(stream):
        for parameter in group.fsdp_params:
            extended = hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather")
            own = parameter.all_gather_inputs if extended else [parameter._sharded_param_data]
            dtypes = [x.dtype if extended else parameter.param_dtype or x.dtype for x in own]
            parameter.init_all_gather_outputs([x.numel() for x in own], dtypes, ranks, group.device)
            parameter.alloc_all_gather_outputs()
            for x, whole in zip(own, parameter.all_gather_outputs, strict=True):
                part = whole.narrow(0, x.numel() * rank, x.numel())
                if not extended:
                    casts.append((part, x))
                shards.append(x if extended else part)
                gathered.append(whole)
        with torch.autograd._unsafe_preserve_version_counter(tuple(gathered)):  # type: ignore[attr-defined]
            if casts:
                collectives.cast([x for _, x in casts], [part for part, _ in casts])
            collectives.gather(shards, gathered)
        done = stream.record_event()
    group._all_gather_result = AllGatherResult(torch.empty(0), done, None, [], [], [])


def _wait_for_gather(group: Any) -> None:
    """`FSDPParamGroup.wait_for_unshard`."""
    if group._all_gather_result is None:
        return
    group.device_handle.current_stream().wait_event(group._all_gather_result.all_gather_event)
    for parameter in group.fsdp_params:
        parameter.init_unsharded_param()
    group._to_unsharded()
    group._all_gather_result = None


def _free(group: Any) -> None:
    """`FSDPParamGroup._to_sharded`: what is gathered next, into the memory that this frees, waits for the passes that read it."""
    if not group.is_sharded:
        type(group)._to_sharded(group)
        read = group.device_handle.Event()
        read.record()
        group._wait_all_gather_streams_on_event(read)


@torch.no_grad()
def _reduce(group: Any, collectives: Collectives, reduces: bool, *unused: Any) -> None:
    """`FSDPParamGroup.post_backward`. Gradients that were accumulated unsharded are in the dtype of the sum: further ones are added
    here, and the sum is left to `fully_shard`."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import ReduceScatterState

    fresh = [p for p in group.fsdp_params if hasattr(p, "_unsharded_param") and p._unsharded_param.grad is not None]
    accumulated = any(p.unsharded_accumulated_grad is not None for p in group.fsdp_params)
    further = [p for p in fresh if p.unsharded_accumulated_grad is not None]
    if further:
        collectives.add([p._unsharded_param.grad for p in further], [p.unsharded_accumulated_grad for p in further])
        for parameter in further:
            parameter._unsharded_param.grad = None
    if accumulated or not fresh or not group.reduce_grads or not reduces:
        return type(group).post_backward(group, *unused)
    group._training_state = type(group._training_state).POST_BACKWARD
    current, shared = group.device_handle.current_stream(), group.comm_ctx
    several = hasattr(shared, "reduce_scatter_states")  # from PyTorch 2.13
    for state in shared.reduce_scatter_states if several else [shared.reduce_scatter_state]:
        if state is not None and state.event is not None:
            current.wait_event(state.event)
    _hold(shared, [])  # what was sent for the module before
    gradients = [p.unsharded_grad_data for p in fresh]
    for parameter in fresh:
        parameter._unsharded_param.grad = None
    if group.reshard_after_backward:
        group.reshard()
    sent = collectives.prepared(gradients)
    del gradients
    stream = shared.reduce_scatter_stream
    stream.wait_stream(current)
    with group.device_handle.stream(stream):
        for parameter, shard in zip(fresh, collectives.reduced(sent), strict=True):
            one = torch.as_strided(shard, parameter.sharded_size, parameter.contiguous_sharded_stride)
            held = parameter.sharded_param.grad
            if held is None:
                parameter.sharded_param.grad = parameter.to_sharded_dtensor(one)
            else:
                held._local_tensor.add_(one)
        done = stream.record_event()
    group._post_reduce_event = done
    _hold(shared, [ReduceScatterState(sent, done)])  # type: ignore[arg-type]
    if several:
        shared._last_post_reduce_events[stream] = done
    return None


def _hold(shared: Any, states: list[Any]) -> None:
    """Keep what is being sent until it has been sent."""
    if hasattr(shared, "reduce_scatter_states"):
        shared.reduce_scatter_states[:] = states
    else:
        shared.reduce_scatter_state = states[0] if states else None
