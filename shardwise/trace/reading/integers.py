"""The arrays that times and indices are in: of NumPy alone, so that what computes with them needs no reader of profiles."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
NONE = -1
"""Missing value in any integer column."""
