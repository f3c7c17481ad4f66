"""Whole runs in their folders: what is written, going on after a stop, refusing another job."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny_run import tiny_run

from shardwise.checkpoint.reader import open_checkpoint
from shardwise.files import write_atomically
from shardwise.report.words import clock
from shardwise.run import Run, UserError, read_run
from shardwise.run.write import to_toml
from shardwise.train import loop
from shardwise.train.loop import train
from shardwise.train.processes.check import check
from shardwise.train.progress.display import sparkline
from shardwise.train.progress.metrics import read_metrics
from shardwise.train.progress.result import StepResult
from shardwise.train.progress.speed import peak_memory
from shardwise.train.step import TrainState

LARGE = pytest.mark.large("a loss scale that a resumed run takes up; checkpoints of it are in tests/checkpoint")


def make_run(**keys: Any) -> Run:
    return tiny_run(**dict(steps=6, eval_every=3, eval_sequences=5, checkpoint_every=2) | keys)


def losses(folder: Path) -> list[float]:
    return [r["loss"] for r in read_metrics(folder) if "loss" in r]


def test_a_run_folder_holds_what_scripts_rely_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(keep=2)
    train(run, tmp_path / "out")
    assert read_run(tmp_path / "out" / "run.toml") == run
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in records if "loss" in r]
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5, 6]
    measured = {"tokens_per_s", "seconds", "mfu", "memory_gib"}
    assert set(steps[0]) == {"step", "loss", "grad_norm", "lr", "tokens"} | measured
    # The same work over the same peak at every step, and the memory of this process.
    assert steps[1]["mfu"] * steps[1]["seconds"] == pytest.approx(steps[0]["mfu"] * steps[0]["seconds"])
    assert 0 < steps[0]["mfu"] < 1
    assert steps[-1]["memory_gib"] == pytest.approx(peak_memory(torch.device("cpu")) / 2**30, rel=0.2)
    assert steps[-1]["tokens"] == 6 * 4 * 32
    assert [(r["step"], set(r)) for r in records if "eval_loss" in r] == [
        (3, {"step", "eval_loss"}),
        (6, {"step", "eval_loss"}),
    ]
    assert sorted(p.name for p in (tmp_path / "out" / "checkpoints").iterdir()) == [
        "step-00000004",
        "step-00000006",
    ]
    said = capsys.readouterr().out
    for word in (
        "loss",
        "grad norm",
        "lr",
        "tokens/s",
        "MFU",
        "memory",
        "left",
        "validation loss",
        "causal attention",
    ):
        assert word in said


@pytest.mark.parametrize(
    "keys", [dict(), pytest.param(dict(optimizer="muon", dtype="float16"), marks=LARGE), dict(dtype="float64")], ids=str
)
@pytest.mark.drawn(group="whole runs")
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path, keys: dict[str, Any]) -> None:
    whole = make_run(schedule="constant", **keys)
    train(whole, tmp_path / "whole")
    part = replace(whole, train=replace(whole.train, steps=4))
    train(part, tmp_path / "part")
    train(whole, tmp_path / "part")
    assert losses(tmp_path / "part") == losses(tmp_path / "whole")
    a, b = (open_checkpoint(tmp_path / which / "checkpoints" / "step-00000006", kind="") for which in ("whole", "part"))
    assert a.names == b.names
    assert all(torch.equal(a.get(name), b.get(name)) for name in a.names)


def test_a_host_that_reads_a_step_late_writes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: a step is read when the next one was begun, but before an evaluation or a checkpoint that rests on it."""
    order: list[tuple[str, int]] = []
    step, read, evaluate = TrainState.train_step, StepResult.read, TrainState.evaluate
    monkeypatch.setattr(
        TrainState, "train_step", lambda t, *a, **k: order.append(("begin", t.step + 1)) or step(t, *a, **k)
    )
    monkeypatch.setattr(
        TrainState, "evaluate", lambda t, *a, **k: order.append(("evaluate", t.step)) or evaluate(t, *a, **k)
    )
    monkeypatch.setattr(StepResult, "read", lambda r: order.append(("read", r.step)) or read(r))
    run = make_run(checkpoint_every=0, eval_every=4)
    train(run, tmp_path / "once")
    assert order[:4] == [("begin", 1), ("read", 1), ("begin", 2), ("read", 2)]
    order.clear()
    monkeypatch.setattr(loop, "steps_behind", lambda device: 1)
    train(run, tmp_path / "late")
    assert order == [
        ("begin", 1), ("begin", 2), ("read", 1), ("begin", 3), ("read", 2), ("begin", 4), ("read", 3), ("read", 4),
        ("evaluate", 4), ("begin", 5), ("begin", 6), ("read", 5), ("read", 6), ("evaluate", 6),
    ]  # fmt: skip
    clocked = ("seconds", "tokens_per_s", "mfu", "memory_gib")
    once, late = (
        [{k: v for k, v in r.items() if k not in clocked} for r in read_metrics(tmp_path / which)][:-1]
        for which in ("once", "late")
    )
    assert late == once


@pytest.mark.parametrize("behind", [0, 1])
def test_a_bad_step_is_named_by_its_own_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behind: int) -> None:
    monkeypatch.setattr(loop, "steps_behind", lambda device: behind)
    step = TrainState.train_step

    def spoiled(train_state: TrainState, *args: Any, **keys: Any) -> StepResult:
        result = step(train_state, *args, **keys)
        return replace(result, loss=result.loss * float("nan")) if train_state.step == 3 else result

    monkeypatch.setattr(TrainState, "train_step", spoiled)
    with pytest.raises(UserError, match="step 3: the loss is nan"):
        train(make_run(checkpoint_every=0, eval_every=0), tmp_path)


@pytest.mark.parametrize("behind", [0, 1])
def test_a_step_that_is_called_skipped_has_changed_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behind: int
) -> None:
    """A spike counts as one after 16 good steps, and the last of them must have been read when the next one is accepted."""
    monkeypatch.setattr(loop, "steps_behind", lambda device: behind)
    step, accepted = TrainState.train_step, {}

    def spiked(train_state: TrainState, *args: Any, accept: Any, **keys: Any) -> StepResult:
        factor = 1.2 if train_state.step == 16 else 1.0
        result = step(train_state, *args, accept=lambda loss, norm: accept(loss * factor, norm), **keys)
        accepted[train_state.step] = result.accepted
        return replace(result, loss=result.loss * factor)

    monkeypatch.setattr(TrainState, "train_step", spiked)
    train(make_run(steps=18, guard="skip", guard_spike=8.0, lr=1e-5, checkpoint_every=0, eval_every=0), tmp_path)
    skipped = {r["step"]: r.get("skipped", False) for r in read_metrics(tmp_path) if "loss" in r}
    assert [number for number in skipped if skipped[number]] == [17]
    assert all(accepted[number] != skipped[number] for number in range(1, 19))


def test_metrics_are_cut_back_to_the_step_that_is_resumed(tmp_path: Path) -> None:
    run = make_run()
    train(run, tmp_path)
    before = losses(tmp_path)
    # As if it had been killed after step 5: the newest checkpoint is step 4, and a line was cut off.
    for path in (tmp_path / "checkpoints" / "step-00000006").iterdir():
        path.unlink()
    (tmp_path / "checkpoints" / "step-00000006").rmdir()
    with (tmp_path / "metrics.jsonl").open("a") as f:
        f.write('{"step": 7, "lo')
    train(run, tmp_path)
    assert losses(tmp_path) == before


def test_the_last_line_tells_what_was_trained_now_from_what_was_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(make_run(steps=4, eval_every=0), tmp_path)
    assert re.search(r"^trained 512 tokens in \d+s; everything is in ", capsys.readouterr().out, re.MULTILINE)
    train(make_run(steps=6, eval_every=0), tmp_path)
    said = capsys.readouterr().out
    assert re.search(r"^trained 256 tokens in \d+s since step 4, 768 in all; everything is in ", said, re.MULTILINE)


def test_a_finished_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(make_run(), tmp_path)
    train(make_run(), tmp_path)
    assert "trained to step 6 already" in capsys.readouterr().out


def test_another_model_is_refused_with_the_difference(tmp_path: Path) -> None:
    run = make_run()
    train(run, tmp_path)
    wider = replace(run, model=replace(run.model, ffn=48))
    with pytest.raises(UserError, match=r"model\.ffn: 32 -> 48"):
        train(wider, tmp_path)


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(make_run(tensorboard=True), tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [e.value for e in events.Scalars("loss")] == pytest.approx(losses(tmp_path))
    assert len(events.Scalars("eval_loss")) == 2


def test_weights_and_biases_knows_a_run_by_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[dict[str, Any]] = []
    steps: list[int] = []

    class Service:
        def log(self, values: dict[str, Any], step: int) -> None:
            steps.append(step)

        def finish(self) -> None:
            pass

    fake = ModuleType("wandb")
    fake.init = lambda **keys: begun.append(keys) or Service()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    short = dict(wandb="project", eval_every=0, checkpoint_every=0)
    train(make_run(steps=2, **short), tmp_path / "one")
    train(make_run(steps=3, **short), tmp_path / "one")
    train(make_run(steps=2, **short), tmp_path / "two")
    one, again, two = begun
    assert [keys["name"] for keys in begun] == ["tiny"] * 3
    assert one["id"] == again["id"] == (tmp_path / "one" / "wandb-id").read_text().strip()
    assert two["id"] not in (one["id"], "tiny")
    assert [keys["resume"] for keys in begun] == ["allow"] * 3
    assert {1, 2, 3} <= set(steps)


class Unreachable:
    """What Weights & Biases may do without a network or a key."""

    def __init__(self, **keys: Any) -> None:
        if keys["project"] == "nowhere":
            raise RuntimeError("api_key not configured\nuse `wandb login`")

    def log(self, values: dict[str, Any], step: int) -> None:
        raise RuntimeError("the service is gone")


@pytest.mark.parametrize(
    ("project", "why"), [("nowhere", "api_key not configured"), ("somewhere", "the service is gone")]
)
def test_without_weights_and_biases_a_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], project: str, why: str
) -> None:
    fake = ModuleType("wandb")
    fake.init = Unreachable  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    train(make_run(steps=2, wandb=project, eval_every=0, checkpoint_every=0), tmp_path)
    assert len(losses(tmp_path)) == 2
    said = "warning: the run at Weights & Biases cannot be written: {}; training goes on without it"
    assert capsys.readouterr().out.count(said.format(why)) == 1


def test_a_missing_package_is_found_before_ranks_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(wandb="project", tensorboard=True)
    check(replace(run, train=replace(run.train, wandb="", tensorboard=False)), tmp_path)
    for name in ("wandb", "tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        UserError, match=r"(?s)train\.tensorboard needs TensorBoard.*train\.wandb needs Weights & Biases"
    ):
        check(run, tmp_path)


def test_durations_and_curves_read_well() -> None:
    assert [clock(s) for s in (0.4, 59, 61, 3725, 90061)] == ["0s", "59s", "1m01s", "1h02m", "1d01h"]
    assert sparkline([3, 2, 1, 0], 4) == "█▅▃▁"
    assert len(sparkline(list(map(float, range(100))), 10)) == 10
    assert sparkline([float("nan")], 5) == ""


@pytest.mark.parametrize(
    "where",
    [
        "| head -1",
        "> /dev/full",
    ],
)
@pytest.mark.drawn(group="commands")
def test_a_run_goes_on_where_nobody_reads(where: str, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(to_toml(make_run()))
    command = f"{sys.executable} -m shardwise train r.toml --out out {where}; exit ${{PIPESTATUS[0]}}"
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": root},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [r["step"] for r in read_metrics(tmp_path / "out") if "loss" in r][-1] == 6
    assert (tmp_path / "out" / "checkpoints" / "step-00000006").is_dir()


def test_metrics_that_cannot_be_written_do_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = os.open

    def full(path: Any, *how: Any) -> int:
        return real("/dev/full" if str(path).endswith(".jsonl") else path, *how)

    monkeypatch.setattr(os, "open", full)
    train(make_run(eval_every=0), tmp_path)
    said = capsys.readouterr().out
    assert said.count("metrics.jsonl cannot be written: No space left on device; training goes on without") == 1
    assert (tmp_path / "checkpoints" / "step-00000006").is_dir()


def test_a_run_that_has_begun_goes_on_where_no_file_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk without inodes: what exists can be written, and nothing else."""

    def no_inode(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def no_board(*args: Any, **keys: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    train(make_run(steps=2, eval_every=0), tmp_path / "begun")
    monkeypatch.setattr(loop, "write_atomically", no_inode)
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", no_board, raising=False)
    train(make_run(steps=4, eval_every=0, tensorboard=True), tmp_path / "begun")
    said = capsys.readouterr().out
    assert "run.toml cannot be written: No space left on device; training goes on, and the file stays as it was" in said
    assert "TensorBoard's file cannot be written: No space left on device; training goes on without it" in said
    assert (tmp_path / "begun" / "checkpoints" / "step-00000004").is_dir()
    with pytest.raises(UserError, match=r"new/run\.toml: cannot be written: No space left on device"):
        train(make_run(), tmp_path / "new")


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    (tmp_path / "a").write_bytes(b"before")
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "a", b"after")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"before")]


def test_a_damaged_record_takes_no_others_with_it(tmp_path: Path) -> None:
    train(make_run(eval_every=0), tmp_path)
    file = tmp_path / "metrics.jsonl"
    lines = file.read_bytes().split(b"\n")
    lines[1:5] = [b"garbage", b"\xff\r\xfe", b'{"step": null}', b"[1]"]
    file.write_bytes(b"\n".join(lines) + b'{"step": 7, "lo')
    train(make_run(eval_every=0, steps=8), tmp_path)
    assert [r["step"] for r in read_metrics(tmp_path) if "loss" in r] == [1, 6, 7, 8]
