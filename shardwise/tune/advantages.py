"""From rewards to advantages: how much better an answer is than the others to the same prompt.

GRPO (Shao et al. 2024, section 4.1.2) subtracts the group's mean from a reward and divides by the group's standard deviation. Dr.
GRPO (Liu et al. 2025, section 3.2) does not divide: dividing weights questions by how similar their answers' rewards are. DAPO (Yu
et al. 2025) leaves out groups whose answers all have the same reward (equation 11), from which there is nothing to learn, and
penalizes answers close to the length limit (equation 13).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
EPSILON = 1e-4
"""Added to a standard deviation, as TRL does."""


def group_advantages(rewards: Floats, divides: bool) -> Floats:
    """Advantages of [groups, answers] rewards; `divides`: divide by the standard deviation of each group (sample, n - 1)."""
    advantages = rewards - rewards.mean(axis=1, keepdims=True)
    if divides and rewards.shape[1] > 1:
        advantages = advantages / (rewards.std(axis=1, ddof=1, keepdims=True) + EPSILON)
    return advantages


def has_variance(rewards: Floats) -> NDArray[np.bool_]:
    """Which groups of [groups, answers] rewards have answers with different rewards."""
    return rewards.max(axis=1) > rewards.min(axis=1)


def overlong_penalty(lengths: NDArray[np.int64], longest: int, buffer: int) -> Floats:
    """The penalty added to the reward of answers with these lengths: 0 up to `longest - buffer` tokens, then falling linearly to -1
    at `longest` (DAPO, equation 13; an answer is cut at `longest`, so the equation's last case never occurs)."""
    if not buffer:
        return np.zeros(len(lengths))
    return np.clip((longest - buffer - lengths) / buffer, -1.0, 0.0)
