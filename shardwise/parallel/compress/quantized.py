"""The quantised sum over ranks: quantise, all-to-all, add, quantise, all-gather (as in ZeRO++, Wang et al. 2023).

Each of r ranks adds up a share of the blocks. Bytes a rank sends: 2 (r-1)/r of the blocks, at BITS/8 x 256 + 4 bytes each, in two
messages. Values are rounded twice, once on each way. With error feedback what both roundings lost is kept, the second one's by the
rank that made it, and added in the next step: over time everything is sent. Memory: nothing, or one more tensor for each gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.parallel.compress.codecs import CODECS, from_bytes, to_bytes
from shardwise.parallel.compress.compressor import State, zeros_like
from shardwise.run.compression import BLOCK, blocks_of, share_of_blocks


class Quantized:
    """Sums over ranks in blocks of few bits."""

    def __init__(self, method: str, group: dist.ProcessGroup, tensors: Sequence[Tensor], error: str = "") -> None:
        """For tensors like these; with error feedback where what was not sent has a name."""
        self.codec = CODECS[method]
        self.group = group
        self.states: list[State] = [{error: zeros_like(t)} if error else {} for t in tensors]

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        ranks, mine = dist.get_world_size(self.group), dist.get_rank(self.group)
        numels = [t.numel() for t in tensors]
        share = share_of_blocks(numels, ranks)
        if not share:
            return
        for each, state in zip(tensors, self.states, strict=True):
            for left in state.values():
                each.add_(left)
        blocks = _in_blocks(tensors, share * ranks)
        counts = _counts(numels, share * ranks, blocks.device)
        sent = to_bytes(self.codec, blocks, counts)
        arrived = torch.empty_like(sent)
        dist.all_to_all_single(arrived, sent, group=self.group)
        own = slice(mine * share, (mine + 1) * share)
        total = torch.zeros_like(blocks[own])
        for part in arrived.chunk(ranks):
            total += from_bytes(self.codec, part, blocks.dtype)
        # Padding has a sign as well.
        total *= torch.arange(BLOCK, device=total.device) < counts[own, None]
        added = to_bytes(self.codec, total, counts[own])
        gathered = torch.empty_like(sent)
        dist.all_gather_into_tensor(gathered, added, group=self.group)
        if any(self.states):
            blocks -= from_bytes(self.codec, sent, blocks.dtype)
            blocks[own] += total - from_bytes(self.codec, added, blocks.dtype)
            for state, left in zip(self.states, _of_blocks(blocks, tensors), strict=True):
                for kept in state.values():
                    kept.copy_(left)
        for each, value in zip(
            tensors, _of_blocks(from_bytes(self.codec, gathered, blocks.dtype), tensors), strict=True
        ):
            each.copy_(value)


def _in_blocks(tensors: Sequence[Tensor], blocks: int) -> Tensor:
    """All tensors one behind the other, each from a block of its own on."""
    out = tensors[0].new_zeros(blocks, BLOCK)
    flat, at = out.view(-1), 0
    for each in tensors:
        flat[at : at + each.numel()].copy_(each.reshape(-1))
        at += blocks_of(each.numel()) * BLOCK
    return out


def _of_blocks(blocks: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The values of such tensors again."""
    flat, at, found = blocks.view(-1), 0, []
    for each in tensors:
        found.append(flat[at : at + each.numel()].view(each.shape))
        at += blocks_of(each.numel()) * BLOCK
    return found


def _counts(numels: Sequence[int], blocks: int, device: torch.device) -> Tensor:
    """How many values of each block are not padding."""
    counts = [0] * blocks
    at = 0
    for numel in numels:
        whole = blocks_of(numel)
        counts[at : at + whole] = [BLOCK] * whole
        if numel % BLOCK:
            counts[at + whole - 1] = numel % BLOCK
        at += whole
    return torch.tensor(counts, device=device)
