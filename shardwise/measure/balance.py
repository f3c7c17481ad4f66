"""Routing as even as it can be, for measuring: what experts cost then depends on the layout alone, and not on a text."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.model.moe import Router
from shardwise.train.step import TrainState


def _round_robin(router: nn.Module, args: Any, routed: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """A forward hook: the choices of a router, replaced by each expert in turn."""
    assert isinstance(router, Router)
    weights, chosen, auxiliary = routed
    order = torch.arange(chosen.numel(), device=chosen.device).view_as(chosen)
    return weights, order % router.config.experts, auxiliary


@contextlib.contextmanager
def even_routing(train_state: TrainState) -> Iterator[None]:
    """While it is open, tokens go to the experts in turn."""
    hooks = [router.register_forward_hook(_round_robin) for router in train_state.routers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
