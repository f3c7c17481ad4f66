"""The learning rate at each step, as a share of its peak: linear warm-up, then cosine, linear, stable-then-decay
(Hu et al. 2024) or constant. A pure function of the step, so that a resumed run needs no state for it."""

from __future__ import annotations

import math

from shardwise.run import TrainConfig


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
