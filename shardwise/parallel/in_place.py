"""The collectives of ZeRO without copies: parameters are all-gathered where the passes read them, and gradients of 16 bits are sent
from where the backward pass wrote them.

`fully_shard` gathers a layer by one all-gather, copies the shards in and each parameter out, and copies all gradients into one
buffer in the dtype of the sum: of a step of Llama 3 8B on 8 GPUs that is 6%. Here a rank's shards are cast into their places of the
gathered parameters, which one call gathers. Where the ranks are in one machine, gradients of 16 bits are exchanged by an all-to-all
for each matrix, and one for all vectors of a layer, and added in the dtype of the sum: the sums of a reduce-scatter in that dtype,
for half of its bytes. Between machines NCCL's reduce-scatter sends less, since its rings leave each machine once.

A rank sends P (z-1)/z for each gather as before, and 2 bytes (z-1)/z instead of 4 for each gradient. Memory: the gradients of a
layer and what arrives of others, 2 bytes each, where there was one buffer of 4.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor


class InPlace:
    """The two collectives, over the ranks of a group."""

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        """`dtype`: of the sums."""
        self.group, self.dtype = group, dtype

    def gather(self, shards: list[Tensor], gathered: list[Tensor]) -> None:
        """Gather each shard into the tensor at the same place of the other list: one call for those of a dtype."""
        for dtype in dict.fromkeys(shard.dtype for shard in shards):
            into = [whole for whole in gathered if whole.dtype == dtype]
            work = self.group.allgather_into_tensor_coalesced(into, [one for one in shards if one.dtype == dtype])
            work.wait()

    def exchange(self, gradients: list[Tensor]) -> list[Tensor]:
        """This rank's shard of the sum of each gradient, padded, in one dimension."""
        vectors = [self._parts(gradient) for gradient in gradients if gradient.dim() == 1]
        summed: Iterator[Tensor] = iter(())
        if vectors:
            together = self._exchanged(torch.cat(vectors, dim=1) if len(vectors) > 1 else vectors[0])
            summed = iter(together.split([part.shape[1] for part in vectors]))
        return [next(summed) if each.dim() == 1 else self._exchanged(self._parts(each)) for each in gradients]

    def _parts(self, gradient: Tensor) -> Tensor:
        """A gradient as a part for each rank [ranks, numel]."""
        ranks = self.group.size()
        return padded(gradient, ranks).view(ranks, -1)

    def _exchanged(self, parts: Tensor) -> Tensor:
        """The sum of this rank's part over all ranks."""
        arrived = torch.empty_like(parts)
        dist.all_to_all_single(arrived.view(-1), parts.view(-1), group=self.group)
        return self._sum(arrived)

    def _sum(self, parts: Tensor) -> Tensor:
        if parts.is_cuda and self.dtype == torch.float32:
            from shardwise.model.kernels.sum_parts import sum_parts

            return sum_parts(parts)
        return parts.sum(dim=0, dtype=self.dtype)


def padded(gradient: Tensor, ranks: int) -> Tensor:
    """A gradient in one dimension, its rows padded to a multiple of the ranks."""
    rows = -(-gradient.shape[0] // ranks) * ranks
    flat = gradient.contiguous().view(-1)
    if rows == gradient.shape[0]:
        return flat
    whole = flat.new_zeros(rows * gradient[0].numel())
    whole[: flat.numel()] = flat
    return whole
