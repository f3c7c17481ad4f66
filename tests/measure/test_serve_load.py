"""A load measured over HTTP beside its plan, and the facts that plans are made of, measured on this machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwise.cli.main import main
from shardwise.cli.measuring.bench import tables
from shardwise.hardware import load_profile
from shardwise.hardware.engine_facts import FOLDER, engine_facts
from shardwise.hardware.profile import dump_profile
from shardwise.measure.bench.random_server import served
from shardwise.measure.bench.serving import CPU, measure_serving
from shardwise.measure.serve_load import ready_engine
from shardwise.plan.serving.plan import plan_serving
from shardwise.run import read_run

RUN = """
[model]
layers = 2
hidden = 64
heads = 4
kv_heads = 2
vocab = 300
max_positions = 256
[train]
dtype = "float32"
device = "cpu"
[serve]
concurrency = 3
requests = 8
input_tokens = "U(5,40)"
output_tokens = "U(2,8)"
max_sequences = 4
page_tokens = 8
max_step_tokens = 32
"""


def test_the_load_of_a_run_is_sent_to_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    with served(ready_engine(read_run(path, []))) as url:
        for load in ("serve.concurrency=3", "serve.rate=200"):
            assert main(["load", url, "--plan", str(path), f"--{load}", "--json"]) == 0
            found = json.loads(capsys.readouterr().out)
            values = {each["name"]: (each["plan"], each["run"]) for each in found["differences"]}
            for name in ("requests", "input tokens", "output tokens"):
                assert values[name][0] == values[name][1] > 0
            assert "steps" not in values, "a client does not see them"
            assert found["run"]["failed"] == 0
        assert main(["load", url, "--plan", str(path)]) == 0
        assert "ttft p50" in capsys.readouterr().out
        assert main(["load", url, "--plan", str(path), "--serve.concurrency=0"]) == 2
        assert "the run has no load" in capsys.readouterr().err


@pytest.mark.drawn(group="profiles")
def test_facts_are_measured_and_planned_with(tmp_path: Path) -> None:
    shape = CPU.shapes[1]
    grid = replace(
        CPU, shapes=(shape,), layers=2, sequences=(1, 4), keys=(16, 64), together=(64,), alone=(16, 64), after=((16, 48),),
        mixed=((2, 16, 1, 16),), most_tokens=512, check=((32, 64, 2, 1, 16), 2, 256), check_input="U(5,20)",
        check_output="U(2,4)", check_gib=0.01, many=8, steps=2,
    )  # fmt: skip
    profile = measure_serving(torch.device("cpu"), 0.0, grid=grid)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(dump_profile(profile)))
    read = load_profile(path)
    assert read == profile
    assert (len(read.decode), len(read.prompt), len(read.mixed), len(read.pick)) == (4, 4, 1, 2)
    assert all(point["seconds"] > 0 for point in (*read.decode, *read.prompt, *read.mixed, *read.pick))
    assert min(read.serve_step, read.serve_mixed, read.serve_error) > 0
    assert len(tables(read)) == 3
    run = tmp_path / "run.toml"
    run.write_text(RUN)
    slow = tmp_path / "slow.json"
    slow.write_text(json.dumps(dump_profile(replace(profile, serve_step=1.0, serve_mixed=1.0))))
    plans = [plan_serving(read_run(run, [f"cluster.profile={each}"])) for each in (path, slow)]
    assert all(plan.facts.own for plan in plans)
    assert plans[1].figures.seconds > plans[0].figures.seconds + 0.99 * plans[1].simulated[0].steps


def test_facts_of_the_package_can_be_read() -> None:
    names = [path.stem for path in FOLDER.glob("*.json")]
    assert {"cpu", "h200-sxm"} <= set(names)
    for name in names:
        profile = load_profile(FOLDER / f"{name}.json")
        assert profile.chip == name
        assert min(len(profile.decode), len(profile.prompt), len(profile.pick)) > 2
        assert profile.serve_step > 0


def test_a_chip_of_a_file_borrows_from_the_one_it_is_like(tmp_path: Path) -> None:
    from shardwise.hardware import find_chip

    path = tmp_path / "mine.toml"
    path.write_text('like = "h200"\nhbm_gbs = 9600\n')
    facts = engine_facts(find_chip(str(path)))
    assert facts.chip.name == "h200-sxm"
    assert not facts.own
