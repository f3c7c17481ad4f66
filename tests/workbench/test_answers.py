"""What the workbench answers is what `shardwise plan` prints of the same run."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from base_runs import BASE, drawn

from shardwise.cli.main import main
from shardwise.run import PRESETS, UserError, read_planned
from shardwise.run.config import all_keys
from shardwise.workbench.app import Workbench
from shardwise.workbench.changes import faster_changes
from shardwise.workbench.controls import offered, panel, value_at
from shardwise.workbench.question import START, Base, base_of, changes_of


def printed(capsys: pytest.CaptureFixture[str], base: list[str], changes: dict[str, str]) -> tuple[int, Any, list[str]]:
    """Exit code, JSON and messages of `shardwise plan`."""
    lost = {"model.preset"} if "model.preset" in changes else set()
    keys = [key for key in base if key.partition("=")[0] not in lost]
    code = main(["plan", "--json", *(f"--{key}" for key in keys), *(f"--{k}={v}" for k, v in changes.items())])
    out, err = capsys.readouterr()
    return code, json.loads(out) if code < 2 else None, err.splitlines()


def at(content: Any, path: str) -> Any:
    """The value at a path such as memory.stages[0].parameters."""
    for name in re.findall(r"[^.\[\]]+", path):
        content = content[int(name)] if isinstance(content, list) else content[name]
    return content


def test_answers_are_those_of_the_command(capsys: pytest.CaptureFixture[str], pytestconfig: pytest.Config) -> None:
    bench = Workbench(base_of(None, BASE))
    planned = 0
    for changes in drawn(pytestconfig.option.seed, 20):
        answer = json.loads(bench.answer(changes))
        code, plan, errors = printed(capsys, BASE, changes)
        if code == 2:
            said = [each["message"] for each in answer["problems"]]
            assert len(said) == len(errors)
            assert all(message in line for message, line in zip(said, errors, strict=True)), (changes, said, errors)
            continue
        planned += 1
        plan.pop("next_change", None)  # of what does not fit; the page finds it aside
        assert answer["plan"] == plan, changes
        marked = re.findall(
            r'data-quantity="([^"]+)" data-value="([^"]*)"', "".join(p["body"] for p in answer["parts"].values())
        )
        assert {"step_seconds", "memory.peak", "mfu", "cost.usd"} <= {path for path, _ in marked}
        for path, value in marked:
            assert at(plan, path) == json.loads(unescape(value)), (changes, path)
    assert planned >= 2


def test_a_run_file_is_planned_as_the_command_plans_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "own.toml"
    file.write_text(
        '[model]\npreset = "llama3-8b"\nlayers = 8\n[layout]\nshard = 8\nstages = []\n[cluster]\nchip = "h100"\n'
    )
    base = base_of(str(file), ["train.global_batch=16"])
    assert main(["plan", str(file), "--train.global_batch=16", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert json.loads(Workbench(base).answer({}))["plan"] == plan
    assert plan["run"]["name"] == "own"
    # Another preset brings its own shape along.
    other = json.loads(Workbench(base).answer({"model.preset": "qwen2.5-7b"}))["plan"]
    assert other["run"]["model"]["layers"] == PRESETS["qwen2.5-7b"]["layers"]


def test_a_workbench_without_a_run_begins_with_the_example() -> None:
    example = Path(__file__).parents[2] / "examples" / "llama3-70b-h100.toml"
    run, own = read_planned(example).run, base_of(None, []).planned({}).run
    assert (own.model, own.layout, own.cluster) == (run.model, run.layout, run.cluster)
    assert (own.train.seq_len, own.train.global_batch) == (run.train.seq_len, run.train.global_batch)
    assert START["name"] == own.name


def test_every_key_is_offered_once_or_left_out_on_purpose() -> None:
    keys = [key.name for key in offered()]
    left = set(all_keys()) - set(keys)
    assert {name for name in left if not name.startswith("serve.")} == {
        "name", "layout.auto", "layout.fixed", "cluster.rendezvous", "cluster.profile", "data.sets", "data.validation",
    }  # fmt: skip
    run = json.loads(Workbench(base_of(None, [])).answer({}))["plan"]["run"]
    html = panel(run)
    for name in keys:
        assert html.count(f'id="{name}"') == 1
        assert html.count(f'data-key="{name}"') in (1, 2)  # a slider beside its number
    assert value_at(run, "layout.tensor") == "8"


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ([], "changes"),
        ({"changes": []}, "changes"),
        ({"changes": {"layout.tensr": "2"}}, "no such key"),
        ({"changes": {"layout.tensor": {}}}, "text"),
        ({"changes": {"layout.tensor": "9" * 5000}}, "text"),
        ({"changes": {"cluster.profile": "/etc/passwd"}}, "cannot be chosen"),
        ({"changes": {"cluster.chip": "/etc/chip.TOML "}}, "cannot be chosen"),
        ({"changes": {"data.sets": "/etc"}}, "cannot be chosen"),
        ({"changes": {"objective.teacher": "/etc"}}, "cannot be chosen"),
        ({"changes": {"objective.teacher": "lama3-70b"}}, "cannot be chosen.* did you mean llama3-70b"),
        ({"changes": {"objective.teacher": "\udcff"}}, "lone surrogate"),
    ],
)
def test_a_question_that_is_none_is_refused(content: Any, word: str) -> None:
    with pytest.raises(Exception, match=word):
        changes_of(content)


def test_a_workbench_begins_with_no_half_of_a_character() -> None:
    """Every page answered with 500."""
    with pytest.raises(UserError, match="name: has half of a character"):
        base_of(None, ["name=a\udcff"])


def test_a_schedule_of_several_stages_without_a_pipeline_has_a_timeline() -> None:
    bench = Workbench(base_of(None, BASE))
    assert "canvas" in bench.timeline({"layout.pipeline": "1", "layout.schedule": "interleaved"})["body"]


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipe-v", "dualpipe"])
def test_a_v_without_a_pipeline_is_planned(schedule: str) -> None:
    bench = Workbench(base_of(None, BASE))
    assert (
        json.loads(bench.answer({"layout.schedule": schedule, "train.global_batch": "64"}))["plan"]["step_seconds"] > 0
    )


def test_a_run_that_waits_for_the_host_is_told_what_staying_on_the_device_brings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys = {
        "model.preset": "llama3-8b", "layout.shard": "8", "train.dtype": "bfloat16", "train.seq_len": "8192",
        "train.global_batch": "64", "train.microbatch": "1", "cluster.chip": "h100", "memory.activations": "host",
    }  # fmt: skip
    found = faster_changes(Base(keys), {})
    best = found[0]
    assert best["what"] == "activations host → device"
    assert best["fits"]
    seconds = []
    for changes in ({}, best["keys"]):
        code, plan, _ = printed(capsys, [], keys | changes)
        assert code == 0
        seconds.append(plan["step_seconds"])
        assert (plan["breakdown"]["offload"] > 0) == (not changes)
    assert best["gain"] == pytest.approx(seconds[0] / seconds[1] - 1, rel=1e-6)
    assert any(one["what"].endswith("recompute none → full") for one in found)
