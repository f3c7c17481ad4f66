"""The copy that is written while training goes on: one block of memory, made at the first save and used by all later ones.

Training waits for this copy and nothing else. On a GPU the block is pinned, so that the copies run at the speed of the bus and
one wait at the end is enough.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.train.saves.contents import Kept


class Staging:
    """Memory for one copy of what this rank keeps."""

    def __init__(self) -> None:
        self.block = torch.empty(0, dtype=torch.uint8)

    def copy(self, pieces: Sequence[Kept]) -> Tensor:
        """The bytes of the pieces as they are now, one behind the other. Good until the next copy."""
        needed = sum(piece.values.nbytes for piece in pieces)
        if self.block.numel() != needed:
            on_gpu = any(piece.values.is_cuda for piece in pieces)
            self.block = torch.empty(0, dtype=torch.uint8)  # lets the old one go first
            self.block = torch.empty(needed, dtype=torch.uint8, pin_memory=on_gpu)
        at = 0
        for piece in pieces:
            target = self.block[at : at + piece.values.nbytes]
            target.copy_(piece.values.contiguous().flatten().view(torch.uint8), non_blocking=True)
            at += len(target)
        for device in {piece.values.device for piece in pieces if piece.values.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return self.block
