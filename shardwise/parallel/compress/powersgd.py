"""PowerSGD (Vogels et al. 2019): a gradient matrix as two low-rank factors, found by one power iteration per training step, which
starts from the previous step's factor.

With M = gradient + error of this rank, P = M Q is summed over ranks and orthogonalised, then Q = M^T P is summed; the sum of the
gradients is P Q^T, and each of r ranks keeps M - P Q^T / r as its error. Bytes a rank sends: 2 (r-1)/r of k (rows + columns) values
of each matrix, in two messages; vectors, and matrices that are not larger than their factors, are summed exactly in a third.
Memory: the error, as large as the gradients, and Q. Each expert is a separate matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.parallel.compress.compressor import State, zeros_like
from shardwise.parallel.gradients import all_reduce_together
from shardwise.run.compression import as_matrices, has_low_rank


class PowerSGD:
    """Sums over ranks by low-rank factors."""

    def __init__(self, group: dist.ProcessGroup, tensors: Sequence[Tensor], rank: int) -> None:
        """For tensors like these."""
        self.group = group
        self.states: list[State] = []
        for each in tensors:
            if not has_low_rank(each.shape, rank):
                self.states.append({})
                continue
            matrices, _, columns = as_matrices(each.shape)
            # The same start on every rank that holds a copy, whatever else it holds; power iteration needs no more than
            # that.
            generator = torch.Generator().manual_seed(columns)
            start = torch.randn(matrices, columns, rank, dtype=torch.float64, generator=generator)
            self.states.append({"error": zeros_like(each), "factor": start.to(each)})

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        low = [(each, state) for each, state in zip(tensors, self.states, strict=True) if state]
        whole = [each for each, state in zip(tensors, self.states, strict=True) if not state]
        ranks = dist.get_world_size(self.group)
        for each, state in low:
            each.add_(state["error"])
        matrices = [each.reshape(as_matrices(each.shape)) for each, _ in low]
        left = [m @ state["factor"] for m, (_, state) in zip(matrices, low, strict=True)]
        all_reduce_together(left, self.group)
        left = [torch.linalg.qr(p)[0] for p in left]
        right = [m.mT @ p for m, p in zip(matrices, left, strict=True)]
        all_reduce_together(right, self.group)
        for (each, state), p, q in zip(low, left, right, strict=True):
            total = (p @ q.mT).view(each.shape)
            torch.sub(each, total, alpha=1 / ranks, out=state["error"])
            state["factor"].copy_(q)
            each.copy_(total)
        all_reduce_together(whole, self.group)
