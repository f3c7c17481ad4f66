"""Dynamic loss scaling for float16 (Micikevicius et al. 2018): the loss is multiplied so that small gradients survive;
a step whose gradients overflow is skipped and the scale halved, and after many good steps it is doubled.

PyTorch's GradScaler decides per optimizer whether to skip; here one gradient norm over everything decides for all of them,
so that no half of the parameters is ever updated alone.
"""

from __future__ import annotations

from dataclasses import dataclass

GROWTH_INTERVAL = 2000


@dataclass
class LossScale:
    """The current scale, and how many steps in a row were good."""

    scale: float
    good: int = 0

    def update(self, finite: bool) -> bool:
        """Adapt after a step whose gradients were finite, or not; gives whether a lower scale may mend the next one."""
        if not finite:
            before, self.scale, self.good = self.scale, max(1.0, self.scale / 2), 0
            return self.scale < before
        self.good += 1
        if self.good == GROWTH_INTERVAL:
            self.scale, self.good = self.scale * 2, 0
        return False
