"""`shardwise plan` as a user meets it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cli.main import main

RUN = """
[model]
preset = "llama3-8b"
[layout]
shard = 8
tensor = 2
pipeline = 2
[train]
seq_len = 8192
global_batch = 64
microbatch = 1
dtype = "bfloat16"
[cluster]
chip = "h100"
nodes = 4
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def test_json_has_the_names_that_scripts_rely_on(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(run_file), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    names = {
        "layout",
        "fits",
        "step_seconds",
        "tokens_per_s",
        "mfu",
        "flops_convention",
        "memory",
        "traffic",
        "breakdown",
        "cost",
    }
    assert names <= set(plan)
    assert sum(plan["breakdown"].values()) == pytest.approx(plan["step_seconds"])
    assert plan["tokens_per_s"] == pytest.approx(64 * 8192 / plan["step_seconds"])
    assert plan["step_seconds_low"] < plan["step_seconds"] < plan["step_seconds_high"]
    assert len(plan["memory"]["stages"]) == 2
    assert plan["bytes_moved"]["norm"]["forward"] > 0
    assert set(plan["traffic"]) >= {"shard", "tensor", "pipeline"}


def test_pictures(run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, trace = tmp_path / "plan.html", tmp_path / "plan.json"
    assert main(["plan", str(run_file), "--html", str(page), "--trace", str(trace)]) == 0
    shown = capsys.readouterr().out
    for word in ("Memory", "Time", "Traffic", "One step", "GiB"):
        assert word in shown
    assert "<svg" in page.read_text()
    events = json.loads(trace.read_text())
    events = events if isinstance(events, list) else events["traceEvents"]
    forwards = [e for e in events if e.get("ph") == "X" and e["name"] == "forward"]
    assert len(forwards) == 2 * 8


def test_what_does_not_fit_is_said_and_exits_with_one(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["plan", str(run_file), "--model.preset=llama3-405b", "--json"])
    plan = json.loads(capsys.readouterr().out)
    assert code == 1
    assert plan["fits"] is False
    assert plan["binds"].startswith("memory")


def test_a_search_ranks_layouts(run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_file.write_text('layout = "auto"\n' + RUN.replace("[layout]\nshard = 8\ntensor = 2\npipeline = 2\n", ""))
    page = tmp_path / "plan.html"
    assert main(["plan", str(run_file), "--json", "--keep", "3", "--html", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)
    # The picture of the front numbers its points as the ranking does, and says of others that they are not in it.
    front, ranking = ([plan["layout"] for plan in found[name]] for name in ("pareto", "ranking"))
    expected = [f"number {ranking.index(each) + 1}" if each in ranking else "not in the ranking" for each in front]
    tips = re.findall(r'data-tip="(number \d+|not in the ranking)', page.read_text())
    assert sorted(tips) == sorted(expected)
    assert "not in the ranking" in expected
    assert len(set(expected)) > 1
    assert found["searched"] > 100
    times = [plan["step_seconds"] for plan in found["ranking"]]
    assert len(times) == 3
    assert times == sorted(times)
    assert all(plan["fits"] for plan in found["ranking"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cluster.chip=h101"], ["h101", "h100"]),
        (["--train.global_batch=60"], ["not a multiple"]),
        (["--layout.tensor=-2", "--train.seq_len=0"], ["layout.tensor", "train.seq_len"]),
        (["--devices=64"], ["auto"]),
        (["--layout=auto", "--devices=a,b"], ["a,b"]),
    ],
    ids=str,
)
def test_nonsense_gets_sentences(
    run_file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    assert main(["plan", str(run_file), *arguments]) == 2
    said = capsys.readouterr().err
    for word in words:
        assert word in said


def test_planning_needs_no_torch(run_file: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from shardwise.cli.main import main; "
        f"assert main(['plan', {str(run_file)!r}]) == 0"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.drawn(group="searches")
def test_auto_on_the_command_line_frees_what_the_file_says(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def searched(*words: str) -> tuple[int, set[int]]:
        assert main(["plan", str(run_file), "--json", "--keep=20", *words]) == 0
        found = json.loads(capsys.readouterr().out)
        return found["searched"], {plan["layout"]["tensor"] for plan in found["ranking"]}

    free, bound = searched("--layout=auto"), searched("--layout.auto=true")
    assert bound[1] == {2} != free[1]
    assert bound[0] < free[0]


def test_a_chip_nobody_knows_is_told_with_everything_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--cluster.chip=h10", "--train.global_batch=-3", "--layout.tensor=0"]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in ("h10", "h100", "train.global_batch", "layout.tensor"))


def test_a_chip_without_published_runs_has_a_wider_interval(capsys: pytest.CaptureFixture[str]) -> None:
    def width(*words: str) -> float:
        main(["plan", "--json", "--model.preset=llama3-8b", "--train.dtype=bfloat16", "--layout.shard=8", *words])
        plan = json.loads(capsys.readouterr().out)
        assert ("shardwise bench" in " ".join(plan["notes"])) == ("tpu-v5p" in words[0])
        return plan["step_seconds_high"] / plan["step_seconds"]

    assert width("--cluster.chip=tpu-v5p") - 1 > 1.1 * (width("--cluster.chip=h100") - 1)


@pytest.mark.drawn(group="searches")
def test_every_number_of_devices_is_shown_or_told(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    many = ["plan", str(run_file), "--layout=auto", "--model.preset=llama3-70b", "--devices", "8,64,128", "--keep", "1"]
    assert main(many) == 0
    shown = capsys.readouterr().out
    rows = [line.split()[:2] for line in shown.splitlines() if line[:1].isdigit() and "GiB" in line and "$" in line]
    assert sorted(devices for _, devices in rows) == ["128", "64"]
    assert "nothing fits on 8 devices" in shown


@pytest.mark.parametrize("layout", [["--layout=auto"], []])
def test_a_limit_that_limits_nothing_is_a_mistake(
    layout: list[str], run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(run_file), *layout, "--max-microbatch", "4"]) == 2
    told = capsys.readouterr().err
    assert "train.microbatch is given (1)" in told if layout else "is for a search" in told


@pytest.mark.drawn(group="searches")
def test_a_narrow_ranking_keeps_memory_and_cost(
    run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", str(run_file), "--layout=auto", "--train.global_batch=256", "--keep", "12"]) == 0
    shown = capsys.readouterr().out.splitlines()
    head = shown[next(n for n, line in enumerate(shown) if "layout" in line and "step" in line)]
    assert head.split()[:1] == ["layout"]
    assert head.split()[-2:] == ["memory", "cost"]
    assert max(map(len, shown)) <= 80
    first = next(line for line in shown if line.startswith(" 1 "))
    assert "GiB" in first
    assert "$" in first
    # What would bring each row most is listed below where there is no column for it.
    at = shown.index("next change of each:")
    assert sum(" → " in line for line in shown[at:]) >= 12
    assert any(line.startswith("not shown, the terminal is too narrow: ") for line in shown)


def test_axes_that_leave_the_machine_are_marked(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(run_file), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["over_network"] == ["shard", "pipeline"]  # 8 devices a machine: tensor 2 is inside, shard 8 is not
    assert plan["cost"]["usd_per_hour"] == pytest.approx(32 * 2.99)
    assert main(["plan", str(run_file)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "over the network between machines: shard, pipeline" in shown
    assert "$95.68 an hour" in shown
    assert main(["plan", str(run_file), "--cluster.chip=h20"]) == 0
    assert "no price known: set cluster.price" in " ".join(capsys.readouterr().out.split())


def test_ranks_that_do_not_fill_the_machines_are_told_of_the_search(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["--cluster.nodes=5"], ["--cluster.devices_per_node=16"]):
        assert main(["plan", str(run_file), *words]) == 2
        assert 'layout = "auto" finds a layout that fills the machines' in capsys.readouterr().err
    few = ["plan", "--model.preset=llama3-1b", "--cluster.chip=h100", "--layout.shard=2"]
    main(few)
    told = "2 of the 8 in a machine: --layout=auto finds the best layout for all of them"
    assert told in " ".join(capsys.readouterr().out.split())
    main([*few, "--layout.shard=8"])
    assert "--layout=auto" not in capsys.readouterr().out
