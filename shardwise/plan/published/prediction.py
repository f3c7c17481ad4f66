"""What a prediction of one published row holds, and the rows themselves."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from importlib import resources

from shardwise.plan.cost.constants import fitted
from shardwise.plan.published.rows import Row


def published(kind: str) -> list[Row]:
    """The rows that come with the package: `training`, `layer` or `inference`."""
    return json.loads(resources.files("shardwise.plan").joinpath("published", f"{kind}.json").read_text("utf-8"))


@dataclass
class Prediction:
    """One row, predicted."""

    id: str
    group: str
    kind: str
    supported: bool
    complete: bool = True
    reason: str = ""
    measured: float | None = None
    predicted: float | None = None
    low: float | None = None
    high: float | None = None
    error: float | None = None
    """Signed, relative to what was measured."""
    errors: dict[str, float] = field(default_factory=dict)
    memory_measured_gib: float | None = None
    memory_predicted_gib: float | None = None
    memory_error: float | None = None
    assumed: tuple[str, ...] = ()


def judge(result: Prediction, width: float) -> None:
    """Lay the interval around a prediction, and measure its error."""
    assert result.predicted is not None
    result.low, result.high = result.predicted * math.exp(-width), result.predicted * math.exp(width)
    if result.measured:
        result.error = result.predicted / result.measured - 1


def interval(kind: str, assumed: int = 0) -> float:
    """Half the width of the 80% interval, in the logarithm; wider with each assumption about the row."""
    return fitted()["intervals"][kind] * (1.0 + 0.15 * assumed)
