"""Top-k (Deep Gradient Compression, Lin et al. 2018): of each tensor a rank sends only the largest values, with their indices, and
keeps the rest for later.

With momentum m, u = m u + gradient and error = error + u (momentum correction); the k largest of the error are sent, and both are
set to 0 at their indices (momentum factor masking). Without momentum the error is the plain sum of unsent values. Bytes a rank
sends: (r-1) of 8 k (a value and its index in 32 bits; 12 k in float64), in two messages. Memory: the error, and u where there is
momentum. All ranks add the received values in the same order, so they get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.parallel.collectives import all_gather_single
from shardwise.parallel.compress.compressor import State, zeros_like
from shardwise.run.compression import kept


class TopK:
    """Sums over ranks of the largest values."""

    def __init__(self, group: dist.ProcessGroup, tensors: Sequence[Tensor], density: float, momentum: float) -> None:
        """For tensors like these."""
        self.group, self.density, self.momentum = group, density, momentum
        names = ("error", "momentum") if momentum else ("error",)
        self.states: list[State] = [{name: zeros_like(t) for name in names} for t in tensors]

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        counts = [kept(t.numel(), self.density) for t in tensors]
        if not sum(counts):
            return
        chosen = [self._choose(*each) for each in zip(tensors, self.states, counts, strict=True)]
        values, places = torch.cat([v for v, _ in chosen]), torch.cat([p for _, p in chosen])
        ranks = dist.get_world_size(self.group)
        all_values, all_places = (x.new_empty(ranks * len(x)) for x in (values, places))
        all_gather_single(all_values, values, group=self.group)
        all_gather_single(all_places, places, group=self.group)
        sums = [values.new_zeros(each.numel()) for each in tensors]
        for some, where in zip(all_values.chunk(ranks), all_places.chunk(ranks), strict=True):
            for total, v, p in zip(sums, some.split(counts), where.split(counts), strict=True):
                total[p.long()] += v  # each rank sends an index only once
        for each, total in zip(tensors, sums, strict=True):
            each.copy_(total.view(each.shape))

    def _choose(self, gradient: Tensor, state: State, count: int) -> tuple[Tensor, Tensor]:
        """The values of a tensor to send, and their indices; the rest stays in the state."""
        error = state["error"]
        if self.momentum:
            error.add_(state["momentum"].mul_(self.momentum).add_(gradient))
        else:
            error.add_(gradient)
        flat = error.view(-1)
        places = flat.abs().topk(count, sorted=False).indices
        values = flat[places]
        for kept_back in state.values():
            kept_back.view(-1)[places] = 0
        return values, places.to(torch.int32)
