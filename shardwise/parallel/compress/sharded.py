"""ZeRO++ (Wang et al. 2023): the collectives of `fully_shard`, in blocks of few bits.

Weights (qwZ): a rank quantises its shard of a layer before the all-gather, and all ranks, itself included, compute with the
dequantised values; the parameters that the optimizer updates stay as they are. A backward pass that gathers from secondary shards
(hpZ) gets these values as they are, so that both passes compute with the same weights. Gradients (qgZ): unsharded gradients are
quantised, exchanged by one all-to-all and added in the reduce dtype, so that each is rounded once. A rank sends the values of the
all-gather and the reduce-scatter at BITS/8 + 4/BLOCK bytes per value. The shard of each parameter is padded to its own blocks: the
weights of norms are around 1 and those of matrices far below, so a scale for both would round the matrices away. No state is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.parallel.collectives import all_gather_single
from shardwise.parallel.compress.codecs import CODECS, from_bytes, to_bytes
from shardwise.run.compression import BLOCK, blocks_of


class _Quantized:
    """What `fully_shard` requires of a custom collective: an allocator, and the collective."""

    def __init__(self, method: str, numels: Callable[[], list[int]]) -> None:
        """`numels`: the sizes of the shards, padding included, that one call sends, one after another."""
        self.method, self.codec, self.block, self.numels = method, CODECS[method], BLOCK[method], numels

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def encoded(self, rows: Tensor) -> Tensor:
        """Rows of values as bytes, [rows x blocks, bytes]; each parameter begins at a new block."""
        numels = self.numels()
        padded = [blocks_of(numel, self.method) * self.block for numel in numels]
        blocks = torch.zeros(len(rows), sum(padded), dtype=at_least_float32(rows.dtype), device=rows.device)
        for to, values, numel in zip(blocks.split(padded, 1), rows.split(numels, 1), numels, strict=True):
            to[:, :numel] = values
        blocks = blocks.view(-1, self.block)
        return to_bytes(self.codec, blocks, torch.full((len(blocks),), self.block, device=rows.device))

    def decode(self, sent: Tensor, rows: Tensor, add: bool = False) -> None:
        """Decode rows of values into `rows`, or add them to it."""
        numels = self.numels()
        padded = [blocks_of(numel, self.method) * self.block for numel in numels]
        every = from_bytes(self.codec, sent, at_least_float32(rows.dtype)).view(len(rows), -1).to(rows.dtype)
        for to, values, numel in zip(rows.split(numels, 1), every.split(padded, 1), numels, strict=True):
            (to.add_ if add else to.copy_)(values[:, :numel])


class QuantizedAllGather(_Quantized):
    """All-gathers the shards of a layer's weights, quantised over this many ranks; a smaller, near group sends values that were
    already rounded."""

    def __init__(self, method: str, numels: Callable[[], list[int]], ranks: int) -> None:
        super().__init__(method, numels)
        self.ranks = ranks

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        length, ranks = input_tensor.numel(), group.size()
        if ranks == 1:
            output_tensor.copy_(input_tensor)
            return
        if ranks < self.ranks:
            all_gather_single(output_tensor, input_tensor, group=group)
            return
        mine = self.encoded(input_tensor.view(1, -1))
        every = mine.new_empty(ranks * len(mine), mine.shape[1])
        all_gather_single(every, mine, group=group)
        self.decode(every, output_tensor.view(ranks, length))


class QuantizedReduceScatter(_Quantized):
    """This rank's shard of the sum of a layer's gradients."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        ranks, length = group.size(), output_tensor.numel()
        sent = self.encoded(input_tensor.view(ranks, length))
        arrived = torch.empty_like(sent)
        dist.all_to_all_single(arrived, sent, group=group)
        output_tensor.zero_()
        for part in arrived.chunk(ranks):
            self.decode(part, output_tensor.view(1, length), add=True)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype that values are scaled in."""
    return torch.promote_types(dtype, torch.float32)
