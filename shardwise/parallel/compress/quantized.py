"""The quantised sum over ranks: quantise, all-to-all, add, quantise, all-gather (as in ZeRO++, Wang et al. 2023).

Each of r ranks sums a share of the blocks. Bytes a rank sends: 2 (r-1)/r of the blocks, at BITS/8 x BLOCK + 4 bytes each, in two
messages. Values are rounded twice, once in each direction. With error feedback the losses of both roundings are kept, that of the
second by the rank that rounded, and added in the next step: over time everything is sent. Memory: nothing, or one more tensor for
each gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.parallel.collectives import all_gather_single
from shardwise.parallel.compress.codecs import CODECS, from_bytes, to_bytes
from shardwise.parallel.compress.compressor import State, zeros_like
from shardwise.run.compression import BLOCK, blocks_of, share_of_blocks


class Quantized:
    """Sums over ranks in blocks of few bits."""

    def __init__(self, method: str, group: dist.ProcessGroup, tensors: Sequence[Tensor], error: str = "") -> None:
        """For tensors like these; with error feedback where `error` names the state of unsent values."""
        self.method, self.group = method, group
        self.states: list[State] = [{error: zeros_like(t)} if error else {} for t in tensors]

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        self.start(tensors).finish()

    def start(self, tensors: Sequence[Tensor]) -> PendingReduction:
        """Start sending the tensors, without waiting for those of the other ranks."""
        for each, state in zip(tensors, self.states, strict=True):
            for left in state.values():
                each.add_(left)
        return PendingReduction(self.method, self.group, list(tensors), self.states)


class PendingReduction:
    """A quantised sum in flight: sent, then summed and sent on by `add`, then completed by `finish`."""

    def __init__(self, method: str, group: dist.ProcessGroup, tensors: list[Tensor], states: list[State]) -> None:
        self.method, self.group, self.tensors, self.states = method, group, tensors, states
        self.codec = CODECS[method]
        numels, ranks = [t.numel() for t in tensors], group.size()
        self.share, self.work = share_of_blocks(numels, ranks, method), None
        self.added = False
        if not self.share:
            return
        self.blocks = _in_blocks(tensors, self.share * ranks, method)
        self.counts = _counts(numels, self.share * ranks, method, self.blocks.device)
        self.sent = to_bytes(self.codec, self.blocks, self.counts)
        self.arrived = torch.empty_like(self.sent)
        self.work = dist.all_to_all_single(self.arrived, self.sent, group=group, async_op=True)

    def add(self) -> None:
        """Sum this rank's share of the received blocks, and send the sums."""
        if self.added or not self.share:
            return
        self._wait()
        codec, dtype, mine = self.codec, self.blocks.dtype, self.group.rank()
        own = slice(mine * self.share, (mine + 1) * self.share)
        total = torch.zeros_like(self.blocks[own])
        for part in self.arrived.chunk(self.group.size()):
            total += from_bytes(codec, part, dtype)
        # Padding decodes to a sign as well: set it to zero.
        total *= torch.arange(total.shape[1], device=total.device) < self.counts[own, None]
        sums = to_bytes(codec, total, self.counts[own])
        if any(self.states):
            self.blocks -= from_bytes(codec, self.sent, dtype)
            self.blocks[own] += total - from_bytes(codec, sums, dtype)
            for state, left in zip(self.states, _of_blocks(self.blocks, self.tensors, self.method), strict=True):
                for kept in state.values():
                    kept.copy_(left)
        self.work = all_gather_single(self.arrived, sums, group=self.group, async_op=True)
        self.added = True

    def finish(self) -> None:
        """Replace the tensors by the sums."""
        self.add()
        if not self.share:
            return
        self._wait()
        values = from_bytes(self.codec, self.arrived, self.blocks.dtype)
        for each, value in zip(self.tensors, _of_blocks(values, self.tensors, self.method), strict=True):
            each.copy_(value)

    def _wait(self) -> None:
        assert self.work is not None
        self.work.wait()


def _in_blocks(tensors: Sequence[Tensor], blocks: int, method: str) -> Tensor:
    """All tensors one after another, each beginning at a new block."""
    out = tensors[0].new_zeros(blocks, BLOCK[method])
    flat, at = out.view(-1), 0
    for each in tensors:
        flat[at : at + each.numel()].copy_(each.reshape(-1))
        at += blocks_of(each.numel(), method) * BLOCK[method]
    return out


def _of_blocks(blocks: Tensor, tensors: Sequence[Tensor], method: str) -> list[Tensor]:
    """The values of the tensors, from such blocks."""
    flat, at, found = blocks.view(-1), 0, []
    for each in tensors:
        found.append(flat[at : at + each.numel()].view(each.shape))
        at += blocks_of(each.numel(), method) * BLOCK[method]
    return found


def _counts(numels: Sequence[int], blocks: int, method: str, device: torch.device) -> Tensor:
    """How many values of each block are not padding."""
    counts, size = [0] * blocks, BLOCK[method]
    at = 0
    for numel in numels:
        whole = blocks_of(numel, method)
        counts[at : at + whole] = [size] * whole
        if numel % size:
            counts[at + whole - 1] = numel % size
        at += whole
    return torch.tensor(counts, device=device)
