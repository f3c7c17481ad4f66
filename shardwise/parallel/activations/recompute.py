"""Activation checkpointing (Chen et al. 2016): activations are dropped in the forward pass and recomputed in the backward pass.

`full` saves only a block's input, at the price of a third more work; `attention` recomputes only the part whose memory grows with
the square of the sequence (Korthikanti et al. 2022); `operations` recomputes the named parts; `budget` recomputes as few whole
blocks as the memory allows, by the planner's count of a block's saved tensors; `optimal` recomputes single tensors, those that take
the least time for the memory that must be saved (`rematerialize.py`). The first three may be limited to every n-th layer.
Communication inside a recomputed part happens once more, except after the last tensor that its backward pass needs. Routers do not
count a recomputed token twice.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.model.attention import GroupedAttention, LatentAttention
from shardwise.model.layers import Norm
from shardwise.model.moe.layer import Router
from shardwise.model.transformer import Block, Transformer
from shardwise.parallel.activations.quantized import quantized_in
from shardwise.parallel.activations.rematerialize import keep_in_form, rematerialize, rematerialize_squares
from shardwise.parallel.activations.swap import Swap
from shardwise.parallel.observer import Observers
from shardwise.plan.trainer.rank import PlannedRank
from shardwise.run import Run
from shardwise.run.derive import recomputes_in_graph
from shardwise.run.saved_tensors import ELSEWHERE, quantized_tensors


@contextlib.contextmanager
def _recomputing(module: nn.Module, routers: list[Router], observers: Observers) -> Iterator[None]:
    for router in routers:
        router.counting = False
    try:
        with observers.recompute(module):
            yield
    finally:
        for router in routers:
            router.counting = True


def checkpoint_module(module: nn.Module, observers: Observers) -> None:
    """Make a module recompute its forward in the backward pass."""
    forward = module.forward

    @functools.cache  # filled in the first step, since modules may be replaced before it
    def routers() -> list[Router]:
        return [each for each in module.modules() if isinstance(each, Router)]

    @functools.wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)

        def contexts() -> tuple[Any, Any]:
            return contextlib.nullcontext(), _recomputing(module, routers(), observers)

        # Tensors inside of a plain tuple (rope's) become separate arguments, so that autograd saves them like the
        # others.
        lengths = [len(arg) if type(arg) is tuple else 0 for arg in args]
        flat = [x for arg in args for x in (arg if type(arg) is tuple else (arg,))]

        def together(*flat: Any, **kwargs: Any) -> Any:
            rest = iter(flat)
            return forward(*(tuple(islice(rest, n)) if n else next(rest) for n in lengths), **kwargs)

        return checkpoint(together, *flat, use_reentrant=False, context_fn=contexts, preserve_rng_state=False, **kwargs)

    module.forward = checkpointed


def recomputed_in_graph(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A function to be compiled, which recomputes itself in its own backward graph: only what that needs, and not its output."""

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return recomputed


def recomputed_blocks(model: Transformer, run: Run, rank: int) -> list[Block]:
    """The layers that are recomputed as a whole."""
    blocks = [(int(name), block) for name, block in model.layers.items() if isinstance(block, Block)]
    if run.layout.recompute == "full":
        return [block for _, block in blocks[:: run.layout.recompute_every]]
    if run.layout.recompute != "budget":
        return []
    planned = PlannedRank(run, rank).recomputed
    return [block for number, block in blocks if "block" in planned[number]]


def parts(block: Block, kind: str) -> Iterator[nn.Module]:
    """The parts of a block that a word of `layout.recompute_operations` names."""
    if kind == "attention":
        assert isinstance(block.attention, GroupedAttention | LatentAttention)
        yield block.attention.core
    elif kind == "norm":
        yield from (m for m in block.modules() if isinstance(m, Norm))
    elif kind == "ffn":
        yield block.ffn


def apply_recompute(
    model: Transformer, run: Run, rank: int, observers: Observers, swap: Swap | None = None, *, gpu: bool = False
) -> None:
    """Recompute the modules of the layout's mode in the backward pass, or let their saved tensors wait elsewhere. Layers that were
    compiled with their recomputation stay as they are."""
    layout, in_graph = run.layout, recomputes_in_graph(run, gpu=gpu)
    if run.memory.activation_bits:
        m = run.model
        for name, block in model.layers.items():
            assert isinstance(block, Block)
            words = quantized_tensors(
                routed=m.is_moe(int(name)), parallel_block=m.parallel_block, gated=m.gated, activation=m.activation
            )
            keep_in_form(block, words, quantized_in(run.memory.activation_bits))
    blocks = [block for block in model.layers.values() if isinstance(block, Block)]
    for block in blocks if run.memory.lossless else ():
        rematerialize_squares(block)
    if layout.recompute in ("budget", "optimal") or swap is not None:
        planned = PlannedRank(run, rank).recomputed
        for name, block in model.layers.items():
            if "block" in planned[int(name)]:
                if not in_graph:
                    checkpoint_module(block, observers)
            elif isinstance(block, Block):
                words = planned[int(name)]
                away = {word.removeprefix(ELSEWHERE) for word in words if word.startswith(ELSEWHERE)}
                rematerialize(block, words - {f"{ELSEWHERE}{word}" for word in away})
                if swap is not None:
                    keep_in_form(block, away, swap.form)
        return
    for block in recomputed_blocks(model, run, rank) if not in_graph else ():
        checkpoint_module(block, observers)
    for block in blocks[:: layout.recompute_every]:
        kinds = {"operations": layout.recompute_operations, "attention": ("attention",)}.get(layout.recompute, ())
        for kind in kinds:
            for module in parts(block, kind):
                checkpoint_module(module, observers)
