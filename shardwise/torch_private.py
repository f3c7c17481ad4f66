"""Every call of PyTorch that is not public, in one place. Each says what is needed that nothing public gives. All of them are in
PyTorch 2.11 to 2.13; for another version, go through this file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage, nn
from torch._C._profiler import _RecordFunctionFast
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["TorchDispatchMode", "tree_leaves", "tree_map_only"]  # documented, but without a public address


class BareDispatchMode(TorchDispatchMode):
    _should_skip_dynamo = classmethod(lambda cls: False)
    """No guard against the compiler around every operator: for where nothing is compiled meanwhile."""


# Operators. They are aliases, so that the compiler and the dispatcher meet PyTorch's own.

scaled_mm = torch._scaled_mm
"""A GEMM of fp8 matrices with their scales."""
int_mm = torch._int_mm
"""A GEMM of int8 matrices, added up in int32."""
flash_attention_forward = torch.ops.aten._flash_attention_forward
"""Flash attention with `cu_seqlens` and a window; `scaled_dot_product_attention` takes neither."""
fused_sdp_choice = torch._fused_sdp_choice
"""Which backend `scaled_dot_product_attention` takes for these inputs."""


def compile_cuda(source: str, name: str) -> Any:
    """A kernel in CUDA C++, compiled with the NVRTC that PyTorch brings, called as (grid, block, arguments, shared memory).
    Extensions need a compiler of the user's."""
    return torch.cuda._compile_kernel(source, name)


def fused_attention_backward(
    grad: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, scale: float, causal: bool, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of fused attention by a kernel, given the output and the log-sum-exp of whole rows, of which the keys here may be a
    part. Nothing public takes these two."""
    aten, queries, keys = torch.ops.aten, q.shape[2], k.shape[2]
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    grad, out, lse = grad.contiguous(), out.contiguous(), lse.contiguous()
    if backend == "cudnn":
        return aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse[..., None], seed, seed, None, None, None, queries, keys, 0.0, causal, scale=scale
        )
    if backend == "flash":
        state = torch.zeros(2, dtype=torch.int64, device=q.device)
        return aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, queries, keys, 0.0, causal, state, seed, scale=scale
        )
    shared = q.shape[1] // k.shape[1]  # queries of a key/value head
    every_k, every_v = (x if shared == 1 else x.repeat_interleave(shared, dim=1) for x in (k, v))
    padded = torch.nn.functional.pad(lse, (0, -queries % 32))
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, every_k, every_v, None, out, padded, seed, seed, 0.0, [True, True, True, False], causal, scale=scale
    )
    return dq, *(x.unflatten(1, (k.shape[1], -1)).sum(dim=2) for x in (dk, dv))


foreach_norm, foreach_mul_, foreach_copy_ = torch._foreach_norm, torch._foreach_mul_, torch._foreach_copy_
"""One kernel over many tensors, as PyTorch's optimizers use them."""
preserved_versions = torch.autograd.grad_mode._unsafe_preserve_version_counter
"""Autograd does not see what is written while it is open."""


def adamw_(
    parameter: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: Tensor, lr: float, betas: tuple[float, float],
    eps: float, decay: float,
) -> None:  # fmt: skip
    """What `torch.optim.AdamW(fused=True)` does to one parameter, here to a slice of it: an optimizer takes whole ones."""
    torch._fused_adamw_(
        [parameter], [gradient], [first], [second], [], [step], amsgrad=False, lr=lr, beta1=betas[0], beta2=betas[1],
        weight_decay=decay, eps=eps, maximize=False, grad_scale=None, found_inf=None,
    )  # fmt: skip


def is_fake(x: Tensor) -> bool:
    """Whether a tensor has no data (`FakeTensorMode`)."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(x, FakeTensor)


cuda_sleep = torch.cuda._sleep
"""Holds a stream for so many cycles of the device's clock, to stand in for work that is done elsewhere."""


def operator_of(custom: Any) -> Any:
    """The operator that `torch.library.custom_op` has made, as graphs and dispatch modes name it."""
    return custom._opoverload


def argument_names(operator: Any) -> tuple[str, ...]:
    """What an operator calls its arguments, in order."""
    return tuple(argument.name for argument in operator._schema.arguments)


def has_mkldnn_bf16() -> bool:
    """Whether oneDNN multiplies bf16 on this CPU: where it does not, it warns at every call before PyTorch falls back."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


# Tensors.

disabled_torch_function = torch._C._disabled_torch_function_impl
"""For a tensor subclass that overrides operators alone."""


def wrapper_subclass(cls: type, like: Tensor, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> Any:
    """A tensor subclass without memory, of the device of another, and of its shape or a given one."""
    if shape is not None:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=like.device)
    return torch.Tensor._make_wrapper_subclass(cls, like.shape, strides=like.stride(), dtype=dtype, device=like.device)


def version(x: Tensor) -> int:
    """Grows whenever a tensor is written in place: tells whether a copy made of it is up to date."""
    return x._version


def storage_key(storage: UntypedStorage) -> int:
    """The same for all Python objects of one storage, while it is alive."""
    return storage._cdata


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Whether a module's state dict holds a buffer: needed to register another in its place."""
    return buffer not in module._non_persistent_buffers_set


@contextlib.contextmanager
def observed_resizes(resized: Callable[[UntypedStorage], Any]) -> Iterator[None]:
    """While it is open, `resized` is called after storages change their size, by which `fully_shard` frees memory: no operator is
    dispatched for it. Storages have no hooks, so the method is replaced."""
    resize = UntypedStorage.resize_

    def observed(storage: UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        resized(storage)
        return result

    UntypedStorage.resize_ = observed  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        UntypedStorage.resize_ = resize  # type: ignore[method-assign]


# Autograd, profiler, dispatcher.


def graph_task() -> int:
    """The number of the backward pass that runs this, larger for those nested in it; -1 outside of any."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Whether autograd's engine runs this: a forward pass is recomputation then."""
    return graph_task() != -1


def autograd_sequence() -> int:
    """The number of the next node that this thread's forward pass will make; nodes and profiles name it too."""
    return torch._C._autograd._get_sequence_nr()


def autograd_node() -> tuple[str, int] | None:
    """Name and number of the node that runs; None outside of a backward pass."""
    node = torch._C._current_autograd_node()
    return None if node is None else (node.name(), node._sequence_nr())


def autograd_number() -> int:
    """The number of the node that runs, without its name, which takes longer to make; -1 outside of a backward pass."""
    node = torch._C._current_autograd_node()
    return -1 if node is None else node._sequence_nr()


fast_record_function = _RecordFunctionFast
"""A span of a profile that takes a microsecond, a tenth of `torch.profiler.record_function`."""


def below_autograd() -> AbstractContextManager[None]:
    """Calls go to the kernels of devices: a kernel that was put above them needs it to call its own operator."""
    return torch._C._AutoDispatchBelowAutograd()


def close_library(library: torch.library.Library) -> None:
    """Take off the kernels that a library has put on operators, now and not when it is collected."""
    library._destroy()


# Compiler.


def cache_custom_autograd_functions() -> None:
    """Let compiled layers with an autograd function of ours (fp8) be cached for the next start: what the function does, both ways,
    is in the graph that is the cache's key."""
    from torch._functorch import config

    if hasattr(config, "autograd_cache_allow_custom_autograd_functions"):
        config.autograd_cache_allow_custom_autograd_functions = True


# CUDA.


def end_allocating_to_pool(device: int, pool: tuple[int, int]) -> None:
    """After a CUDA graph's recording failed: its allocator believes that it goes on, and keeps the memory set apart for it."""
    for undo in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
        with contextlib.suppress(RuntimeError):  # where PyTorch has done so itself
            undo(device, pool)


# Process groups.


def flight_record() -> str:
    """The flight recorder's entries as JSON: which collectives began and ended. It was named after NCCL until it knew others."""
    bindings = torch._C._distributed_c10d
    dump = getattr(bindings, "_dump_fr_trace_json", None) or getattr(bindings, "_dump_nccl_trace_json", None)
    return dump(True, False) if dump is not None else "{}"


def gloo_group(store: Any, rank: int, size: int, connect: timedelta, timeout: timedelta) -> dist.ProcessGroup:
    """A group, on gloo, of processes without a common world, which `new_group` needs. They must meet within `connect`."""
    kind = dist.ProcessGroup.BackendType.GLOO
    backend = dist.ProcessGroupGloo(store, rank, size, connect)
    backend._set_default_timeout(timeout)
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, backend)
    return group


def group_named(name: str) -> Any:
    """The process group of that name: operators take names, which a compiled graph can hold."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


def fake_process_group(rank: int, world: int) -> None:
    """Start the process group of one rank of a world that does not exist: collectives answer at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)


def fake_tensors() -> AbstractContextManager[Any]:
    """While it is open, tensors have shapes and no data."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


# fully_shard: what it holds, and when it communicates.


def local_shard(x: Tensor) -> Tensor:
    """This rank's shard of a DTensor, without the autograd node that `to_local` makes."""
    return x._local_tensor if hasattr(x, "_local_tensor") else x


def sharded_groups(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """The modules whose parameters `fully_shard` gathers together, with its `FSDPParamGroup`, which knows what is gathered."""
    from torch.distributed.fsdp import FSDPModule

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


def reduce_sharded_gradients(model: nn.Module) -> None:
    """Start the reduction of gradients that were finished outside of the backward passes that `fully_shard` watches, and wait for
    it, the way PyTorch's own pipelining does it."""
    from torch.distributed.fsdp import fully_shard

    state = fully_shard.state(model)  # type: ignore[attr-defined]
    for each in state._state_ctx.all_states:
        if each._fsdp_param_group:
            for parameter in each._fsdp_param_group.fsdp_params:
                # Gradients deferred to the very end come in low precision, beside others already cast for the sum.
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()
            each._fsdp_param_group.post_backward()
    state._root_post_backward_final_callback()


def keep_secondary_shards(module: Any, mesh: Any) -> None:
    """Let a module's parameters stay sharded over the second dimension of a mesh between a forward pass and its backward pass. What
    is public (`reshard_after_forward` with a number) makes process groups for each module, by calls that all ranks must make."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

    group = module._get_fsdp_state()._fsdp_param_group
    group.post_forward_mesh_info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    for parameter in group.fsdp_params:
        parameter.post_forward_mesh_info = group.post_forward_mesh_info
        parameter._init_sharded_post_forward_param_metadata(torch.empty(parameter._orig_size, device="meta"))


def gathered_tensors(group: Any) -> Iterator[Tensor]:
    """Whole parameters that a group has gathered from their shards, secondary shards, and the buffers of the all-gathers."""
    for parameter in group.fsdp_params:
        yield from parameter.all_gather_outputs
        kept = (getattr(parameter, name, None) for name in ("_sharded_post_forward_param_data", "_unsharded_param"))
        yield from (x for x in kept if x is not None)
    ahead = getattr(group.comm_ctx, "all_gather_state", None)  # there once a pass has run
    for result in (group._all_gather_result, ahead.all_gather_result if ahead is not None else None):
        yield from (x for x in tree_leaves(result and tuple(result)) if isinstance(x, Tensor))


def unreduced_gradients(group: Any) -> Iterator[Tensor | None]:
    """Gradients that wait to be added over ranks: whole ones, and shards of those that replicas have yet to add."""
    yield group._partial_reduce_output
    for parameter in group.fsdp_params:
        yield parameter.unsharded_accumulated_grad
        whole = getattr(parameter, "_unsharded_param", None)
        yield whole.grad if whole is not None else None


class ShardedParameter(NamedTuple):
    """One of a module's parameters that `fully_shard` has cut."""

    module: nn.Module
    name: str
    shape: tuple[int, ...]
    shard: Tensor
    extend: Callable[[], None]
    """To be called once the shard has methods of its own for the all-gather: `fully_shard` looks for them."""
    allocate: Callable[[torch.device], Tensor]
    """Gives memory on a device, or on the host if it is offloaded, to a shard on the meta device, and returns it."""
    memory: Callable[[], Tensor]
    """All of the shard's memory, with padding: what is gathered."""


def sharded_parameters(module: Any) -> Iterator[ShardedParameter]:
    """The parameters that are gathered together for a module."""
    group = module._get_fsdp_state()._fsdp_param_group
    for parameter in group.fsdp_params if group is not None else ():
        info = parameter._module_info
        named = info.module, info.param_name, tuple(parameter._orig_size), parameter._sharded_local_tensor
        made = partial(_allocate_shard, parameter), partial(getattr, parameter, "_sharded_param_data")
        yield ShardedParameter(*named, parameter._init_extensions, *made)


def _allocate_shard(parameter: Any, device: torch.device) -> Tensor:
    """`fully_shard` would pad a shard that is not as long as others, and pin an offloaded one, by copies that it makes in the first
    pass, when optimizers hold the shard already: so the memory is made as it wants it."""
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
