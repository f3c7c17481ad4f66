"""The Python API says what the commands say, costs nothing to import, and shares its names with folders."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardwise
from shardwise.cli.main import main
from shardwise.run import Run as ResolvedRun
from shardwise.run import read_run
from shardwise.run.config import SECTIONS

SMALL = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 256}
RUN = """
[model]
preset = "llama3-8b"
[layout]
shard = 8
zero = 3
[cluster]
chip = "h100"
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(RUN)
    return path


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_costs_nothing() -> None:
    code = (
        "import sys; before = set(sys.modules); import shardwise; dir(shardwise); print(*(set(sys.modules) - before))"
    )
    loaded = python(code).split()
    assert {name.partition(".")[0] for name in loaded} <= {"shardwise", "__future__", "types", "typing", "collections",
        "functools", "_functools", "re", "enum", "copyreg", "contextlib", "operator", "_operator", "keyword", "reprlib",
        "itertools", "_collections", "abc", "warnings", "_typing", "_sre", "_collections_abc"}  # fmt: skip


@pytest.mark.parametrize(
    "imported",
    [
        "",
        "import shardwise.plan.plan, shardwise.train.optimizers.schedule, shardwise.trace.answers, shardwise.serve",
        "from shardwise.plan.plan import Plan; from shardwise import plan",
    ],
)
def test_a_verb_is_a_function_and_a_folder_in_any_order(imported: str) -> None:
    """The import system binds `shardwise.plan` to the folder whenever something in it is imported."""
    code = f"""
import inspect
{imported}
import shardwise
for name in ("plan", "train", "trace", "serve"):
    assert callable(getattr(shardwise, name)), name
    assert next(iter(inspect.signature(getattr(shardwise, name)).parameters)) in ("run", "paths", "checkpoint"), name
assert shardwise.plan(shardwise.Run(chip="h100")).fits
import shardwise.plan.plan as module
from shardwise.plan.plan import Plan
assert shardwise.plan.plan is module and module.Plan is Plan
print("good")
"""
    assert python(code) == "good\n"


def test_names_that_scripts_rely_on() -> None:
    for name in ("Run", "plan", "search", "train", "trace", "serve"):
        assert callable(getattr(shardwise, name))
        assert name in dir(shardwise)
    assert not hasattr(shardwise, "nothing")


def test_runs_from_keywords_dicts_and_files_are_the_same(run_file: Path) -> None:
    nested = {"model": {"preset": "llama3-8b"}, "layout": {"shard": 8, "zero": 3}, "cluster": {"chip": "h100"}}
    runs = [
        shardwise.Run(run_file),
        shardwise.Run(nested, name="job"),
        shardwise.Run(name="job", preset="llama3-8b", shard=8, zero=3, chip="h100"),
        shardwise.Run(**{"model.preset": "llama3-8b", "layout.shard": 8, "layout.zero": 3, "cluster.chip": "h100", "name": "job"}),
        shardwise.Run(run_file, shard=4).replace(layout={"shard": 8}),
    ]  # fmt: skip
    assert len(set(runs)) == 1
    assert runs[0].trained() == read_run(run_file)
    written = run_file.parent / "written.toml"
    written.write_text(runs[0].to_toml())
    assert shardwise.Run(written) == runs[0]


def test_auto_frees_the_layout_of_a_file(run_file: Path) -> None:
    assert shardwise.Run(run_file, layout="auto").layout.fixed == ()
    assert shardwise.Run(run_file, layout="auto", tensor=2).layout.fixed == ("tensor",)
    assert shardwise.Run(run_file, tensor=2, layout="auto").layout.fixed == ("tensor",)


def test_what_is_no_run_is_refused() -> None:
    """It was taken for a run of defaults alone."""
    with pytest.raises(shardwise.UserError, match="a run is a file, a dict or a Run, not int"):
        shardwise.Run(8)  # type: ignore[arg-type]
    with pytest.raises(shardwise.UserError, match="1 is no name of a key"):
        shardwise.Run({1: 2})  # type: ignore[dict-item]


def test_a_name_that_no_file_has_is_said_to_be_one(tmp_path: Path) -> None:
    """Run("a\\0b") was a file that has a number with too many digits."""
    refused = {"a\0b": r"'a\\x00b' cannot .* NUL", "a\ud800b": r"'a\\ud800b' cannot .* Unicode", b"ab": "not", 5: "not"}
    verbs: dict[str, Callable[[Any], object]] = {
        "": shardwise.Run, "out": lambda name: shardwise.train({}, name),
        "checkpoint": shardwise.serve, "paths": shardwise.trace,
    }  # fmt: skip
    for key, verb in verbs.items():
        for name, phrase in refused.items():
            with pytest.raises(shardwise.UserError, match=phrase) as e:
                verb(name)
            assert e.value.problems[0].key == key
    with pytest.raises(shardwise.UserError, match="NUL"):
        shardwise.Run(tmp_path / "a\0b")


def test_all_mistakes_at_once() -> None:
    with pytest.raises(shardwise.UserError) as e:
        shardwise.Run(presett="llama3-8b", tensor="many", schedule="1f1b", chip="h1000")
    said = str(e.value)
    for words in ("model.preset", "'many' is not a whole number", "layout.schedule or train.schedule"):
        assert words in said


def test_a_plan_is_the_command_s(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(run_file), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    plan = shardwise.plan(shardwise.Run(run_file))
    assert json.loads(plan.to_json()) == printed
    assert plan.fits is printed["fits"]
    assert plan.mfu == printed["mfu"]
    assert plan.step_seconds == printed["step_seconds"]
    assert plan.memory.peak == printed["memory"]["peak"]
    assert shardwise.plan(run_file).to_dict() == plan.to_dict() == shardwise.plan(str(run_file)).to_dict()
    assert isinstance(plan.run, ResolvedRun)
    assert "MFU" in repr(plan)
    assert "llama3-8b" in plan._repr_html_()
    assert plan.notes[0].startswith("not set in the run, taken from the preset")


@pytest.mark.drawn(group="searches")
def test_a_search_is_the_command_s(run_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plan", str(run_file), "--layout=auto", "--json", "--keep", "4"]) == 0
    printed = json.loads(capsys.readouterr().out)
    found = shardwise.search(run_file, keep=4)
    assert json.loads(found.to_json()) == printed
    assert len(found) == len(list(found)) == 4
    assert found[0] is found.best
    assert found.best.next_change == printed["ranking"][0]["next_change"]
    frame = found.to_frame()
    assert list(frame["step_seconds"]) == [plan.step_seconds for plan in found]
    assert frame["mfu"].is_monotonic_decreasing
    page = re.search(r'srcdoc="(.*?)"', found._repr_html_(), re.DOTALL)
    assert page is not None
    found.save(tmp_path / "found.html")
    assert (tmp_path / "found.html").read_text().startswith("<!DOCTYPE html>")
    # A plan of the ranking is a run like any other.
    assert shardwise.plan(found[1].run).step_seconds == found[1].step_seconds


def test_the_plan_of_an_open_layout_is_that_of_the_best() -> None:
    run = shardwise.Run(model=SMALL, layout="auto", chip="h100", devices_per_node=2, global_batch=4, seq_len=64)
    assert shardwise.plan(run).to_dict()["layout"] == shardwise.search(run, keep=1).best.to_dict()["layout"]


def test_a_load_is_planned() -> None:
    run = shardwise.Run(
        model=SMALL, serve={"concurrency": 2, "input_tokens": "16", "output_tokens": "8", "requests": 4}
    )
    load = shardwise.plan(run)
    assert load.to_dict()["holds"] is load.holds
    assert load.to_frame()["output_tokens_per_s"][0] > 0
    with pytest.raises(shardwise.UserError, match=r"shardwise\.plan"):
        shardwise.search(run)


def test_a_run_shows_what_was_chosen() -> None:
    run = shardwise.Run(preset="llama3-8b", tensor=2, chip="h100")
    assert "layout.tensor=2" in repr(run)
    assert "hidden" not in repr(run)
    assert "tensor = 2" in run._repr_html_()


def test_a_run_has_every_section() -> None:
    run = shardwise.Run(**{"memory.optimizer": "host"})
    assert run.memory.optimizer == "host"
    for name, section in SECTIONS.items():
        assert isinstance(getattr(run, name), section), name


def test_signatures_are_those_of_the_functions() -> None:
    assert "keep" in inspect.signature(shardwise.search).parameters
    assert "out" in inspect.signature(shardwise.train).parameters
