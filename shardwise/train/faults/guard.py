"""Detects bad steps: a loss or gradient norm that is not finite, or far above those of the steps before it.

"Far above" is measured robustly: in deviations of 1.4826 x MAD (median of absolute differences from the median, which for a normal
distribution is one standard deviation) above the median of a window of good steps, so that a spike does not raise its own
threshold. All ranks see the same two numbers and so decide the same. The window and the excluded batches are saved with every
checkpoint: a resumed run decides as an uninterrupted run would have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median

from shardwise.run.config import TrainConfig

FLAT = 1e-3
"""Smallest deviation, as a share of the median: the losses of a run on repeated data may hardly differ."""


@dataclass
class History:
    """The guard's record of earlier steps."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    excluded: list[int] = field(default_factory=list)
    """Excluded batches, by their number in data order; the first is 1."""
    bad: int = 0
    """Bad steps since the last good one."""
    prompts: int = 0
    """Prompts answered so far, if a run learns from its own answers."""

    def batch_of(self, step: int) -> int:
        """The number of the batch that a step trains on: the step's own number, shifted past the excluded batches."""
        for excluded in sorted(self.excluded):
            step += excluded <= step
        return step

    def note(self, loss: float, norm: float, window: int) -> None:
        """Remember a good step."""
        self.losses = [*self.losses, loss][-window:]
        self.norms = [*self.norms, norm][-window:]
        self.bad = 0


def above(values: list[float], value: float, least: int) -> float:
    """How many deviations a value is above the median of earlier ones; 0 if there are too few to tell."""
    if len(values) < least:
        return 0.0
    middle = median(values)
    deviation = 1.4826 * median(abs(v - middle) for v in values)
    return (value - middle) / max(deviation, FLAT * abs(middle), 1e-300)


@dataclass
class Guard:
    """Judges steps by a run's settings and history."""

    settings: TrainConfig
    history: History

    def fault(self, loss: float, norm: float) -> str | None:
        """What is bad about a step, or None."""
        for name, value, before in (
            ("loss", loss, self.history.losses),
            ("gradient norm", norm, self.history.norms),
        ):
            if not math.isfinite(value):
                return f"the {name} is {value}"
            if self.settings.guard_spike:
                far = above(before, value, least=min(16, self.settings.guard_window))
                if far > self.settings.guard_spike:
                    return f"the {name}, {value:.6g}, is {far:.1f} deviations above the median of {len(before)} steps"
        return None

    def note(self, loss: float, norm: float, rescaled: bool = False) -> str | None:
        """Add a finished step to the history; returns what was bad about it, or None. Gradients that overflowed in float16 are left
        to the loss scale as long as it can be lowered. A non-finite loss is always bad: the reported loss is not scaled."""
        if self.settings.guard == "none" or (rescaled and math.isfinite(loss)):
            return None
        fault = self.fault(loss, norm)
        if fault is None:
            self.history.note(loss, norm, self.settings.guard_window)
        else:
            self.history.bad += 1
        return fault
