"""Two scalars of a step. The learning rate, as a share of its peak: linear warm-up, then cosine, linear, stable-then-decay
(Hu et al. 2024) or constant. It is a pure function of the step, so that a resumed run needs no state for it. And the dynamic loss
scale of float16 (Micikevicius et al. 2018): the loss is multiplied by it so that small gradients do not underflow."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.run import TrainConfig

GROWTH_INTERVAL = 2000
"""Good steps in a row after which the loss scale is doubled."""


def learning_rate_factor(train: TrainConfig, step: int) -> float:
    """Factor on the peak learning rate in step 1, 2, …, `train.steps`; the last step runs at `final_lr`."""
    if step <= train.warmup:
        return step / train.warmup
    if train.schedule == "constant":
        return 1.0
    start = train.warmup
    if train.schedule == "wsd":
        start = max(start, round(train.steps * (1 - train.decay)))
    done = min(1.0, max(0, step - start) / max(1, train.steps - start))
    if train.schedule == "cosine":
        return train.final_lr + (1 - train.final_lr) * 0.5 * (1 + math.cos(math.pi * done))
    return 1 - (1 - train.final_lr) * done


@dataclass
class LossScale:
    """The loss scale, and how many steps in a row were good. PyTorch's GradScaler decides per optimizer whether to skip; here one
    gradient norm over all parameters decides for all optimizers, so that no part of the parameters is ever updated alone."""

    scale: float
    good: int = 0

    def update(self, finite: bool) -> bool:
        """Adapt the scale after a step whose gradients were `finite` or not. Returns whether it was lowered, which may fix the next
        step."""
        if not finite:
            before, self.scale, self.good = self.scale, max(1.0, self.scale / 2), 0
            return self.scale < before
        self.good += 1
        if self.good == GROWTH_INTERVAL:
            self.scale, self.good = self.scale * 2, 0
        return False
