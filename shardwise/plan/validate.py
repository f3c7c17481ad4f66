"""Predict measurements that others published, and say how far off.

Rows of a source that took part in fitting are predicted with the constants that were fitted without it, unless asked
otherwise; so the errors are those a user meets with a program or cluster the planner has not seen.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from shardwise.plan.constants import Constants, constants_of, fitted
from shardwise.plan.memory import GIB, memory
from shardwise.plan.operations import layer
from shardwise.plan.passes import Piece, passes
from shardwise.plan.rows import Row, Unsupported, job_of_row, measured_seconds
from shardwise.plan.step import Prepared, prepare, step_time


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


def layer_seconds(prepared: Prepared, constants: Constants) -> float:
    """Forward and backward of one layer, without embedding, head and optimizer."""
    own = passes(prepared.job, Piece.of(layer(prepared.job, routed=False)), constants)
    return float(own.forward + own.backward_input + own.backward_weight)


def effects_for(group: str, *, leave_out: bool) -> dict[str, float]:
    """The fitted effects for rows of a source: without it where it took part and is to be left out."""
    content = fitted()
    return content.get("without", {}).get(group, content["effects"]) if leave_out else content["effects"]


def interval(kind: str, assumed: int = 0) -> float:
    """Half the width of the 80% interval, in the logarithm; wider with each assumption about the row."""
    width = fitted().get("intervals", {}).get(kind, 0.2)
    return width * (1.0 + 0.15 * assumed)


def predict_training(row: Row, *, leave_out: bool = True) -> Prediction:
    """A training or layer row."""
    result = Prediction(row["id"], row["group"], row["kind"], True, bool(row.get("complete")))
    try:
        question = job_of_row(row)
    except Unsupported as reason:
        return _unsupported(result, str(reason))
    job, result.assumed = question.job, question.assumed
    prepared = prepare(job)
    constants = constants_of(job, effects_for(row["group"], leave_out=leave_out))
    if row["kind"] == "layer":
        seconds = layer_seconds(prepared, constants)
    else:
        seconds = step_time(prepared, constants).seconds
    result.measured, result.predicted = measured_seconds(row, job), seconds
    _judge(result, interval(row["kind"], len(result.assumed)))
    given = row["measured"].get("memory_gib")
    if given:
        result.memory_measured_gib = given
        result.memory_predicted_gib = memory(job, constants).peak / GIB
        result.memory_error = result.memory_predicted_gib / given - 1
    if result.measured is None and not given:
        return _unsupported(result, "neither time nor memory was measured")
    return result


def _unsupported(result: Prediction, reason: str) -> Prediction:
    result.supported, result.reason = False, reason
    return result


def _judge(result: Prediction, width: float) -> None:
    assert result.predicted is not None
    result.low, result.high = result.predicted * math.exp(-width), result.predicted * math.exp(width)
    if result.measured:
        result.error = result.predicted / result.measured - 1


def validate(
    rows: Iterable[Row], *, leave_out: bool = True, progress: Callable[[], None] | None = None
) -> list[Prediction]:
    """Predict every row."""
    from shardwise.plan.serving.inference import predict_inference

    results = []
    for row in rows:
        predict = predict_inference if row["kind"] == "inference" else predict_training
        results.append(predict(row, leave_out=leave_out))
        if progress:
            progress()
    return results


def summary(predictions: list[Prediction]) -> dict[str, Any]:
    """Rows, errors of time and of memory, and how many measurements the intervals hold."""
    timed = [p for p in predictions if p.error is not None]
    errors = [abs(p.error) for p in timed if p.error is not None]
    held = [p for p in timed if p.low is not None and p.low <= (p.measured or 0) <= (p.high or 0)]
    sizes = [abs(p.memory_error) for p in predictions if p.memory_error is not None]
    return {
        "rows": len(predictions),
        "supported": sum(p.supported for p in predictions),
        "timed": len(timed),
        "median_error": statistics.median(errors) if errors else None,
        "mean_error": statistics.mean(errors) if errors else None,
        "coverage": len(held) / len(timed) if timed else None,
        "memory_rows": len(sizes),
        "memory_median_error": statistics.median(sizes) if sizes else None,
        "memory_mean_error": statistics.mean(sizes) if sizes else None,
    }
