"""One rank of a job of any size on this machine, with fake tensors and a fake process group.

The trainer itself runs, with the layout's own mesh, sharding, schedule and messages; only the data is missing. So shapes are
checked, and FLOPs, traffic and memory counted, before a single device is rented. Routing is made even for measuring, here and
on real ranks, so that the cost of experts depends on the layout alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.model.moe import Experts, Router
from shardwise.parallel.mesh import Mesh
from shardwise.run import Run
from shardwise.torch_private import fake_process_group, fake_tensors
from shardwise.train.step import TrainState


def _even(counts: Tensor, total: int) -> list[list[int]]:
    """The counts of an even load, in place of those that the host would read."""
    rows, parts = counts.shape
    return [[total // parts + (n < total % parts) for n in range(parts)] for _ in range(rows)]


@contextlib.contextmanager
def dry_rank(run: Run, rank: int) -> Iterator[TrainState]:
    """The train state of one rank, without data."""
    world = run.layout.world
    if world > 1 or run.layout.offload:
        fake_process_group(rank, world)
    try:
        mesh = Mesh(run.layout)
        if dist.is_initialized():  # PyTorch's device meshes need real tensors
            for axis in ("zero", "expert_shard"):
                mesh.sharding(axis)
        with fake_tensors():
            train_state = TrainState(run, mesh)
            train_state.checks_overflow = False
            for model in train_state.parallel.models:
                for module in model.modules():
                    if isinstance(module, Experts):
                        module.read_counts = _even
            yield train_state
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _round_robin(router: nn.Module, args: Any, routed: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """A forward hook that replaces a router's choices by the experts round-robin."""
    assert isinstance(router, Router)
    weights, chosen, auxiliary = routed
    order = torch.arange(chosen.numel(), device=chosen.device).view_as(chosen)
    return weights, order % router.config.experts, auxiliary


@contextlib.contextmanager
def even_routing(train_state: TrainState) -> Iterator[None]:
    """While it is open, tokens are routed to the experts round-robin."""
    hooks = [router.register_forward_hook(_round_robin) for router in train_state.routers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
