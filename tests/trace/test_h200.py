"""A real profile of this trainer, two steps of a small model on one H200 (`benchmarks/gpu/profile_runs.py`, run `small`)."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import trace_oracle

from shardwise.cli.main import main
from shardwise.plan.plan import plan
from shardwise.run import read_run

FOLDER = Path(__file__).parent / "data" / "h200"


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main(["trace", str(FOLDER), "--json", "--cache", str(tmp_path_factory.mktemp("cache"))]) == 0
    return json.loads(said.getvalue())


def test_the_breakdown_adds_up_to_the_steps_exactly(answers: dict[str, Any]) -> None:
    assert answers["steps"] == [1, 2]
    steps = sum(end - start for _, start, end in answers["windows"]["0"])
    own = answers["ranks"]["0"]
    busy = own["span"] - own["idle"]
    assert own["span"] == steps
    # Nothing is sent and one stream computes, so what it does adds up without overlap.
    assert own["communication"] == own["exposed_communication"] == 0
    assert busy == own["compute"] + own["copy"]
    assert sum(answers["categories"]["ranks"]["0"].values()) == steps
    assert sum(answers["idle"]["ranks"]["0"].values()) == own["idle"]


def test_it_equals_the_slow_account() -> None:
    compared, wrong = trace_oracle.check(FOLDER / "ranks" / "rank-00000.json.gz")
    assert compared > 0
    assert wrong == []


def test_kernels_belong_to_modules_and_phases(answers: dict[str, Any]) -> None:
    """95 of 100 nanoseconds of kernels, backward passes included, are blamed on a module or on a phase of the step."""
    rows = answers["modules"]["rows"]
    total = sum(sum(row["passes"].values()) for row in rows)
    unknown = sum(
        sum(row["passes"].values()) for row in rows if row["module"].startswith("(") and "phase" not in row["module"]
    )
    assert unknown <= 0.05 * total
    names = {row["module"] for row in rows}
    assert {"embed", "head", "norm", "layers.0.attention.core", "layers.1.ffn.gate", "(phase optimizer)"} <= names
    backward = sum(row["passes"].get("backward", 0) for row in rows if row["module"].startswith("layers."))
    assert backward > sum(row["passes"].get("forward", 0) for row in rows if row["module"].startswith("layers."))


def test_its_plan_is_of_the_chip_it_was_recorded_on(tmp_path: Path) -> None:
    """The run names no chip, so its plan was once that of a CPU: 43 seconds for a step of 24 milliseconds."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main(["trace", str(FOLDER), "--against", "plan", "--json", "--cache", str(tmp_path / "cache")]) == 0
    found = json.loads(said.getvalue())["against"]
    there = plan(read_run(FOLDER / "run.toml", ["cluster.chip=h200"]))
    assert found["step_before"] == there.account.step_seconds < 0.1
