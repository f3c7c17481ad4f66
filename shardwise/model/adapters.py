"""Adapters of low rank beside frozen matrices: LoRA (Hu et al. 2021) and its rank-stabilised form (Kalajdzievski 2023).

A matrix W [out, in] gets two small ones, A [rank, in] and B [out, rank]; its output is W x + s B A x. B starts at zero, so that
training begins with the network as it was. The factor s is on what A gives, the smallest tensor there is, so that the gradient of
the sum is that of both terms. `run/parameters.py` says which parameters there are, which are frozen, and how they are cut.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from shardwise.model.layers import Linear
from shardwise.model.moe import Experts
from shardwise.model.transformer import Transformer
from shardwise.run import AdapterConfig


class LowRank(nn.Module):
    """The adapter of one matrix."""

    enabled = True

    def __init__(self, columns: int, rows: int, adapter: AdapterConfig) -> None:
        super().__init__()
        self.A = Linear(columns, adapter.rank, bias=False)
        self.B = Linear(adapter.rank, rows, bias=False)
        self.scale = adapter.scale

    def forward(self, x: Tensor) -> Tensor | None:
        """What it adds to the output; nothing where it is switched off."""
        return self.B(self.A(x) * self.scale) if self.enabled else None


class LowRankExperts(nn.Module):
    """The adapters of stacked experts: for each of some of their matrices a stack of A and one of B."""

    enabled = True

    def __init__(self, experts: Experts, parts: list[str], adapter: AdapterConfig) -> None:
        super().__init__()
        for part in parts:
            count, rows, columns = getattr(experts, part).shape
            self.register_parameter(f"{part}_A", nn.Parameter(torch.empty(count, adapter.rank, columns)))
            self.register_parameter(f"{part}_B", nn.Parameter(torch.empty(count, rows, adapter.rank)))
        self.parts = frozenset(parts)
        self.scale = adapter.scale

    def forward(self, part: str, x: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor | None:
        """What they add to the product of one matrix of each expert with its rows; `multiply` takes rows and a stack."""
        if part not in self.parts or not self.enabled:
            return None
        down, up = getattr(self, f"{part}_A"), getattr(self, f"{part}_B")
        return multiply(multiply(x, down) * self.scale, up)


def put_on_adapters(model: Transformer, adapter: AdapterConfig) -> None:
    """Give the matrices that a run names their adapters, still without values."""
    if not adapter.used:
        return
    model.frozen_embedding = True
    for name, module in list(model.layers.named_modules()):
        if isinstance(module, Experts):
            parts = [part for part in ("gate", "up", "down") if adapter.adapts(part)]
            with torch.device(module.gate.device):
                module.lora = LowRankExperts(module, parts, adapter) if parts else None
        elif isinstance(module, Linear) and adapter.adapts(name):
            with torch.device(module.weight.device):
                module.lora = LowRank(module.in_features, module.out_features, adapter)


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """While it is open, the network computes without its adapters: what it was before it was tuned."""
    found = [module for module in model.modules() if isinstance(module, LowRank | LowRankExperts) and module.enabled]
    for each in found:
        each.enabled = False
    try:
        yield
    finally:
        for each in found:
            each.enabled = True
