"""Recomputation (Chen et al. 2016): activations are thrown away in the forward pass and computed again in the backward pass.

`full` keeps a block's input alone, at the price of a third more work; `attention` repeats only the part whose memory grows with
the square of the sequence (Korthikanti et al. 2022); `operations` repeats the named parts; `budget` repeats as few whole blocks
as the budget needs, by measuring what a block keeps on tensors without data. The first three may be limited to every n-th layer.
Traffic inside a repeated part is repeated too, but for what comes after the last tensor that its backward pass needs. Routers
do not count a repeated token twice.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from shardwise.model.attention import GroupedAttention, LatentAttention
from shardwise.model.experts import Mixture, Router
from shardwise.model.fp8 import use_eight_bits
from shardwise.model.layers import Norm
from shardwise.model.rotary import rotation
from shardwise.model.transformer import Block, Transformer
from shardwise.run import ModelConfig, Run


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


def repeat(module: nn.Module) -> None:
    """Make a module compute itself again in the backward pass."""
    forward = module.forward

    @functools.wraps(forward)
    def repeated(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)

        def contexts() -> tuple[Any, Any]:
            return contextlib.nullcontext(), _not_counting(module)

        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, preserve_rng_state=False, **kwargs)

    module.forward = repeated


def parts(block: Block, kind: str) -> Iterator[nn.Module]:
    """The parts of a block that a word of `layout.recompute_operations` names."""
    if kind == "attention":
        assert isinstance(block.attention, GroupedAttention | LatentAttention)
        yield block.attention.core
    elif kind == "norm":
        yield from (m for m in block.modules() if isinstance(m, Norm))
    elif kind == "ffn":
        yield block.ffn


def apply_recompute(model: Transformer, run: Run) -> None:
    """Mark what the backward pass repeats."""
    layout = run.layout
    blocks = [block for block in model.layers.values() if isinstance(block, Block)]
    if layout.recompute == "budget":
        for block in over_budget(blocks, run):
            repeat(block)
        return
    for block in blocks[:: layout.recompute_every]:
        if layout.recompute == "full":
            repeat(block)
        kinds = {"operations": layout.recompute_operations, "attention": ("attention",)}.get(layout.recompute, ())
        for kind in kinds:
            for module in parts(block, kind):
                repeat(module)


def saved_bytes(
    config: ModelConfig, routed: bool, batch: int, length: int, dtype: torch.dtype, fp8: str = "none"
) -> int:
    """Bytes one block keeps for the backward pass of a microbatch, measured on tensors without data.

    Experts are counted as one dense layer of the width a token meets.
    """
    width = config.expert_ffn * (config.experts_per_token + config.shared_experts) if routed else config.ffn
    dense = replace(config, experts=0, experts_per_token=0, shared_experts=0, dense_layers=0, ffn=width)
    kept: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return x

    with FakeTensorMode():
        block = Block(dense, 0)
        if fp8 != "none":
            use_eight_bits(block, fp8)
        parameters = {p.untyped_storage()._cdata for p in block.parameters()}
        x = torch.empty(batch, length, config.hidden, dtype=dtype, requires_grad=True)
        turn = rotation(dense, torch.arange(length)[None], dtype) if config.position == "rotary" else None
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            block(x, turn, None)
    return sum(size for storage, size in kept.items() if storage not in parameters)


def over_budget(blocks: list[Block], run: Run) -> list[Block]:
    """As few blocks as must be repeated for a microbatch to keep at most the budget; those that keep most go first."""
    train, layout = run.train, run.layout
    dtype = getattr(torch, train.dtype)
    length = train.seq_len // layout.context
    sizes = {
        routed: saved_bytes(run.model, routed, train.microbatch, length, dtype, train.fp8) // layout.tensor
        for routed in {isinstance(block.ffn, Mixture) for block in blocks}
    }
    entering = train.microbatch * length * run.model.hidden * dtype.itemsize // layout.tensor
    total = sum(sizes[isinstance(block.ffn, Mixture)] for block in blocks)
    repeated = []
    for block in sorted(blocks, key=lambda b: -sizes[isinstance(b.ffn, Mixture)]):
        if total <= layout.recompute_budget * 2**30:
            break
        total += entering - sizes[isinstance(block.ffn, Mixture)]
        repeated.append(block)
    return repeated
