"""Training that starts from weights of a checkpoint, or of a folder made of a Hugging Face one: every rank of any layout holds its
shard of them exactly, and the first loss is theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import checkpoint_cases
import numpy as np
import pytest
import torch
from parallel_pool import RankPool
from tiny_run import MODEL, tiny_run
from torch.nn.functional import cross_entropy

from shardwise.checkpoint.folder import complete
from shardwise.checkpoint.huggingface import from_hf, to_hf
from shardwise.checkpoint.reader import open_checkpoint
from shardwise.checkpoint.resume import load_weights
from shardwise.checkpoint.state import buffers
from shardwise.checkpoint.weights import load_model
from shardwise.data.open import open_data
from shardwise.data.tokenizer import ByteTokenizer
from shardwise.parallel.local_parameter import local, local_box
from shardwise.run import Run, UserError, read_run, run_from_dict
from shardwise.train.loop import train
from shardwise.train.processes.check import check
from shardwise.train.progress.metrics import read_metrics
from shardwise.train.step import TrainState


def local_shards(rank: int, run: Run) -> dict[str, Any]:
    """What a rank holds once it has begun."""
    train_state = TrainState(run)
    load_weights(train_state, ByteTokenizer(), print)
    held = {
        h.name: (cases.slices(local_box(h, train_state.mesh)), local(h.parameter.detach()))
        for h in train_state.parallel.parameters
    }
    return held | {name: (..., buffer) for name, buffer in buffers(train_state.parallel.models)}


@pytest.mark.parametrize(
    ("model", "layout", "imported"),
    [
        ("dense", dict(shard=2, tensor=2), False),
        ("dense", dict(shard=2, tensor=2), True),
        ("dense", dict(pipeline=2, schedule="zb-v", replicate=2), True),
        ("mixture", dict(shard=4, expert=2), False),
        ("softmax", dict(shard=4, expert=2), True),
        ("softmax", dict(shard=2, tensor=2, expert_tensor=True), True),
        ("few", dict(shard=4), False),
    ],
    ids=str,
)
@pytest.mark.drawn(group="resharding")
def test_each_rank_holds_its_shard(
    ranks: RankPool, tmp_path: Path, model: str, layout: dict[str, Any], imported: bool
) -> None:
    checkpoint_cases.train_and_save(0, cases.make_run(model, {}, microbatch=1), tmp_path / "run", 1)
    source = tmp_path / "run"
    if imported:
        to_hf(source, tmp_path / "hf")
        source = tmp_path / "imported"
        from_hf(tmp_path / "hf", source, file_bytes=20_000)
    reader = open_checkpoint(source if imported else complete(source)[0])
    run = cases.make_run(model, layout, weights=str(source))
    covered = {name: np.zeros(reader.shape(name), bool) for name in reader.names}
    for got in ranks.run(run.layout.world, local_shards, run):
        for name, (where, value) in got.items():
            assert torch.equal(value, reader.get(name)[where])
            covered[name][where] = True
    assert all(each.all() for each in covered.values())


def make_run(**keys: Any) -> Run:
    return tiny_run(**dict(steps=4, checkpoint_every=2) | keys)


def losses(folder: Path) -> list[float]:
    return [r["loss"] for r in read_metrics(folder) if "loss" in r]


@pytest.mark.drawn(group="whole runs")
def test_the_first_loss_is_that_of_the_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(make_run(lr=1e-2), tmp_path / "first")
    run = make_run(weights=str(tmp_path / "first"), seed=3, steps=6)
    train(run, tmp_path / "second")
    assert (
        f"beginning with the weights of {tmp_path / 'first' / 'checkpoints' / 'step-00000004'}"
        in capsys.readouterr().out
    )
    model, _ = load_model(tmp_path / "first")
    batch = open_data(run).train.take(np.arange(4))
    with torch.no_grad():
        scores = model(torch.from_numpy(batch.tokens)).result.flatten(0, 1)
    want = cross_entropy(scores, torch.from_numpy(batch.targets).flatten()).item()
    got = losses(tmp_path / "second")
    assert got[0] == pytest.approx(want, rel=1e-5)
    # Stopped and taken up again, it goes on from its own checkpoint.
    train(make_run(weights=str(tmp_path / "first"), seed=3, steps=4), tmp_path / "third")
    assert losses(tmp_path / "third")[0] == got[0]
    capsys.readouterr()
    (tmp_path / "first").rename(tmp_path / "elsewhere")
    check(run, tmp_path / "third")
    train(run, tmp_path / "third")
    assert "beginning" not in capsys.readouterr().out
    assert len(losses(tmp_path / "third")) == 6


class OtherTokenizer(ByteTokenizer):
    digest = "another"


def test_weights_that_know_other_tokens_are_logged(tmp_path: Path) -> None:
    train(make_run(steps=1), tmp_path / "run")
    said: list[str] = []
    train_state = TrainState(make_run(weights=str(tmp_path / "run")))
    load_weights(train_state, ByteTokenizer(), said.append)
    assert len(said) == 1
    load_weights(train_state, OtherTokenizer(), said.append)
    assert said[-1] == "warning: those weights know other tokens (byte, 257) than the data's (byte, 257)"


def test_an_imported_run_takes_any_layout_and_batch(tmp_path: Path) -> None:
    train(make_run(steps=1), tmp_path / "run")
    to_hf(tmp_path / "run", tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "imported")
    more = ["layout.tensor=2", "train.global_batch=6", "cluster.nodes=1", f"train.weights={tmp_path / 'imported'}"]
    run = read_run(tmp_path / "imported" / "run.toml", more)
    assert (run.layout.world, run.train.microbatch, run.model.hidden) == (2, 6, 16)
    check(run, tmp_path / "new")


def test_what_cannot_be_started_from_is_refused_before_any_rank_starts(tmp_path: Path) -> None:
    train(make_run(steps=2), tmp_path / "run")
    to_hf(tmp_path / "run", tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "imported")
    wider = run_from_dict(dict(model=MODEL | dict(ffn=48), train=dict(weights=str(tmp_path / "run"), device="cpu")))
    for run, out, sentence in (
        (wider, "new", r"shapes do not fit the network: .*ffn"),
        (wider, "new", r"is of another network; copy \[model\] of .*run\.toml"),
        (make_run(weights=str(tmp_path / "hf")), "new", "convert from-hf"),
        (make_run(weights=str(tmp_path / "nowhere")), "new", "no such folder"),
        (make_run(), "imported", r"holds weights, and is no run folder; .* train\.weights"),
    ):
        with pytest.raises(UserError, match=sentence):
            check(run, tmp_path / out)
    with pytest.raises(UserError, match="shapes do not fit"):
        train(wider, tmp_path / "new")
    before = (tmp_path / "imported" / "run.toml").read_bytes()
    with pytest.raises(UserError, match=r"train\.weights"):
        train(make_run(), tmp_path / "imported")
    assert (tmp_path / "imported" / "run.toml").read_bytes() == before
