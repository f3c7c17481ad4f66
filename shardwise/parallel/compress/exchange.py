"""The compressed exchange of gradients between replicas: once a step, after the passes, of the gradients that this rank holds.

The passes run as if each replica were alone, so every other axis works as without replicas: where parameters are sharded, a rank
exchanges its shard of the gradients with the ranks that hold the same shard. Nothing overlaps with the passes. Kept errors are of
gradients as the backward pass leaves them, before the token count divides them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.parallel.compress.compressor import Compressor, State
from shardwise.parallel.compress.onebit import OneBit
from shardwise.parallel.compress.powersgd import PowerSGD
from shardwise.parallel.compress.quantized import Quantized
from shardwise.parallel.compress.topk import TopK
from shardwise.parallel.gradients import all_reduce_together
from shardwise.parallel.local_parameter import LocalParameter, local
from shardwise.parallel.mesh import Mesh
from shardwise.run import LayoutConfig, TrainConfig

MomentumOf = Callable[[int], Tensor]
"""Adam's momentum of a parameter, by its index."""


class Exchange:
    """Sums this rank's gradients over the replicas."""

    def __init__(self, parameters: Sequence[LocalParameter], mesh: Mesh, train: TrainConfig) -> None:
        group = mesh.group("replicate")
        assert group is not None
        self.group, self.layout = group, mesh.layout
        held = {n: local(h.parameter.detach()) for n, h in enumerate(parameters) if not h.entry.frozen}
        self.indices = [n for n, shard in held.items() if shard.numel()]
        self.parameters = [parameters[n] for n in self.indices]
        self.compressor = make_compressor(mesh.layout, group, [held[n] for n in self.indices], train.beta1)

    def hides_norm(self, step: int) -> bool:
        """Whether the result of an exchange, in a step counted from 1, is the momentum, which does not show the gradients' size."""
        return isinstance(self.compressor, OneBit) and not self.is_plain(step)

    def is_plain(self, step: int) -> bool:
        """Whether gradients of a step are sent uncompressed."""
        return step <= self.layout.compress_warmup

    @torch.no_grad()
    def add_up(self, step: int, momentum_of: MomentumOf, factor: Tensor) -> None:
        """Sum the gradients of a step, counted from 1. The optimizer's momentum is of gradients times `factor`."""
        gradients = [gradient_of(h) for h in self.parameters]
        if self.is_plain(step):
            all_reduce_together(gradients, self.group)
            return
        if isinstance(self.compressor, OneBit):
            self.compressor.know([momentum_of(n) for n in self.indices], factor)
        self.compressor.add_up(gradients)

    def state_of(self, index: int) -> State:
        """The tensors kept for a parameter, by its index."""
        return self.compressor.states[self.indices.index(index)] if index in self.indices else {}


def make_compressor(
    layout: LayoutConfig, group: dist.ProcessGroup, tensors: Sequence[Tensor], beta: float
) -> Compressor:
    """The layout's method, for tensors like these."""
    match layout.compress:
        case "powersgd":
            return PowerSGD(group, tensors, layout.compress_rank)
        case "topk":
            return TopK(group, tensors, layout.compress_density, layout.compress_momentum)
        case "onebit":
            return OneBit(group, tensors, beta)
        case method:
            return Quantized(method, group, tensors)


def gradient_of(held: LocalParameter) -> Tensor:
    """This rank's gradient of a parameter; zeros where no token reached it."""
    if held.leaf.grad is None:
        held.leaf.grad = torch.zeros_like(held.leaf)
    gradient = held.grad
    assert gradient is not None
    return gradient
