"""Predicts measurements that others published, and reports the errors.

Rows of a source that took part in fitting are predicted with constants fitted without that source, unless requested otherwise. So
the errors are those a user meets with a framework or cluster that the planner has not seen.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardwise.plan.cost.constants import Constants, classes_of, constants_of, effects_without, interval, left_out
from shardwise.plan.cost.job import GIB, Job
from shardwise.plan.cost.memory import memory
from shardwise.plan.cost.operations import layer
from shardwise.plan.cost.passes import ModuleCost, passes
from shardwise.plan.cost.software import mixture
from shardwise.plan.published.rows import Row, Unsupported, job_of_row, measured_seconds, own_run, program_name
from shardwise.plan.published.serving_rows import MEASURES, first_measured, serving_of_row
from shardwise.plan.serving import inference
from shardwise.plan.serving.cost import memory_by_owner
from shardwise.plan.serving.loads import prepare as prepare_load
from shardwise.plan.serving.loads import quantities
from shardwise.plan.time.step import prepare, step_time
from shardwise.plan.trainer.memory import memory_of


@dataclass
class Prediction:
    """The prediction of one row."""

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
    """Signed, relative to the measured value."""
    errors: dict[str, float] = field(default_factory=dict)
    memory_measured_gib: float | None = None
    memory_predicted_gib: float | None = None
    memory_error: float | None = None
    assumed: tuple[str, ...] = ()
    classes: str = ""
    """The class of jobs whose interval is used."""

    def judge(self, measured: float | None, predicted: float, width: float) -> None:
        """Records a prediction with its interval and its error."""
        self.measured, self.predicted = measured, predicted
        self.low, self.high = predicted * math.exp(-width), predicted * math.exp(width)
        if measured:
            self.error = predicted / measured - 1

    def judge_memory(self, measured: float, predicted: float) -> None:
        """The same for GiB of memory."""
        self.memory_measured_gib, self.memory_predicted_gib = measured, predicted
        self.memory_error = predicted / measured - 1


def layer_seconds(job: Job, constants: Constants) -> Any:
    """Seconds of forward and backward of one layer, without embedding, head and optimizer."""
    own = passes(job, ModuleCost.of(layer(job, routed=False)), constants)
    return own.forward + own.backward_input + own.backward_weight


def _seconds(row: Row, job: Job, effects: Mapping[str, float]) -> float:
    """Predicted seconds for one framework. `effects` include those of the row's source unless it was left out."""
    constants = constants_of(job, effects, row["group"])
    if row["kind"] == "layer":
        return float(layer_seconds(job, constants))
    return step_time(prepare(job), constants).seconds


def _predict_training(result: Prediction, row: Row, *, leave_out: bool, program: bool) -> None:
    """Predicts a row of training, or of one layer. Alternatives for what its framework left unstated shift the prediction by their
    probability."""
    question = job_of_row(row)
    job, result.assumed = question.job, question.assumed
    name = program_name(row) if program else ""
    effects = effects_without(left_out(), row["group"], leave_out=leave_out, program=name)
    seconds = _seconds(row, job, effects)
    others = [
        (a.chance, math.log(_seconds(row, replace(job, framework=a.framework), effects) / seconds))
        for a in question.alternatives
    ]
    shift, spread = mixture(others)
    source = "" if leave_out or name else row["group"]
    classes = classes_of(job, known_program=question.known and not name, source=source)
    result.classes = classes[0]
    width = interval(classes, len(result.assumed), spread)
    result.judge(measured_seconds(row, job), seconds * math.exp(shift), width)
    given = row["measured"].get("memory_gib")
    if given:
        peak = _peak(row, job) / GIB
        result.judge_memory(_reading(row, given, peak), peak)
    if result.measured is None and not given:
        raise Unsupported("neither time nor memory was measured")


def _reading(row: Row, given: float, predicted: float) -> float:
    """GiB that a row states. Where its source leaves open whether the unit is GB, the reading nearer to the prediction is taken."""
    if row.get("memory_unit") != "unclear":
        return given
    return min((given, given * 1e9 / GIB), key=lambda size: abs(predicted / size - 1))


def _peak(row: Row, job: Job) -> float:
    """Bytes of the fullest rank. For this trainer's own rows they are what the allocator counts, without the CUDA context."""
    if job.framework.family != "shardwise":
        return memory(job).peak
    ranks = memory_of(own_run(row), job).ranks
    return max(sum(size for owner, size in rank.items() if owner != "workspace") for rank in ranks)


def _predict_inference(result: Prediction, row: Row, *, leave_out: bool) -> None:
    """Predicts a row of serving."""
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


def predict(row: Row, *, leave_out: bool = True, program: bool = False) -> Prediction:
    """Predicts one row; an unsupported row has its reason. With `program`, all rows of its framework are left out of the fit."""
    result = Prediction(row["id"], row["group"], row["kind"], True, bool(row.get("complete")))
    try:
        if not row.get("parallel"):
            raise Unsupported("the layout was not published")
        row = {"precision": None} | row
        if row["kind"] == "inference":
            _predict_inference(result, row, leave_out=leave_out)
        else:
            _predict_training(result, row, leave_out=leave_out, program=program)
    except Unsupported as reason:
        result.supported, result.reason = False, str(reason)
    return result


def validate(rows: Iterable[Row], *, leave_out: bool = True, program: bool = False) -> list[Prediction]:
    """Predicts every row."""
    return [predict(row, leave_out=leave_out, program=program) for row in rows]


def summary(predictions: list[Prediction]) -> dict[str, Any]:
    """Counts of rows, errors of time and memory, and the share of measurements inside their intervals."""
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
