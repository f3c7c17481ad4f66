"""What the README claims of the predictions, held against the published measurements that ship with the package; each source
is predicted with constants fitted without it."""

from __future__ import annotations

import contextlib
import functools
import json
import statistics
from pathlib import Path

import pytest

from shardwise.cli.main import main
from shardwise.plan.plan import plan
from shardwise.plan.published.rows import Unsupported, job_of_row, own_run, published
from shardwise.plan.published.validate import Prediction, predict, summary, validate

TRAINING = pytest.mark.drawn(group="published", unit="training rows")
LAYERS = pytest.mark.drawn(group="published", unit="rows of layers and of inference")
"""Tests that share the predictions of many rows are drawn together."""


@functools.cache
def predictions(kind: str) -> list[Prediction]:
    return validate(published(kind))


def complete(kind: str) -> list[Prediction]:
    return [p for p in predictions(kind) if p.complete]


@TRAINING
def test_training_rows() -> None:
    result = summary(complete("training"))
    assert result["supported"] >= 0.95 * result["rows"]
    assert result["median_error"] <= 0.08
    assert result["mean_error"] <= 0.098
    assert 0.74 <= result["coverage"] <= 0.86
    assert result["memory_median_error"] <= 0.04


@TRAINING
def test_intervals_hold_in_every_class() -> None:
    timed = [p for p in predictions("training") if p.error is not None]
    assert 0.76 <= (summary(timed)["coverage"] or 0) <= 0.84
    for name in {p.classes for p in timed}:
        members = [p for p in timed if p.classes == name]
        assert len(members) < 15 or summary(members)["coverage"] >= 0.65, name


@LAYERS
def test_layer_and_inference_rows() -> None:
    assert summary(complete("layer"))["median_error"] <= 0.08
    assert summary(complete("inference"))["median_error"] <= 0.25


@pytest.mark.parametrize("group", ["megatron_sc21_t1", "korthikanti_t5"])
@TRAINING
def test_each_row_of_the_headline_tables(group: str) -> None:
    errors = {p.id: p.error for p in predictions("training") if p.group == group}
    assert errors
    assert all(error is not None and abs(error) <= 0.12 for error in errors.values()), errors


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("training", marks=TRAINING),
        pytest.param("layer", marks=LAYERS),
        pytest.param("inference", marks=LAYERS),
    ],
)
def test_no_row_is_dropped(kind: str) -> None:
    rows = published(kind)
    assert [p.id for p in predictions(kind)] == [row["id"] for row in rows]
    assert all(p.supported or p.reason for p in predictions(kind))


def test_left_out_constants_are_others_than_those_fitted_to_all() -> None:
    row = next(row for row in published("training") if row["group"] == "llm_foundry")
    left_out, seen = (validate([row], leave_out=leave)[0].predicted for leave in (True, False))
    assert left_out != seen


def test_json_has_the_names_that_scripts_rely_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [*published("training")[:3], *published("inference")[:2], published("layer")[0]]
    rows[0] = rows[0] | {"precision": "int3"}
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    assert main(["validate", str(path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    first, second = result["rows"][:2]
    assert first["supported"] is False
    assert "int3" in first["reason"]
    assert {"id", "group", "kind", "supported", "measured", "predicted", "low", "high", "error"} <= set(second)
    assert second["low"] < second["predicted"] < second["high"]
    assert second["error"] == pytest.approx(second["predicted"] / second["measured"] - 1)
    assert "errors" in result["rows"][3]
    assert {"median_error", "mean_error", "coverage"} <= set(result["overall"])


@pytest.mark.parametrize(
    ("content", "word"),
    [("{", "not JSON"), ("{}", "not a list"), ('[{"id": "x"}]', "has no group"), ("[3]", "has no id")],
)
def test_a_broken_file_of_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, word: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(content)
    assert main(["validate", str(path)]) == 2
    assert word in capsys.readouterr().err


def test_rows_with_holes_are_unsupported_not_errors() -> None:
    row = published("training")[0]
    holes = [
        row | {"hardware": row["hardware"] | {"gpus": None}},
        row | {"hardware": row["hardware"] | {"chip": "h1000"}, "parallel": row["parallel"] | {"zero_stage": None}},
        row | {"model": row["model"] | {"hidden": None}},
        row | {"parallel": row["parallel"] | {"tp": None}},
        row | {"global_batch": 1},
        row | {"parallel": row["parallel"] | {"pp": 64}},
        row | {"measured": {}},
        row | {"model": row["model"] | {"act": "sine"}},
        row | {"hardware": row["hardware"] | {"gpus_per_node": 0}},
        row | {"hardware": row["hardware"] | {"chip": "v100"}, "precision": "bf16"},
        row | {"hardware": row["hardware"] | {"chip": "a100"}, "precision": "fp8"},
        {key: value for key, value in row.items() if key != "parallel"},
    ]
    own = published("own")[0]
    holes += [own | {"parallel": {"tp": 1, "pp": 1}}, own | {"global_batch": 7, "micro_batch": 4}]
    for prediction in validate(holes):
        assert not prediction.supported
        assert prediction.reason


def test_rows_of_chips_without_bfloat16_and_without_a_precision_are_predicted() -> None:
    row = published("training")[0]
    old = row | {"hardware": row["hardware"] | {"chip": "v100"}, "precision": "fp16", "measured": {"mfu": 0.3}}
    unstated = {key: value for key, value in row.items() if key != "precision"}
    for prediction in validate([old, unstated]):
        assert prediction.supported, prediction.reason
        assert prediction.error is not None


def test_dualpipe_holds_every_stage_twice() -> None:
    row = next(row for row in published("training") if row["id"] == "automodel_dsv3_256")
    row = row | {"measured": row["measured"] | {"memory_gib": 60.0}}

    def with_schedule(name: str, **more: int) -> Prediction:
        return predict(row | {"parallel": row["parallel"] | {"schedule": name, "vpp": 1} | more})

    whole, v_shaped = with_schedule("dualpipe"), with_schedule("dualpipe-v")
    assert whole.supported
    assert v_shaped.supported
    assert whole.memory_predicted_gib > 1.2 * v_shaped.memory_predicted_gib
    assert "every two hold the same" in with_schedule("dualpipe", pp=3).reason


@pytest.mark.parametrize(("leave_out", "median", "most"), [(False, 0.03, 0.08), (True, 0.075, 0.26)])
@pytest.mark.drawn(group="published")
def test_this_trainer_on_one_gpu(leave_out: bool, median: float, most: float) -> None:
    """Its own rows, which the constants have seen or not; memory has none."""
    rows = validate(published("own"), leave_out=leave_out)
    assert len(rows) >= 20
    errors = [abs(row.error) for row in rows if row.error is not None]
    assert len(errors) == len(rows)
    assert statistics.median(errors) <= median
    assert max(errors) <= most
    assert all(row.memory_error is not None and abs(row.memory_error) <= 0.03 for row in rows)


def test_runs_of_this_trainer_measured_after_the_fit() -> None:
    """Twelve runs that no fit has seen, of other shapes, in fp8 and with experts (`benchmarks/gpu/RESULTS.md`)."""
    rows = json.loads((Path(__file__).parents[2] / "benchmarks" / "gpu" / "own_unseen.json").read_text("utf-8"))
    assert len(rows) == 12
    assert not {row["id"] for row in rows} & {row["id"] for row in published("own")}
    for row in rows:
        account = plan(own_run(row)).account
        peak = sum(size for owner, size in account.memory.ranks[0].items() if owner != "workspace") / 2**30
        assert peak == pytest.approx(row["measured"]["memory_gib"], rel=0.02), row["id"]
        assert account.step_seconds == pytest.approx(row["measured"]["iter_time_s"], rel=0.07), row["id"]


def test_modules_that_were_recomputed_say_whether_any_were() -> None:
    rows = [r for r in published("training") if (r.get("software") or {}).get("recompute_modules") is not None]
    assert {r["parallel"]["recompute"] for r in rows} == {None, "selective"}
    asked = []
    for row in rows:
        with contextlib.suppress(Unsupported):
            asked.append((row["software"]["recompute_modules"], job_of_row(row)))
    assert len(asked) > 90
    for modules, question in asked:
        assert question.job.layout.recompute == ("attention" if modules else "none")
        assert "no recomputation" not in question.assumed
