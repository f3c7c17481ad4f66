"""The copy that is written while training goes on: one block of memory, made at the first save and used by all later ones.

Training waits for this copy and nothing else. From a GPU the copies run side by side into pinned memory, and one wait at the end
is enough. In a CPU's memory a few threads take an even share of the bytes each and meet once: PyTorch's own copies would meet
after every tensor, which on a busy machine costs many times the copying.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from shardwise.train.saves.contents import Kept


class Staging:
    """Memory for one copy of what this rank keeps."""

    def __init__(self) -> None:
        self.block = torch.empty(0, dtype=torch.uint8)
        self.pinned = False

    def _allocate(self, size: int, pinned: bool) -> None:
        """Exactly so many bytes; PyTorch's own pinned memory comes in powers of two."""
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self.block.data_ptr())
        self.block = torch.empty(0, dtype=torch.uint8)  # lets the old one go first
        self.block = torch.empty(size, dtype=torch.uint8)
        # Refused, the copies are slower and as good.
        self.pinned = pinned and int(torch.cuda.cudart().cudaHostRegister(self.block.data_ptr(), size, 0)) == 0

    def copy(self, pieces: Sequence[Kept]) -> Tensor:
        """The bytes of the pieces as they are now, one behind the other. Good until the next copy."""
        needed = sum(piece.values.nbytes for piece in pieces)
        if self.block.numel() != needed:
            self._allocate(needed, pinned=any(piece.values.is_cuda for piece in pieces))
        views, at = [], 0
        for piece in pieces:
            target = self.block[at : at + piece.values.nbytes]
            source = piece.values.contiguous().flatten().view(torch.uint8)
            if source.is_cuda:
                target.copy_(source, non_blocking=True)
            else:
                views.append((target.numpy(), source.numpy()))
            at += len(target)
        _copy_in_threads(views, torch.get_num_threads())
        for device in {piece.values.device for piece in pieces if piece.values.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return self.block


def _copy_in_threads(views: list[tuple[np.ndarray, np.ndarray]], threads: int) -> None:
    """Copy each second array to its first, even shares of the bytes by each thread."""
    total = sum(len(target) for target, _ in views)
    shares: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(threads)]
    done = 0
    for target, source in views:
        start = 0
        while start < len(target):
            share = done * threads // total
            stop = min(len(target), start - done + -(-(share + 1) * total // threads))
            shares[share].append((target[start:stop], source[start:stop]))
            done, start = done + stop - start, stop

    def work(share: list[tuple[np.ndarray, np.ndarray]]) -> None:
        for target, source in share:
            np.copyto(target, source)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, shares))
