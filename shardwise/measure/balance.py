"""Routing as even as it can be, for measuring: what experts cost then depends on the layout alone, and not on a text."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardwise.model.moe import Router
from shardwise.train.step import TrainState


def _dealt_out(router: Router, forward: Any) -> Any:
    def routed(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights, chosen, auxiliary = forward(x)
        places = torch.arange(chosen.numel(), device=chosen.device).view_as(chosen)
        return weights, places % router.config.experts, auxiliary

    return routed


@contextlib.contextmanager
def even_routing(train_state: TrainState) -> Iterator[None]:
    """While it is open, tokens are dealt out to the experts in turn."""
    kept = [(router, router.forward) for router in train_state.routers]
    for router, forward in kept:
        router.forward = _dealt_out(router, forward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for router, forward in kept:
            router.forward = forward  # type: ignore[method-assign]
