"""How right predicted memory is: by the runs of this trainer whose peaks were measured on a GPU."""

from __future__ import annotations

from functools import cache

import numpy as np

from shardwise.plan.published.rows import published
from shardwise.plan.published.validate import predict


@cache
def memory_error() -> float:
    """The share within which 8 of 10 measured peaks lie of the predicted ones."""
    rows = [row for row in published("own") if row["measured"].get("memory_gib")]
    errors = [abs(found) for row in rows if (found := predict(row).memory_error) is not None]
    return float(np.quantile(errors, 0.8))
