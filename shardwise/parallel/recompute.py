"""Recomputation (Chen et al. 2016): activations are thrown away in the forward pass and computed again in the backward pass.

`full` keeps a block's input alone; `attention` repeats only the part whose memory grows with the square of the sequence
(Korthikanti et al. 2022); `operations` repeats the named kinds; `budget` repeats as few whole blocks as the budget needs, by
measuring what one block keeps. Every variant may be limited to every n-th layer. Routers do not count a repeated token twice.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwise.model.attention import GroupedAttention, LatentAttention
from shardwise.model.experts import Router
from shardwise.model.transformer import Block, Transformer
from shardwise.run import LayoutConfig

_aten = torch.ops.aten
KINDS: dict[str, set[Any]] = {
    "attention": {
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
    },
    "norm": {_aten._fused_rms_norm.default, _aten.native_layer_norm.default, _aten.rsqrt.default, _aten.pow.Tensor_Scalar},
    "activation": {_aten.silu.default, _aten.gelu.default, _aten.mul.Tensor},
    "matrix": {_aten.mm.default, _aten.addmm.default, _aten.bmm.default},
}  # fmt: skip


@contextlib.contextmanager
def _not_counting(module: nn.Module) -> Iterator[None]:
    routers = [m for m in module.modules() if isinstance(m, Router)]
    for router in routers:
        router.counting = False
    try:
        yield
    finally:
        for router in routers:
            router.counting = True


@contextlib.contextmanager
def _both(first: Any, second: Any) -> Iterator[None]:
    with first, second:
        yield


def _selective(kinds: tuple[str, ...]) -> Callable[[], tuple[Any, Any]]:
    repeated = set().union(*(KINDS[kind] for kind in kinds))

    def policy(ctx: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.PREFER_RECOMPUTE if operation in repeated else CheckpointPolicy.PREFER_SAVE

    return functools.partial(create_selective_checkpoint_contexts, policy)


def repeat(module: nn.Module, kinds: tuple[str, ...] = ()) -> None:
    """Make a module compute itself again in the backward pass: all of it, or just the named kinds of operations."""
    forward = module.forward

    def contexts() -> tuple[Any, Any]:
        first, again = _selective(kinds)() if kinds else (contextlib.nullcontext(), contextlib.nullcontext())
        return first, _both(again, _not_counting(module))

    @functools.wraps(forward)
    def repeated(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, preserve_rng_state=False, **kwargs)

    module.forward = repeated  # type: ignore[method-assign]


def saved_bytes(block: nn.Module, *args: Any) -> int:
    """Bytes that one forward pass of a block keeps for the backward pass, parameters not counted."""
    parameters = {p.untyped_storage().data_ptr() for p in block.parameters()}
    kept: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x), _not_counting(block):
        result = block(*args)
    del result
    return sum(kept.values())


def apply_recompute(model: Transformer, layout: LayoutConfig) -> None:
    """Mark the blocks, or their attention, that the backward pass repeats."""
    if layout.recompute in ("none", "budget"):
        return
    for block in list(model.layers.values())[:: layout.recompute_every]:
        assert isinstance(block, Block)
        if layout.recompute == "full":
            repeat(block)
        elif layout.recompute == "operations":
            repeat(block, layout.recompute_operations)
        else:
            assert isinstance(block.attention, GroupedAttention | LatentAttention)
            repeat(block.attention.core)


def fit_budget(model: Transformer, budget: float, block_bytes: list[int], input_bytes: int) -> int:
    """Repeat as few blocks as needed for one microbatch to keep at most `budget` bytes; gives how many are repeated.

    Blocks that keep most are repeated first. When even repeating all is too much, all are repeated.
    """
    blocks = list(model.layers.values())
    total = sum(block_bytes)
    repeated = 0
    for n in sorted(range(len(blocks)), key=lambda i: -block_bytes[i]):
        if total <= budget:
            break
        repeat(blocks[n])
        total += input_bytes - block_bytes[n]
        repeated += 1
    return repeated
