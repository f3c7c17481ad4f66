"""From rewards to advantages: how much better an answer is than the others to the same prompt.

GRPO (Shao et al. 2024, section 4.1.2) takes the mean of the group from a reward and divides by the group's standard deviation. Dr.
GRPO (Liu et al. 2025, section 3.2) does not divide: that weighs questions by how alike their answers are. DAPO (Yu et al. 2025)
leaves out groups whose answers are all worth the same (equation 11), from which there is nothing to learn, and takes something off
answers that come close to the limit of their length (equation 13).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
EPSILON = 1e-4
"""Added to a standard deviation, as TRL does."""


def group_advantages(rewards: Floats, divides: bool) -> Floats:
    """Advantages of [groups, answers] rewards; `divides`: by the standard deviation of each group (of a sample, n - 1)."""
    advantages = rewards - rewards.mean(axis=1, keepdims=True)
    if divides and rewards.shape[1] > 1:
        advantages = advantages / (rewards.std(axis=1, ddof=1, keepdims=True) + EPSILON)
    return advantages


def has_variance(rewards: Floats) -> NDArray[np.bool_]:
    """Which of [groups, answers] have answers of different worth."""
    return rewards.max(axis=1) > rewards.min(axis=1)


def overlong_penalty(lengths: NDArray[np.int64], longest: int, buffer: int) -> Floats:
    """What is added to the reward of answers of these lengths: nothing up to `buffer` tokens below the longest, then falling to -1
    there (DAPO, equation 13; an answer is cut at the longest, so it never reaches what lies beyond)."""
    if not buffer:
        return np.zeros(len(lengths))
    return np.clip((longest - buffer - lengths) / buffer, -1.0, 0.0)
