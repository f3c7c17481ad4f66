"""Predict measurements that others published, and say how far off.

Rows of a source that took part in fitting are predicted with the constants that were fitted without it, unless asked
otherwise; so the errors are those a user meets with a program or cluster the planner has not seen.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from shardwise.plan.cost.constants import Constants, constants_of, fitted
from shardwise.plan.cost.job import Job
from shardwise.plan.cost.memory import GIB, memory
from shardwise.plan.cost.operations import layer
from shardwise.plan.cost.passes import Piece, passes
from shardwise.plan.plan import exact
from shardwise.plan.published.prediction import Prediction, interval, judge
from shardwise.plan.published.rows import Row, Unsupported, job_of_row, measured_seconds, own_run
from shardwise.plan.serving import predict_inference
from shardwise.plan.time.step import Prepared, prepare, step_time


def layer_seconds(prepared: Prepared, constants: Constants) -> float:
    """Forward and backward of one layer, without embedding, head and optimizer."""
    own = passes(prepared.job, Piece.of(layer(prepared.job, routed=False)), constants)
    return float(own.forward + own.backward_input + own.backward_weight)


def effects_for(group: str, *, leave_out: bool) -> dict[str, float]:
    """The fitted effects for rows of a source: without it where it took part and is to be left out."""
    content = fitted()
    return content.get("without", {}).get(group, content["effects"]) if leave_out else content["effects"]


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
    judge(result, interval(row["kind"], len(result.assumed)))
    given = row["measured"].get("memory_gib")
    if given:
        result.memory_measured_gib = given
        result.memory_predicted_gib = _peak(row, job) / GIB
        result.memory_error = result.memory_predicted_gib / given - 1
    if result.measured is None and not given:
        return _unsupported(result, "neither time nor memory was measured")
    return result


def _peak(row: Row, job: Job) -> float:
    """Bytes of the fullest rank; of this trainer's own rows what the allocator counts, which is less than a device gives away."""
    space = memory(job)
    if job.stack.family != "shardwise":
        return space.peak
    space = exact(space, own_run(row), job)
    return max(sum(size for owner, size in rank.items() if owner != "workspace") for rank in space.ranks)


def _unsupported(result: Prediction, reason: str) -> Prediction:
    result.supported, result.reason = False, reason
    return result


def validate(
    rows: Iterable[Row], *, leave_out: bool = True, progress: Callable[[], None] | None = None
) -> list[Prediction]:
    """Predict every row."""
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
