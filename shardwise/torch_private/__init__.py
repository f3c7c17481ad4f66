"""All uses of PyTorch's private APIs, each with why no public one does; those of `fully_shard` are in a file of their own. They are
in PyTorch 2.11 to 2.13; check here for others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage, nn
from torch._C._profiler import _RecordFunctionFast
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["TorchDispatchMode", "tree_leaves", "tree_map_only"]  # documented, but not importable from a public module


class BareDispatchMode(TorchDispatchMode):
    _should_skip_dynamo = classmethod(lambda cls: False)
    """Skips the guard against the compiler around every operator; for use where nothing is compiled meanwhile."""


# Operators. They are aliases, so that the compiler and the dispatcher see PyTorch's own.

scaled_mm = torch._scaled_mm
"""A GEMM of fp8 matrices with their scales."""
int_mm = torch._int_mm
"""A GEMM of int8 matrices, accumulated in int32."""
flash_attention_forward = torch.ops.aten._flash_attention_forward
"""Flash attention with `cu_seqlens` and a window; `scaled_dot_product_attention` supports neither."""
fused_sdp_choice = torch._fused_sdp_choice
"""The backend that `scaled_dot_product_attention` chooses for these inputs."""


def compile_cuda(source: str, name: str) -> Any:
    """A kernel in CUDA C++, compiled with the NVRTC that PyTorch ships, called as (grid, block, arguments, shared memory).
    Extensions would need a compiler on the user's machine."""
    return torch.cuda._compile_kernel(source, name)


def fused_attention_backward(
    grad: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, scale: float, causal: bool, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of fused attention by a kernel, from the output and log-sum-exp of full rows; the keys here may be a slice of them.
    No public function takes these two."""
    aten, queries, keys = torch.ops.aten, q.shape[2], k.shape[2]
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    if grad.stride() != out.stride() or grad.stride(-1) != 1:
        grad, out = grad.contiguous(), out.contiguous()
    lse = lse.contiguous()
    if backend == "cudnn":
        return aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse[..., None], seed, seed, None, None, None, queries, keys, 0.0, causal, scale=scale
        )
    if backend == "flash":
        state = torch.zeros(2, dtype=torch.int64, device=q.device)
        return aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, queries, keys, 0.0, causal, state, seed, scale=scale
        )
    shared = q.shape[1] // k.shape[1]  # query heads per key/value head
    every_k, every_v = (x if shared == 1 else x.repeat_interleave(shared, dim=1) for x in (k, v))
    padded = torch.nn.functional.pad(lse, (0, -queries % 32))
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, every_k, every_v, None, out, padded, seed, seed, 0.0, [True, True, True, False], causal, scale=scale
    )
    return dq, *(x.unflatten(1, (k.shape[1], -1)).sum(dim=2) for x in (dk, dv))


foreach_norm, foreach_mul_, foreach_copy_ = torch._foreach_norm, torch._foreach_mul_, torch._foreach_copy_
"""One kernel over many tensors, as PyTorch's optimizers use them."""
preserved_versions = torch.autograd.grad_mode._unsafe_preserve_version_counter
"""Autograd does not notice in-place writes while it is open."""


def adamw_(
    parameter: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: Tensor, lr: float, betas: tuple[float, float],
    eps: float, decay: float,
) -> None:  # fmt: skip
    """The update of `torch.optim.AdamW(fused=True)` for a slice of a parameter; an optimizer takes only full parameters."""
    torch._fused_adamw_(
        [parameter], [gradient], [first], [second], [], [step], amsgrad=False, lr=lr, beta1=betas[0], beta2=betas[1],
        weight_decay=decay, eps=eps, maximize=False, grad_scale=None, found_inf=None,
    )  # fmt: skip


def is_fake(x: Tensor) -> bool:
    """Whether a tensor has no data (`FakeTensorMode`)."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(x, FakeTensor)


def raw_stream(device: int) -> int:
    """The handle of a GPU's current stream, without the object around it, which takes the host as long as a launch."""
    stream: int = torch._C._cuda_getCurrentRawStream(device)
    return stream


cuda_sleep = torch.cuda._sleep
"""Holds a stream for a number of cycles of the device's clock, to simulate work that is done elsewhere."""


def argument_names(operator: Any) -> tuple[str, ...]:
    """The names of an operator's arguments, in order."""
    return tuple(argument.name for argument in operator._schema.arguments)


def has_mkldnn_bf16() -> bool:
    """Whether oneDNN multiplies bf16 on this CPU. If not, it warns at every call before PyTorch falls back."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


# Tensors.

disabled_torch_function = torch._C._disabled_torch_function_impl
"""For a tensor subclass that overrides only operators."""


def wrapper_subclass(cls: type, like: Tensor, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> Any:
    """A tensor subclass without memory, on the device of `like`, with its shape or the given one."""
    if shape is not None:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=like.device)
    return torch.Tensor._make_wrapper_subclass(cls, like.shape, strides=like.stride(), dtype=dtype, device=like.device)


def version(x: Tensor) -> int:
    """Increases whenever a tensor is written in place; shows whether a copy of it is up to date."""
    return x._version


def storage_key(storage: UntypedStorage) -> int:
    """A key that is the same for all Python objects of one storage, while it is alive."""
    return storage._cdata


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Whether a module's state dict contains a buffer; needed to register a replacement."""
    return buffer not in module._non_persistent_buffers_set


@contextlib.contextmanager
def observed_resizes(resized: Callable[[UntypedStorage], Any]) -> Iterator[None]:
    """While it is open, `resized` is called after a storage changes its size. `fully_shard` frees memory this way, and no operator
    is dispatched for it. Storages have no hooks, so the method is replaced."""
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
    """The number of the running backward pass, larger for nested ones; -1 outside of any."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Whether autograd's engine is running; a forward pass inside it is recomputation."""
    return graph_task() != -1


def autograd_sequence() -> int:
    """The sequence number of the next node that this thread's forward pass creates; nodes and profiles record it too."""
    return torch._C._autograd._get_sequence_nr()


def autograd_node() -> tuple[str, int] | None:
    """Name and sequence number of the running node; None outside of a backward pass."""
    node = torch._C._current_autograd_node()
    return None if node is None else (node.name(), node._sequence_nr())


def autograd_number() -> int:
    """The sequence number of the running node, without its name, which takes longer to build; -1 outside of a backward pass."""
    node = torch._C._current_autograd_node()
    return -1 if node is None else node._sequence_nr()


fast_record_function = _RecordFunctionFast
"""A profiler span that costs a microsecond, a tenth of `torch.profiler.record_function`."""


def below_autograd() -> AbstractContextManager[None]:
    """While it is open, calls go to the device kernels. A kernel registered above them needs this to call its own operator."""
    return torch._C._AutoDispatchBelowAutograd()


def close_library(library: torch.library.Library) -> None:
    """Remove the kernels that a library registered, now and not when it is garbage-collected."""
    library._destroy()


# Compiler.


def cache_custom_autograd_functions() -> None:
    """Let compiled layers with one of our autograd functions (fp8) be cached for the next start. This is safe: the function's
    forward and backward are in the graph that is the cache's key."""
    from torch._functorch import config

    if hasattr(config, "autograd_cache_allow_custom_autograd_functions"):
        config.autograd_cache_allow_custom_autograd_functions = True


def compile_layers_whole() -> None:
    """Compile a layer as one graph inside of DistributedDataParallel too. PyTorch cuts graphs at every bucket of gradients, so that
    all-reduces of a network that is compiled as a whole overlap; those of layers do anyway."""
    from torch._dynamo import config

    config.optimize_ddp = False


def recompute_without_random_numbers() -> None:
    """Let a compiled layer recompute attention as it is. PyTorch takes it for random, since it could drop scores: it would save
    and restore the state of a generator around each call, which a CUDA graph cannot record. Our layers draw no random numbers: what
    they drop follows from hashes. Where this name is missing (before PyTorch 2.1), steps are as right, and slower."""
    from torch._functorch import partitioners

    if hasattr(partitioners, "has_recomputable_rng_ops"):
        partitioners.has_recomputable_rng_ops = lambda fx_g: False


# CUDA.


def end_allocating_to_pool(device: int, pool: tuple[int, int]) -> None:
    """Clean up after the capture of a CUDA graph failed: otherwise the allocator believes that it continues, and keeps the memory
    reserved for it."""
    for undo in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
        with contextlib.suppress(RuntimeError):  # if PyTorch has already done so
            undo(device, pool)


# Process groups.


def flight_record() -> str:
    """The flight recorder's entries as JSON: which collectives began and ended. It was named after NCCL while it knew no others."""
    bindings = torch._C._distributed_c10d
    dump = getattr(bindings, "_dump_fr_trace_json", None) or getattr(bindings, "_dump_nccl_trace_json", None)
    return dump(True, False) if dump is not None else "{}"


def gloo_group(store: Any, rank: int, size: int, connect: timedelta, timeout: timedelta) -> dist.ProcessGroup:
    """A gloo group of processes without a common world, which `new_group` needs. They must connect within `connect`."""
    kind = dist.ProcessGroup.BackendType.GLOO
    backend = dist.ProcessGroupGloo(store, rank, size, connect)
    backend._set_default_timeout(timeout)
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, backend)
    return group


def group_named(name: str) -> Any:
    """The process group of that name. Operators take names, since a compiled graph can hold them."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


def fake_process_group(rank: int, world: int) -> None:
    """Start the process group of one rank of a world that does not exist; collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    _coalesced_without_data()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)


@cache
def _coalesced_without_data() -> torch.library.Library:
    """PyTorch has no kernels without data for collectives of several tensors, as it has for those of one."""
    from torch._C._distributed_c10d import FakeWork

    library = torch.library.Library("c10d", "IMPL")
    for name in ("allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_"):
        library.impl(name, lambda *_: FakeWork().boxed(), "Meta")
    return library  # its kernels go when it does


def fake_tensors() -> AbstractContextManager[Any]:
    """While it is open, tensors have shapes but no data."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)
