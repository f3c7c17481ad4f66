"""Training, serving and tracing from Python, for real on this machine."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import shardwise
from shardwise.api.processes import TrainResult
from shardwise.data.build import build
from shardwise.run import read_run
from shardwise.train.progress.metrics import Metrics

H200 = Path(__file__).parents[1] / "trace/data/h200"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[shardwise.Run, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "source.txt").write_text("def one(): return 1\n" * 40)
    build([folder / "source.txt"], folder / "set", workers=1)
    run = shardwise.Run(
        name="tiny", layers=1, hidden=16, heads=2, vocab=257, sets=[str(folder / "set")],
        train=dict(steps=2, seq_len=32, global_batch=2, eval_every=0, device="cpu"),
    )  # fmt: skip
    return run, folder / "run"


@pytest.mark.drawn(group="commands")
def test_a_run_is_trained_and_served(tiny: tuple[shardwise.Run, Path], capfd: pytest.CaptureFixture[str]) -> None:
    run, out = tiny
    trained = shardwise.train(run, out)
    assert [step for step, _ in trained.losses] == [1, 2]
    assert not trained.stopped
    assert "loss" in capfd.readouterr().out
    assert list(trained.to_frame().dropna(subset="loss")["step"]) == [1, 2]
    assert f"{trained.loss:.4f}" in repr(trained)
    assert "<polyline" in trained.page()
    (out / "key").write_text("secret\n", encoding="utf-8")
    with shardwise.serve(out, api_key=f"@{out / 'key'}") as server:
        first = server.complete("def ", max_tokens=4, temperature=0)
        assert first == server.complete("def ", max_tokens=4, temperature=0)
    assert server.child.returncode == 0


@pytest.mark.large("that a run trained from Python is resumed, and refused where it became another job")
def test_a_run_is_resumed(tiny: tuple[shardwise.Run, Path], capfd: pytest.CaptureFixture[str]) -> None:
    run, out = tiny
    trained = shardwise.train(run, out, quiet=True)
    more = shardwise.train(run.replace(steps=3), out, quiet=True)
    assert [step for step, _ in more.losses] == [1, 2, 3]
    assert more.losses[:2] == trained.losses[:2]
    assert not capfd.readouterr().out
    with pytest.raises(shardwise.UserError, match="hidden"):
        shardwise.train(run.replace(hidden=32), out, quiet=True)


@pytest.mark.parametrize("first", [2.5, float("inf")])
def test_a_run_that_diverged_is_shown(first: float, tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, read_run(), print)
    metrics.record(step=1, loss=first)
    metrics.record(step=2, loss=float("nan"))
    result = TrainResult(tmp_path)
    assert [step for step, _ in result.losses] == [1, 2]
    assert result.losses[0][1] == first
    assert math.isnan(result.loss)
    assert "2 steps, loss nan" in repr(result)
    assert "<svg" in result.page()


def test_training_ends_with_the_reader_of_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `python job.py | head`."""
    code = (
        "import signal, sys, pathlib\n"
        f"def end(*_): pathlib.Path({str(tmp_path / 'saved')!r}).touch(); sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print('step 1', flush=True)\n"
        "signal.pause()"
    )
    monkeypatch.setattr("shardwise.api.processes.COMMAND", (sys.executable, "-c", code))
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        with pytest.raises(BrokenPipeError):
            shardwise.train({}, tmp_path / "run")
        monkeypatch.undo()
        with contextlib.suppress(BrokenPipeError):
            closed.close()
    assert (tmp_path / "saved").exists()


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(shardwise.UserError, match="nothing"):
        shardwise.serve(tmp_path / "nothing")


def test_a_profile_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = shardwise.trace(H200)
    assert found.step_seconds > 0
    frame = found.to_frame()
    assert frame["share"].sum() == pytest.approx(1, abs=0.01)
    assert found.to_dict()["step_time"] == found.answers.step_time
    assert found.findings[0].title in found.page()
    assert repr(found)
    assert shardwise.trace(H200, steps=(2, 2)).answers.step_time
    with pytest.raises(shardwise.UserError):
        shardwise.trace()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (dict(steps=5), ["steps: is 5, but has to be the first and the last profiler step; (5, 5) is step 5 alone"]),
        (dict(steps=0), ["(0, 0) is step 0 alone"]),
        (dict(steps=(1, 2, 3)), ["steps: is (1, 2, 3)"]),
        (dict(steps="ab"), ["steps: is 'ab'"]),
        (dict(steps=("a", 1)), ["steps: is ('a', 1)"]),
        (dict(steps=(4, 3)), ["steps: the last step, 3, comes before the first, 4"]),
        (dict(steps=(3, 4), all_events=True), ["all_events: looks at the whole file"]),
        (
            dict(steps=5, chip=6, dtype="bfloat61"),
            ["steps: is 5", "chip: 6 is not", "dtype: there is no 'bfloat61'; did you mean bfloat16"],
        ),
    ],
)
def test_wrong_arguments_of_a_trace_are_sentences(arguments: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(shardwise.UserError) as e:
        shardwise.trace(H200, **arguments)
    for words, problem in zip(said, e.value.problems, strict=True):
        assert words in str(problem)


def test_what_is_no_module_is_not_profiled() -> None:
    with pytest.raises(shardwise.UserError, match=r"a module is a torch\.nn\.Module, not int"):
        shardwise.profile(5)  # type: ignore[arg-type]
