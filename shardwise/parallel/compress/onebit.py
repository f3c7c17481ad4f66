"""1-bit Adam (Tang et al. 2021): after a warm-up replicas exchange Adam's momentum instead of gradients, as signs with a scale for
each block and error feedback; Adam's second moment stays as the warm-up left it (`train/optimizers/onebit_adam.py`).

A gradient itself can't be sent as signs, because Adam divides by its square; the momentum changes slowly enough. With the common
momentum m and this rank's gradient g_i, the ranks sum u_i = b m / r + (1 - b) g_i. The result is the gradient that leads from m to
their sum, so the optimizer runs unchanged. Traffic and memory: those of `quantized.py` with 1 bit and error feedback.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from shardwise.parallel.compress.quantized import Quantized


class OneBit(Quantized):
    """Sums over ranks of the momentum, as signs."""

    def __init__(self, group: dist.ProcessGroup, tensors: Sequence[Tensor], beta: float) -> None:
        """For tensors like these, and Adam's first beta."""
        super().__init__("onebit", group, tensors, error="momentum_error")
        self.beta = beta
        self.momenta: list[Tensor] = []

    def know(self, momenta: Sequence[Tensor], factor: Tensor) -> None:
        """Set the common momentum of each tensor as the optimizer has it: of gradients times a factor."""
        self.momenta = [(m / factor).to(m.dtype) for m in momenta]

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        ranks = dist.get_world_size(self.group)
        for each, m in zip(tensors, self.momenta, strict=True):
            each.mul_(1 - self.beta).add_(m, alpha=self.beta / ranks)
        super().add_up(tensors)
        for each, m in zip(tensors, self.momenta, strict=True):
            each.sub_(m, alpha=self.beta).div_(1 - self.beta)
        self.momenta = []
