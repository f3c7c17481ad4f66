"""The accuracy of predicted memory, from the runs of this trainer whose peaks were measured on a GPU."""

from __future__ import annotations

from functools import cache

import numpy as np

from shardwise.plan.published.rows import published
from shardwise.plan.published.validate import predict


@cache
def memory_error() -> float:
    """The relative error within which 8 of 10 predicted peaks lie."""
    rows = [row for row in published("own") if row["measured"].get("memory_gib")]
    errors = [abs(found) for row in rows if (found := predict(row).memory_error) is not None]
    return float(np.quantile(errors, 0.8))
