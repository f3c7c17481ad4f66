"""One rank of a job of any size on this machine, with fake tensors and a fake process group.

The trainer itself runs, with the layout's own mesh, sharding, schedule and messages; only the data is missing. This checks shapes
and counts FLOPs, traffic and memory before a single device is rented. For measuring, here and on real ranks, tokens are routed
evenly, so that the cost of experts depends on the layout alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.model.initialize import without_values
from shardwise.model.moe.layer import Experts, MoE, Router
from shardwise.parallel.mesh import Mesh
from shardwise.run import Run
from shardwise.run.derive import accepted_choices
from shardwise.torch_private import fake_process_group, fake_tensors
from shardwise.train.step import TrainState


def _even(run: Run, index: int, counts: Tensor, total: int) -> list[list[int]]:
    """The counts of an even load, replacing those that the host would read. Two rows of counts are an all-to-all's: the rows sent
    to each expert rank, and the rows received from each, where every rank sends the same to rank `index`. Otherwise they are the
    rows of each expert."""
    rows, parts = counts.shape
    slices = _slices(run) if rows == 2 else 1
    own = total // slices
    sent = [slices * (own // parts + (n < own % parts)) for n in range(parts)]
    return [sent, [sent[index]] * parts] if rows == 2 else [sent] * rows


def _slices(run: Run) -> int:
    """The number of tensor ranks whose rows each tensor rank holds."""
    return run.layout.tensor if run.layout.expert_tensor else 1


@contextlib.contextmanager
def dry_rank(run: Run, rank: int, watched: AbstractContextManager[Any] | None = None) -> Iterator[TrainState]:
    """The train state of one rank, without data. `watched` is open while it is built, and sees the initial values being drawn."""
    world = run.layout.world
    if world > 1 or run.layout.offload:
        fake_process_group(rank, world)
    try:
        mesh = Mesh(run.layout)
        if dist.is_initialized():  # PyTorch's device meshes need real tensors
            for axis in ("zero", "expert_shard"):
                mesh.sharding(axis)
            if run.layout.secondary_shard > 1:
                for axis in ("zero", *(("expert_shard",) if run.layout.expert_secondary_shard > 1 else ())):
                    mesh.secondary(axis)
        with fake_tensors():
            with watched or without_values():
                train_state = TrainState(run, mesh)
            train_state.checks_overflow = False
            for model in train_state.all_models:
                for module in model.modules():
                    if isinstance(module, Experts):
                        module.read_counts = partial(_even, run, mesh.index("expert"))
                    elif isinstance(module, MoE):
                        module.accepted = partial(_accepted, run)
            yield train_state
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _accepted(run: Run, weights: Tensor) -> Tensor:
    """As many choices as experts accept of an even load, instead of those with a nonzero weight."""
    part, length = accepted_choices(run.model, run.train.seq_len), run.train.seq_len * run.model.experts_per_token
    slices = _slices(run)
    return torch.arange(slices * (len(weights) // slices * part // length), device=weights.device)


def _round_robin(length: int, ranks: int) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """A forward hook that replaces a router's choices by the experts in round-robin order, alternating between the experts of all
    `ranks`. If the experts' capacity is below that load, the accepted choices are spread evenly over each sequence of `length`
    tokens, so that every rank has the same number."""

    def route(router: nn.Module, args: Any, routed: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        assert isinstance(router, Router)
        c = router.config
        weights, chosen, auxiliary = routed
        order = torch.arange(chosen.numel(), device=chosen.device)
        if c.expert_capacity:
            part, whole = accepted_choices(c, length), length * c.experts_per_token
            kept = (order + 1) * part // whole > order * part // whole
            order = kept.cumsum(0) - 1
            # Change the values only: the tensors saved for the backward pass stay as they are.
            weights.data.copy_(torch.where(kept.view_as(chosen), weights.data.clamp_min(1e-3), 0.0))
        turn = order.view_as(chosen) % c.experts
        return weights, turn % ranks * (c.experts // ranks) + turn // ranks, auxiliary

    return route


@contextlib.contextmanager
def even_routing(train_state: TrainState) -> Iterator[None]:
    """While it is open, tokens are routed to the experts round-robin."""
    route = _round_robin(train_state.run.train.seq_len, train_state.run.layout.expert)
    with contextlib.ExitStack() as hooks:
        for module in (module for model in train_state.all_models for module in model.modules()):
            if isinstance(module, Router):
                hooks.callback(module.register_forward_hook(route).remove)
        yield
