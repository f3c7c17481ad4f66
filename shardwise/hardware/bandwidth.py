"""How long a kernel takes that only moves bytes: norms, activations, residual adds, optimizer steps, copies.

A start-up time, then a steady share of the memory bandwidth; so half of that speed is reached at a few megabytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shardwise.hardware.chips import Chip
from shardwise.hardware.efficiency import constants


def memory_seconds(chip: Chip, bytes: Any, words: tuple[str, str, str] | None = None) -> Any:
    """Device time of a kernel that reads and writes `bytes` in all; nothing to move takes no time.

    `words` say which operation of a network it is, in which direction and format: a profile may have measured it.
    """
    moved = np.asarray(bytes, dtype=float)
    fitted = constants("memory", chip)["constants"]
    seconds = np.where(moved > 0, fitted["floor"] + moved / (chip.hbm * fitted["share"]), 0.0)
    if chip.profile is not None:
        factor = chip.profile.elementwise_factor(chip, moved, words) if words else None
        seconds = seconds * (chip.profile.memory_factor(chip, moved) if factor is None else factor)
    return seconds if seconds.ndim else float(seconds)
