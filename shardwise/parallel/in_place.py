"""The collectives of ZeRO without copies: parameters are all-gathered where the passes read them, and gradients are sent from where
the backward pass wrote them, or from where they were cast.

`fully_shard` gathers a layer by one all-gather, copies the shards in and each parameter out, and copies all gradients into one
buffer in the dtype of the sum: of a step of Llama 3 8B on 8 GPUs that is 6%. Here a rank's shards are cast into their places of the
gathered parameters, which one call gathers. Where the ranks are in one machine, gradients of 16 bits are exchanged by an all-to-all
for each matrix, and one for all vectors of a layer, and added in the dtype of the sum: the sums of a reduce-scatter in that dtype,
for half of its bytes. Between machines NCCL's reduce-scatter sends less, since its rings leave each machine once. Gradients are
cast to the dtype of the sum for it, by a kernel twice as fast as PyTorch's copies, and one call reduces those of a layer.

A rank sends P (z-1)/z for each gather as before, and where gradients are exchanged 2 bytes (z-1)/z instead of 4 for each. Memory:
the gradients of a layer and what arrives of others, 2 bytes each, where there is one buffer of 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.torch_private import foreach_copy_


class InPlace:
    """The two collectives, over the ranks of a group."""

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        """`dtype`: of the sums."""
        self.group, self.dtype = group, dtype

    def cast(self, sources: list[Tensor], targets: list[Tensor]) -> None:
        """Write tensors of one dimension to others of another dtype."""
        if all(each.is_cuda for each in (*sources, *targets)):
            from shardwise.model.kernels.many import cast

            cast(sources, targets)
        else:
            foreach_copy_(targets, sources)

    def add(self, sources: list[Tensor], targets: list[Tensor]) -> None:
        """Add tensors to others of the dtype of the sums."""
        if all(each.is_cuda and each.is_contiguous() for each in (*sources, *targets)):
            from shardwise.model.kernels.many import cast

            cast(sources, targets, adds=True)
        else:
            for source, target in zip(sources, targets, strict=True):
                target += source

    def gather(self, shards: list[Tensor], gathered: list[Tensor]) -> None:
        """Gather each shard into the tensor at the same place of the other list: one call for those of a dtype."""
        for dtype in dict.fromkeys(shard.dtype for shard in shards):
            into = [whole for whole in gathered if whole.dtype == dtype]
            work = self.group.allgather_into_tensor_coalesced(into, [one for one in shards if one.dtype == dtype])
            work.wait()

    def prepared(self, gradients: list[Tensor]) -> list[Tensor]:
        """What is sent of gradients."""
        ranks = self.group.size()
        sent = [each.new_empty(padded_numel(each, ranks), dtype=self.dtype) for each in gradients]
        for whole, gradient in zip(sent, gradients, strict=True):
            whole[gradient.numel() :].zero_()
        flat = [gradient.contiguous().view(-1) for gradient in gradients]
        self.cast(flat, [whole[: len(same)] for whole, same in zip(sent, flat, strict=True)])
        return sent

    def reduced(self, sent: list[Tensor]) -> list[Tensor]:
        """This rank's shard of the sum of each gradient, padded, in one dimension."""
        shards = [whole.new_empty(len(whole) // self.group.size()) for whole in sent]
        self.group.reduce_scatter_tensor_coalesced(shards, sent).wait()
        return shards


class Exchange(InPlace):
    """The same where the ranks send each other gradients of 16 bits, each of which adds up its own shard."""

    def prepared(self, gradients: list[Tensor]) -> list[Tensor]:
        return gradients

    def reduced(self, sent: list[Tensor]) -> list[Tensor]:
        vectors = [self._parts(gradient) for gradient in sent if gradient.dim() == 1]
        summed: Iterator[Tensor] = iter(())
        if vectors:
            together = self._exchanged(torch.cat(vectors, dim=1) if len(vectors) > 1 else vectors[0])
            summed = iter(together.split([part.shape[1] for part in vectors]))
        return [next(summed) if each.dim() == 1 else self._exchanged(self._parts(each)) for each in sent]

    def _parts(self, gradient: Tensor) -> Tensor:
        """A gradient as a part for each rank [ranks, numel]."""
        ranks = self.group.size()
        whole = padded(gradient, ranks)
        return whole.view(ranks, len(whole) // ranks)

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


def padded_numel(gradient: Tensor, ranks: int) -> int:
    """Its elements with its rows padded to a multiple of the ranks."""
    return -(-gradient.shape[0] // ranks) * ranks * math.prod(gradient.shape[1:])


def padded(gradient: Tensor, ranks: int) -> Tensor:
    """A gradient in one dimension, so padded."""
    flat = gradient.contiguous().view(-1)
    if (numel := padded_numel(gradient, ranks)) == len(flat):
        return flat
    whole = flat.new_zeros(numel)
    whole[: len(flat)] = flat
    return whole
