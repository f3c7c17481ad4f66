"""Whole runs that are stopped and taken up again: bit for bit the run that never stopped, on any layout; what is kept and removed;
one run at a time in a folder; what may change between two starts, and what may not."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import cases
import checkpoint_cases
import pytest
import torch
from parallel_pool import RankPool
from tiny_run import MODEL, tiny_run

from shardwise.checkpoint.folder import FolderLock, complete, folder_of_step, step_of
from shardwise.checkpoint.huggingface import to_hf
from shardwise.checkpoint.reader import open_checkpoint
from shardwise.checkpoint.resume import resume
from shardwise.checkpoint.weights import load_model
from shardwise.data.open import open_data
from shardwise.run import Run, UserError
from shardwise.train.loop import train
from shardwise.train.processes.check import check
from shardwise.train.progress.metrics import read_metrics
from shardwise.train.step import TrainState

MIXTURE = MODEL | dict(experts=4, experts_per_token=2, expert_ffn=16, router="sigmoid", dense_layers=1)


def make_run(model: dict[str, Any] | None = None, layout: dict[str, Any] | None = None, **keys: Any) -> Run:
    settings = dict(steps=6, microbatch=1, eval_every=3, eval_sequences=5, checkpoint_every=2, keep=3)
    return tiny_run(layout, model, **settings | keys)


def curve(folder: Path) -> list[Any]:
    numbers = ("step", "loss", "grad_norm", "lr", "tokens", "eval_loss")
    return [[r.get(key) for key in numbers] for r in read_metrics(folder) if "loss" in r or "eval_loss" in r]


LAYOUTS: list[Any] = [
    (dict(), dict(optimizer="muon", dtype="float16")),
    (dict(shard=2, zero=2), dict(dtype="bfloat16")),
    (dict(tensor=2, pipeline=2), dict(model=MIXTURE, optimizer="muon")),
    (dict(shard=2, expert=2), dict(model=MIXTURE)),
    (dict(replicate=2, shard=2, zero=1), dict()),
]


@pytest.mark.parametrize(("layout", "keys"), LAYOUTS, ids=str)
@pytest.mark.drawn(group="resharding")
def test_a_stopped_run_is_the_unbroken_one_bit_for_bit(
    ranks: RankPool, tmp_path: Path, layout: dict[str, Any], keys: dict[str, Any]
) -> None:
    run = make_run(layout=layout, **keys)
    open_data(run)  # the ranks find the built-in corpus there
    ranks.run(run.layout.world, checkpoint_cases.whole_run, run, tmp_path / "whole")
    # As a crash after step 5 leaves it: metrics ahead of the newest checkpoint, and the last line cut off.
    part = Path(shutil.copytree(tmp_path / "whole", tmp_path / "part"))
    shutil.rmtree(folder_of_step(part, 6))
    with (part / "metrics.jsonl").open("r+") as f:
        f.truncate((part / "metrics.jsonl").stat().st_size - 20)
    said = ranks.run(run.layout.world, checkpoint_cases.whole_run, run, part)
    assert "going on from step 4" in said[0]
    assert curve(part) == curve(tmp_path / "whole")
    a, b = (open_checkpoint(folder_of_step(which, 6), kind="") for which in (tmp_path / "whole", part))
    assert sorted(a.names) == sorted(b.names)
    assert all(torch.equal(a.get(name), b.get(name)) for name in a.names)


@pytest.mark.drawn(group="resharding")
def test_weights_saved_by_several_ranks_are_read_and_converted_as_one(ranks: RankPool, tmp_path: Path) -> None:
    run = make_run(layout=dict(tensor=2, shard=2), dtype="float64", steps=2)
    open_data(run)
    ranks.run(4, checkpoint_cases.whole_run, run, tmp_path / "several")
    train(make_run(dtype="float64", steps=2), tmp_path / "one")
    models = [load_model(tmp_path / which)[0].state_dict() for which in ("several", "one")]
    assert models[0].keys() == models[1].keys()
    for name, value in models[0].items():
        torch.testing.assert_close(value, models[1][name], rtol=1e-9, atol=1e-12)
    done = to_hf(tmp_path / "several", tmp_path / "hf")
    assert done.parameters == sum(value.numel() for value in models[0].values())


def test_the_last_ones_and_every_nth_are_kept(tmp_path: Path) -> None:
    train(make_run(checkpoint_every=1, keep=2, keep_every=3, eval_every=0), tmp_path)
    assert [step_of(folder) for folder in complete(tmp_path)] == [3, 5, 6]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 3


def test_without_disk_space_a_checkpoint_is_left_out_and_the_last_one_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = shutil.disk_usage

    def nearly_full(path: Any) -> Any:
        return real(path)._replace(free=1000)

    monkeypatch.setattr(shutil, "disk_usage", nearly_full)
    with pytest.raises(UserError, match=r"the last checkpoint is not saved: the disk of .* has 1000 B free"):
        train(make_run(restarts=2, restart_wait=0), tmp_path)
    assert capsys.readouterr().out.count("is not saved: the disk of") == 3 + 2
    assert len(curve(tmp_path)) == 8  # it trained to the end all the same
    assert complete(tmp_path) == []


def test_the_last_save_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = shutil.disk_usage, []

    def full_for_a_while(path: Any) -> Any:
        asked.append(path)
        return real(path)._replace(free=1000 if len(asked) < 5 else 1 << 40)

    monkeypatch.setattr(shutil, "disk_usage", full_for_a_while)
    train(make_run(restarts=3, restart_wait=0), tmp_path)
    assert [step_of(folder) for folder in complete(tmp_path)] == [6]


def test_another_job_is_refused_with_all_that_differs_and_the_rest_may_change(tmp_path: Path) -> None:
    run = make_run(steps=2)
    train(run, tmp_path)
    other = replace(
        run,
        model=replace(run.model, ffn=48, heads=4),
        train=replace(run.train, seed=3, optimizer="muon", lr=1e-5),
        data=replace(run.data, holdout=0.2),
    )
    for refuse in (check, train):
        with pytest.raises(UserError) as caught:
            refuse(other, tmp_path)
        (problem,) = caught.value.problems
        for difference in (
            "model.ffn: 32 -> 48",
            "model.heads: 2 -> 4",
            "train.seed: 0 -> 3",
            "train.optimizer: 'adamw' -> 'muon'",
            "data.holdout: 0.01 -> 0.2",
        ):
            assert difference in problem.message
        assert "train.lr" not in problem.message
    train(replace(run, train=replace(run.train, lr=1e-5, steps=3, checkpoint_every=1, dtype="float64")), tmp_path)
    assert [r["step"] for r in read_metrics(tmp_path) if "loss" in r] == [1, 2, 3]


def test_other_data_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(steps=2)
    train(run, tmp_path)
    monkeypatch.setattr(
        "shardwise.train.batches.source.open_data", lambda run: replace(open_data(run), fingerprint="other")
    )
    with pytest.raises(UserError, match="was trained on other data"):
        train(run, tmp_path)


def test_a_folder_is_used_by_one_run_at_a_time(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    for refused in (train, check):
        with pytest.raises(UserError, match=rf"in use by another run \(process {os.getpid()} on .*, since 20"):
            refused(make_run(), tmp_path)
    lock.release()
    FolderLock(tmp_path).release()


def test_the_lock_of_a_killed_run_is_gone_with_it(tmp_path: Path) -> None:
    ready, there = os.pipe()
    child = os.fork()
    if child == 0:
        FolderLock(tmp_path)
        os.write(there, b"x")
        signal.pause()
    os.read(ready, 1)
    with pytest.raises(UserError, match=f"process {child}"):
        FolderLock(tmp_path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    FolderLock(tmp_path).release()


def test_random_generators_go_on_where_they_were(tmp_path: Path) -> None:
    run = cases.make_run("dense", {}, layers=1)
    train_state = checkpoint_cases.trained(run, 1)
    torch.rand(3)
    saver = checkpoint_cases.saver_of(train_state, tmp_path)
    saver.save(train_state)
    want = torch.rand(4)
    assert saver.finish() == ""
    assert resume(TrainState(run), tmp_path, checkpoint_cases.DATA, print) is not None
    assert torch.equal(torch.rand(4), want)
