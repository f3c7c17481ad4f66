"""Programs declared by facts: what they state is planned, what they leave open widens, and a run can be planned as any of them."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from shardwise.cli.main import main
from shardwise.plan.as_program import read_program
from shardwise.plan.cost.constants import BOUNDS, NAMES, fitted, scaled
from shardwise.plan.cost.frameworks import FRAMEWORKS
from shardwise.plan.cost.software import ALIASES, FACTS, PROGRAMS, Situation, framework_of_facts, mixture, year_of
from shardwise.plan.published.rows import job_of_row, published
from shardwise.plan.published.validate import predict
from shardwise.run import UserError

TENSOR = Situation("hopper", tensor=8, data=4)
SMALL = [
    "--model.preset=llama3-8b",
    "--cluster.chip=h100-sxm",
    "--cluster.nodes=4",
    "--layout.shard=32",
    "--layout.zero=3",
]


def test_every_program_does_what_one_of_the_frameworks_does() -> None:
    assert {entry for eras in PROGRAMS.values() for _, entry in eras} <= set(FRAMEWORKS)
    assert set(ALIASES.values()) <= set(PROGRAMS)
    assert all([until for until, _ in eras] == sorted(until for until, _ in eras) for eras in PROGRAMS.values())


@pytest.mark.parametrize(
    ("software", "year"),
    [({"release": "2021-04"}, 2021.25), ({"release": "25.02.01"}, 2025 + 1 / 12), ({"release": "2023"}, 2023.5),
     ({"release": "0.14", "date": "2025-10"}, 2025.75), ({"release": "v5"}, 2022.5)],
)  # fmt: skip
def test_the_year_of_a_release(software: dict[str, str], year: float) -> None:
    assert year_of(software, "ampere") == pytest.approx(year)


def test_a_program_changes_with_its_release() -> None:
    names = [
        framework_of_facts({"framework": "megatron-lm", "release": r}, TENSOR).framework.name
        for r in ("2020-05", "2022-05", "2025-01")
    ]
    assert names == ["megatron", "megatron-2022", "nemo"]


def test_a_stated_fact_is_planned_and_is_no_longer_open() -> None:
    unknown = framework_of_facts({"framework": "nemo"}, TENSOR)
    assert any("tp overlap" in a.what for a in unknown.alternatives)
    for stated, share in ((True, 0.85), (False, 0.0)):
        declared = framework_of_facts({"framework": "nemo", "tp_overlap": stated}, TENSOR)
        assert declared.framework.tensor_overlap == share
        assert not any("tp overlap" in a.what for a in declared.alternatives)


@pytest.mark.parametrize(
    ("software", "attention"),
    [({"framework": "zero-bubble"}, "unfused"), ({"library": "Zero-Bubble"}, "unfused"),
     ({"library": "zero-bubble", "attention": "flash2", "assumed": ("attention",)}, "unfused"),
     ({"library": "zero-bubble", "attention": "flash2"}, "flash2"),
     ({"framework": "zero-bubble", "attention": "flash2"}, "flash2")],
)  # fmt: skip
def test_what_a_programs_memory_shows_counts_unless_it_is_stated(software: dict[str, Any], attention: str) -> None:
    assert framework_of_facts(software, TENSOR).framework.attention == attention


def test_facts_that_do_not_matter_are_not_open() -> None:
    alone = framework_of_facts({"framework": "nemo", "attention": "te", "cuda_graphs": False}, Situation("hopper"))
    assert alone.alternatives == ()


def test_a_new_name_is_planned_as_what_is_common_and_said_to_be_unknown() -> None:
    dense = framework_of_facts({"framework": "something-new"}, Situation("hopper", zero=3, data=64))
    assert (dense.framework.family, dense.known) == ("fsdp", False)
    assert (
        framework_of_facts({"framework": "something-new"}, Situation("ampere", tensor=8)).framework.family == "megatron"
    )


def test_what_nobody_stated_moves_the_prediction_and_widens_its_interval() -> None:
    row = next(
        r for r in published("training") if (r.get("software") or {}).get("tp_overlap") and r["parallel"]["tp"] > 1
    )
    stated = predict(row)
    software = {key: value for key, value in row["software"].items() if key != "tp_overlap"}
    unknown = predict(row | {"software": software})
    widths = [math.log(p.high / p.low) for p in (stated, unknown) if p.high and p.low]
    assert widths[1] > widths[0]
    assert any("tp overlap" in what for what in unknown.assumed)
    assert len(job_of_row(row | {"software": software}).alternatives) > len(job_of_row(row).alternatives)


def test_a_mixture_of_two_is_their_mean_and_spread() -> None:
    mean, spread = mixture([(0.25, 0.4)])
    assert mean == pytest.approx(0.75 * 0.0 + 0.25 * 0.4)
    assert spread == pytest.approx(math.sqrt(0.75 * mean**2 + 0.25 * (0.4 - mean) ** 2))


@pytest.mark.parametrize("effect", [-9.0, -1.0, 0.0, 1.0, 9.0])
def test_contention_keeps_its_physical_bounds(effect: float) -> None:
    groups = dict.fromkeys((kind for _, kinds in NAMES.values() for kind in kinds), "")
    low, high = BOUNDS["contention"]
    value = scaled(NAMES, groups, {"contention": effect})["contention"]
    assert low <= value <= high
    if not effect:
        assert value == pytest.approx(NAMES["contention"][0])


def test_nothing_that_a_run_uses_was_fitted_to_one_source() -> None:
    """Effects of sources are for their own rows: a plan of a run has none, and those fitted without a source lack its own."""
    assert any("/source:" in name for name in fitted()["effects"])
    row = next(row for row in published("training") if row["group"] == "llm_foundry")
    assert predict(row).predicted == predict(row | {"group": "llm_foundry", "id": "again"}).predicted
    assert (
        predict(row, leave_out=False).predicted != predict(row | {"group": "somebody else"}, leave_out=False).predicted
    )


def test_a_plan_as_another_program(capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for program in ("torchtitan", "deepspeed", "megatron-lm:release=2021-04,attention=unfused"):
        assert main(["plan", *SMALL, "--as", program, "--json"]) in (0, 1)
        found[program] = json.loads(capsys.readouterr().out)
    assert len({plan["step_seconds"] for plan in found.values()}) == 3
    for program, plan in found.items():
        assert plan["step_seconds_low"] < plan["step_seconds"] < plan["step_seconds_high"]
        assert sum(plan["breakdown"].values()) == pytest.approx(plan["step_seconds"], rel=1e-6)
        assert min(plan["breakdown"].values()) >= 0
        assert any(program.partition(":")[0] in note for note in plan["notes"])


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["--as", "torchtitn"], "did you mean torchtitan"), (["--as", "nemo:speed=9"], "not a fact"),
     (["--as", "nemo:attention=flash9"], "has to be one of"), (["--as", "nemo", "--layout=auto"], "layout that is given")],
)  # fmt: skip
def test_mistakes_about_programs(arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, *arguments]) == 2
    assert word in capsys.readouterr().err


def test_all_mistakes_of_a_program_at_once() -> None:
    with pytest.raises(UserError) as raised:
        read_program("nobody:speed=9,attention=fast")
    assert all(word in str(raised.value) for word in ("nobody", "speed", "fast"))
    assert set(FACTS) >= {"attention", "tp_overlap", "dispatcher"}
