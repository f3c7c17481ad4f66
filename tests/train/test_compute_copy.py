"""16-bit copies that are kept from step to step give the numbers that casts give, to the bit; here on a CPU, where they bring
nothing, by the path that every optimizer can take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.measure.verify import random_batch
from shardwise.parallel import apply as apply_module
from shardwise.run import Run, read_run, run_from_dict
from shardwise.run.derive import keeps_compute_copies, planned_on_gpu
from shardwise.train.step import TrainState


def small_run(**train: Any) -> Run:
    model = dict(layers=2, hidden=32, heads=4, kv_heads=2, ffn=96, vocab=61, bias="qkv")
    settings = dict(steps=9, seq_len=16, global_batch=4, dtype="bfloat16", device="cpu", lr=1e-2) | train
    return run_from_dict(dict(model=model, train=settings))


def train_state_of(run: Run, kept: bool, monkeypatch: pytest.MonkeyPatch) -> TrainState:
    monkeypatch.setattr(apply_module, "keeps_compute_copies", lambda run, gpu: kept)
    return TrainState(run)


def test_steps_are_the_same_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    run = small_run()
    cast, kept = (train_state_of(run, one, monkeypatch) for one in (False, True))
    assert sum(held.compute_copy is not None for held in kept.parallel.parameters) == 2 * 7
    assert [name for name, _ in kept.model.named_parameters()] == [name for name, _ in cast.model.named_parameters()]
    for number in range(4):
        results = [train_state.train_step(random_batch(run, number)).read() for train_state in (cast, kept)]
        # The norms of the matrices are added in another order, which on some CPUs rounds the last bit differently.
        assert results[0] == (results[1][0], pytest.approx(results[1][1], rel=1e-15), results[1][2])
    for mine, theirs in zip(kept.model.parameters(), cast.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.grad is None or theirs.grad is not None
    for held in kept.parallel.parameters:
        assert (held.grad is None) or held.grad.dtype == (
            torch.float32 if held.compute_copy is None else torch.bfloat16
        )


def test_a_parameter_that_is_changed_from_outside_is_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run = small_run()
    train_state = train_state_of(run, True, monkeypatch)
    batch = random_batch(run)
    before = train_state.evaluate(lambda numbers: batch, torch.arange(4).numpy())
    with torch.no_grad():
        for parameter in train_state.model.parameters():
            parameter.mul_(2)
    changed = train_state.evaluate(lambda numbers: batch, torch.arange(4).numpy())
    plain = train_state_of(run, False, monkeypatch)
    with torch.no_grad():
        for parameter in plain.model.parameters():
            parameter.mul_(2)
    assert changed != before
    assert changed == plain.evaluate(lambda numbers: batch, torch.arange(4).numpy())


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        ([], True),
        (["train.microbatch=1"], False),  # gradients are added
        (["train.dtype=float32"], False),
        (["train.fp8=tensorwise"], False),  # cast otherwise
        (["train.optimizer=muon"], False),
        (["layout.recompute=full"], False),  # casts do not stay
        (["layout.shard=2"], False),
        (["train.recheck_every=10", "train.deterministic=true"], False),
        (["cluster.chip="], False),
    ],
)
def test_where_copies_are_kept(overrides: list[str], kept: bool, tmp_path: Path) -> None:
    run = read_run(None, ["train.dtype=bfloat16", "cluster.chip=h200", *overrides])
    assert keeps_compute_copies(run, gpu=planned_on_gpu(run)) is kept
