"""Predict measurements that others published, and say how far off.

Rows of a source that took part in fitting are predicted with the constants fitted without it, unless asked otherwise. So the errors
are those a user meets with a framework or cluster that the planner has not seen.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from shardwise.plan.cost.constants import Constants, constants_of, effects_without, fitted, interval
from shardwise.plan.cost.job import GIB, Job
from shardwise.plan.cost.memory import memory
from shardwise.plan.cost.operations import layer
from shardwise.plan.cost.passes import ModuleCost, passes
from shardwise.plan.published.rows import Row, Unsupported, job_of_row, measured_seconds, own_run
from shardwise.plan.published.serving_rows import MEASURES, first_measured, serving_of_row
from shardwise.plan.serving import inference
from shardwise.plan.serving.cost import memory_by_owner
from shardwise.plan.serving.loads import prepare as prepare_load
from shardwise.plan.serving.loads import quantities
from shardwise.plan.time.step import prepare, step_time
from shardwise.plan.trainer.memory import memory_of


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

    def judge(self, measured: float | None, predicted: float, width: float) -> None:
        """Puts the interval around a prediction, and takes its error."""
        self.measured, self.predicted = measured, predicted
        self.low, self.high = predicted * math.exp(-width), predicted * math.exp(width)
        if measured:
            self.error = predicted / measured - 1

    def judge_memory(self, measured: float, predicted: float) -> None:
        """The same for GiB of memory."""
        self.memory_measured_gib, self.memory_predicted_gib = measured, predicted
        self.memory_error = predicted / measured - 1


def layer_seconds(job: Job, constants: Constants) -> float:
    """Forward and backward of one layer, without embedding, head and optimizer."""
    own = passes(job, ModuleCost.of(layer(job, routed=False)), constants)
    return float(own.forward + own.backward_input + own.backward_weight)


def _predict_training(result: Prediction, row: Row, *, leave_out: bool) -> None:
    """A row of training, or of one layer."""
    question = job_of_row(row)
    job, result.assumed = question.job, question.assumed
    constants = constants_of(job, effects_without(fitted(), row["group"], leave_out=leave_out))
    seconds = layer_seconds(job, constants) if row["kind"] == "layer" else step_time(prepare(job), constants).seconds
    result.judge(measured_seconds(row, job), seconds, interval(row["kind"], len(result.assumed)))
    given = row["measured"].get("memory_gib")
    if given:
        result.judge_memory(given, _peak(row, job) / GIB)
    if result.measured is None and not given:
        raise Unsupported("neither time nor memory was measured")


def _peak(row: Row, job: Job) -> float:
    """Bytes of the fullest rank. Of this trainer's own rows it is what the allocator counts, without the context's bytes."""
    if job.framework.family != "shardwise":
        return memory(job).peak
    ranks = memory_of(own_run(row), job).ranks
    return max(sum(size for owner, size in rank.items() if owner != "workspace") for rank in ranks)


def _predict_inference(result: Prediction, row: Row, *, leave_out: bool) -> None:
    """A row of serving."""
    serving, load, result.assumed = serving_of_row(row)
    first = first_measured(row)
    if not first:
        raise Unsupported("none of the quantities that serving predicts was measured")
    prepared, content = prepare_load(serving, load), inference.fitted_inference()
    effects = effects_without(content, row["group"], leave_out=leave_out)
    found = quantities(prepared, inference.constants_of(serving, effects))
    for name, (ours, unit) in MEASURES.items():
        if row["measured"].get(name):
            result.errors[name] = found[ours] * unit / row["measured"][name] - 1
    ours, unit = MEASURES[first]
    result.judge(row["measured"][first], found[ours] * unit, content["interval"])
    given = row["measured"].get("memory_gib")
    if given:
        owners = memory_by_owner(serving, prepared.running, load.input_len, load.output_len)
        result.judge_memory(given, sum(owners.values()) / GIB)


def predict(row: Row, *, leave_out: bool = True) -> Prediction:
    """One row; one that cannot be predicted says why."""
    result = Prediction(row["id"], row["group"], row["kind"], True, bool(row.get("complete")))
    try:
        one = _predict_inference if row["kind"] == "inference" else _predict_training
        one(result, row, leave_out=leave_out)
    except Unsupported as reason:
        result.supported, result.reason = False, str(reason)
    return result


def validate(rows: Iterable[Row], *, leave_out: bool = True) -> list[Prediction]:
    """Predict every row."""
    return [predict(row, leave_out=leave_out) for row in rows]


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
