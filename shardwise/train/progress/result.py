"""The result of a step: loss, gradient norm and the like, read once they have arrived on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class StepResult:
    """The result of a step. On a GPU it is copied to the host asynchronously as soon as it is computed: reading it later does not
    wait for steps launched in the meantime."""

    step: int
    loss: Tensor
    grad_norm: Tensor
    learning_rate: float
    stop: Tensor
    usable: bool = True
    """False when float16 gradients overflowed: nothing was updated."""
    rescaled: bool = False
    """True when float16 gradients overflowed and the loss scale could be lowered, which may fix the next step."""
    accepted: bool = True
    """False when the guard rejected the step: only the step count changed."""
    measured: Tensor | None = None
    """The objective's metrics."""

    def __post_init__(self) -> None:
        self._values = torch.stack((self.loss, self.grad_norm, self.stop))
        if self.measured is not None:
            self._values = torch.cat((self._values, self.measured))
        self._arrived: torch.cuda.Event | None = None
        if self._values.is_cuda:
            here = torch.empty(self._values.shape, dtype=self._values.dtype, pin_memory=True)
            self._values = here.copy_(self._values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> tuple[float, float, bool]:
        """Loss, gradient norm, and whether any rank was asked to stop; the host waits until the step is done."""
        loss, norm, stop = self._read()[:3]
        return loss, norm, stop > 0

    def read_measured(self) -> list[float]:
        """The values of the objective's metrics, in their order."""
        return self._read()[3:]

    def _read(self) -> list[float]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.tolist()
