"""Told to stop: every signal leads to a checkpoint of the step at hand, and the run goes on from there as if nothing had been."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_guard import losses, make_run

from shardwise.checkpoint.folder import complete
from shardwise.cli.main import main
from shardwise.train.faults.goodput import read_events
from shardwise.train.faults.monitor import PREEMPTED, Preempted
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
