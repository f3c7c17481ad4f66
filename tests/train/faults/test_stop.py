"""Told to stop: every signal leads to a checkpoint of the step at hand, and the run goes on from there as if nothing had been."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import stops
from patience import HANG_SECONDS
from test_guard import losses, make_run

from shardwise.checkpoint.folder import complete
from shardwise.cli.main import main
from shardwise.train.faults.goodput import read_events
from shardwise.train.faults.stop import PREEMPTED, Preempted, StopRequest
from shardwise.train.loop import train
from shardwise.train.step import TrainState


def send_before_step(monkeypatch: pytest.MonkeyPatch, number: signal.Signals, step: int) -> None:
    train_step = TrainState.train_step

    def sending(train_state: TrainState, *arguments: Any, **keys: Any) -> Any:
        result = train_step(train_state, *arguments, **keys)
        if train_state.step == step:
            os.kill(os.getpid(), number)
        return result

    monkeypatch.setattr(TrainState, "train_step", sending)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
@pytest.mark.drawn(1)
def test_a_signal_saves_the_next_step_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    run = make_run(checkpoint_every=0)
    train(run, tmp_path / "whole")
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        send_before_step(patch, number, 3)
        with pytest.raises(Preempted, match="saved step 4"):
            train(run, tmp_path / "out")
    assert signal.getsignal(number) == before
    assert [folder.name for folder in complete(tmp_path / "out")] == ["step-00000004"]
    train(run, tmp_path / "out")
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")
    assert [e["what"] for e in read_events(tmp_path / "out") if e["what"] in ("begin", "failed", "end")] == [
        "begin",
        "end",
        "begin",
        "end",
    ]


def test_the_command_says_that_it_can_be_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "r.toml"
    run.write_text(
        "[model]\nlayers = 1\nhidden = 16\nheads = 2\nffn = 32\n[train]\nsteps = 5\nseq_len = 16\nglobal_batch = 2\n"
    )
    send_before_step(monkeypatch, signal.SIGTERM, 2)
    assert main(["train", str(run), "--out", str(tmp_path / "out"), "--train.device=cpu"]) == PREEMPTED
    monkeypatch.undo()
    assert main(["train", str(run), "--out", str(tmp_path / "out"), "--train.device=cpu"]) == 0


def test_a_step_that_ends_the_run_is_its_end_even_when_told_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    send_before_step(monkeypatch, signal.SIGTERM, 7)
    train(replace(run, train=replace(run.train, steps=8)), tmp_path / "out")
    assert len(losses(tmp_path / "out")) == 8


TINY = """
[model]
layers = 1
hidden = 16
heads = 2
ffn = 32
[train]
steps = 2000
seq_len = 16
global_batch = 4
device = "cpu"
"""


def started(folder: Path, *keys: str) -> subprocess.Popen[str]:
    (folder / "r.toml").write_text(TINY)
    command = [sys.executable, "-m", "shardwise", "train", "r.toml", "--out", "out", *keys]
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(sys.path))
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True, process_group=0)


def catches(process: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    caught = next(line for line in lines if line.startswith("SigCgt:")).split()[1]
    return bool(int(caught, 16) >> (number - 1) & 1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("group", [False, True])
@pytest.mark.drawn(group="commands")
def test_a_stop_while_modules_are_imported_is_one_sentence(tmp_path: Path, number: signal.Signals, group: bool) -> None:
    process = started(tmp_path, "--layout.shard=2")
    deadline = time.monotonic() + HANG_SECONDS
    while not catches(process.pid, signal.SIGTERM):  # Python's own start is over
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(0.2)
    os.killpg(process.pid, number) if group else process.send_signal(number)
    _, said = process.communicate(timeout=HANG_SECONDS)
    assert (process.returncode, said) == (PREEMPTED, "stop requested before the first step: there is nothing to save\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.drawn(group="commands")
def test_a_stop_while_ranks_start_is_not_lost(tmp_path: Path, number: signal.Signals) -> None:
    """Ranks exist, and none has come to its first step: some are in the middle of joining a process group."""
    process = started(tmp_path, "--layout.shard=2")
    deadline = time.monotonic() + HANG_SECONDS
    while not list((tmp_path / "out" / "logs").glob("rank-1.log")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(number)
    out, said = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == PREEMPTED, (out, said)
    assert said.splitlines()[-1].startswith("stop requested")
    assert said.count("stop requested") == 1
    assert "Traceback" not in said


def test_a_second_interrupt_does_not_lose_what_was_trained(capfd: pytest.CaptureFixture[str]) -> None:
    request = StopRequest()
    request.note(signal.SIGINT, None)
    request.note(signal.SIGTERM, None)
    request.note(signal.SIGINT, None)
    assert "a third Ctrl-C ends the run" in capfd.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        request.note(signal.SIGINT, None)


@pytest.mark.large(
    "moments that nobody thought of, and that the run goes on from each of them bit for bit", campaign=True
)
def test_stops_at_random_moments(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    outcomes = stops.campaign(tmp_path, 12, request.config.getoption("--seed"), at_once=1)
    assert not [outcome for outcome in outcomes if outcome.wrong]
