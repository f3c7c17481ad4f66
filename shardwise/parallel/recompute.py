"""Recomputation (Chen et al. 2016): activations are thrown away in the forward pass and computed again in the backward pass.

`full` keeps a block's input alone, at the price of a third more work; `attention` repeats only the part whose memory grows with
the square of the sequence (Korthikanti et al. 2022); `operations` repeats the named parts; `budget` repeats as few whole blocks
as the budget needs, by the planner's count of what a block keeps. The first three may be limited to every n-th layer.
Traffic inside a repeated part is repeated too, but for what comes after the last tensor that its backward pass needs. Routers
do not count a repeated token twice.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.model.attention import GroupedAttention, LatentAttention
from shardwise.model.layers import Norm
from shardwise.model.moe import Router
from shardwise.model.transformer import Block, Transformer
from shardwise.plan.trainer.rank import PlannedRank
from shardwise.run import Run


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


def apply_recompute(model: Transformer, run: Run, rank: int) -> None:
    """Mark what the backward pass repeats."""
    layout = run.layout
    blocks = [block for block in model.layers.values() if isinstance(block, Block)]
    if layout.recompute == "budget":
        again = {str(layer) for layer, parts_again in PlannedRank(run, rank).layers() if parts_again}
        for name, block in model.layers.items():
            if name in again:
                repeat(block)
        return
    for block in blocks[:: layout.recompute_every]:
        if layout.recompute == "full":
            repeat(block)
        kinds = {"operations": layout.recompute_operations, "attention": ("attention",)}.get(layout.recompute, ())
        for kind in kinds:
            for module in parts(block, kind):
                repeat(module)
