"""Bad steps: what counts as one, that a refused step changes nothing, and that a batch left out is as if it had never been."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_run import tiny_run
from torch import Tensor

from shardwise.data.batches import Batch
from shardwise.data.open import open_data
from shardwise.parallel.local_parameter import local
from shardwise.run import Run, UserError
from shardwise.train.faults.goodput import read_events
from shardwise.train.faults.guard import FLAT, Guard, History, above
from shardwise.train.loop import train
from shardwise.train.progress.metrics import read_metrics
from shardwise.train.step import TrainState


def make_run(**keys: Any) -> Run:
    return tiny_run(**dict(steps=8, checkpoint_every=2, schedule="constant") | keys)


def losses(folder: Path) -> list[tuple[float, float]]:
    return [(r["loss"], r["grad_norm"]) for r in read_metrics(folder) if "loss" in r]


@given(st.sets(st.integers(1, 40)), st.integers(1, 40))
def test_steps_take_the_batches_that_are_left_in_order(excluded: set[int], steps: int) -> None:
    history = History(excluded=sorted(excluded))
    left = [batch for batch in range(1, 100) if batch not in excluded]
    assert [history.batch_of(step) for step in range(1, steps + 1)] == left[:steps]


@given(st.lists(st.floats(-1e3, 1e3), min_size=8, max_size=30), st.floats(-1e4, 1e4))
def test_deviations_are_those_of_numpy(values: list[float], value: float) -> None:
    middle = np.median(values)
    spread = max(1.4826 * np.median(np.abs(np.array(values) - middle)), FLAT * abs(middle), 1e-300)
    assert above(values, value, least=8) == pytest.approx((value - middle) / spread, rel=1e-9)
    assert above(values[:7], value, least=8) == 0


def test_spikes_are_seen_upwards_only_and_do_not_widen_the_measure() -> None:
    guard = Guard(make_run(guard="skip", guard_spike=6.0).train, History())
    rng = np.random.default_rng(1)
    for _ in range(40):
        assert guard.note(3 + 0.1 * rng.standard_normal(), 1 + 0.05 * rng.standard_normal()) is None
    assert guard.fault(1.0, 1.0) is None
    for bad in (4.5, 4.5, 4.5):
        fault = guard.note(bad, 1.0)
        assert fault is not None
        assert "the loss, 4.5, is" in fault
    assert "gradient norm" in (guard.fault(3.0, 9.0) or "")
    assert guard.fault(math.nan, 1.0) == "the loss is nan"
    assert guard.history.bad == 3


def test_an_overflow_is_the_loss_scales_affair_while_it_can_mend_it() -> None:
    guard = Guard(make_run(guard="stop").train, History())
    assert guard.note(3.0, math.inf, rescaled=True) is None
    assert guard.history.bad == 0
    assert guard.note(3.0, math.inf) == "the gradient norm is inf"
    assert guard.note(math.nan, math.nan, rescaled=True) == "the loss is nan"


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_refused_step_changes_neither_weights_nor_optimizer(optimizer: str) -> None:
    run = make_run(optimizer=optimizer)
    train_state, batches = TrainState(run), open_data(run).train
    train_state.train_step(batches.take(np.arange(4)))

    def state() -> list[Tensor]:
        held = [local(h.parameter).clone() for h in train_state.parallel.parameters]
        return held + [v.clone() for n in range(len(held)) for v in train_state.optimizer.state_of(n).values()]

    before, seen = state(), []
    result = train_state.train_step(batches.take(np.arange(4, 8)), accept=lambda *numbers: bool(seen.append(numbers)))
    assert not result.accepted
    assert seen == [(result.loss.item(), result.grad_norm.item())]
    assert all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))
    assert train_state.train_step(batches.take(np.arange(4, 8)), accept=lambda *_: True).accepted
    assert not all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))


def poison(monkeypatch: pytest.MonkeyPatch, run: Run, number: int) -> None:
    """Make one batch of the data give gradients that are not numbers."""
    size = run.train.global_batch
    bad = open_data(run).train.take(np.arange((number - 1) * size, number * size)).tokens
    passes = TrainState.passes

    def poisoned(train_state: TrainState, batch: Batch) -> Tensor:
        loss = passes(train_state, batch)
        if np.array_equal(batch.tokens, bad):
            for held in train_state.parallel.parameters:
                if held.grad is not None:
                    held.grad.fill_(math.nan)
        return loss

    monkeypatch.setattr(TrainState, "passes", poisoned)


def test_a_rollback_goes_on_as_if_the_batch_had_never_been(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(guard="rollback")
    clean = TrainState.__init__

    def without_batch_five(train_state: TrainState, *arguments: Any) -> None:
        clean(train_state, *arguments)
        train_state.history.excluded = [5]

    with monkeypatch.context() as patch:
        patch.setattr(TrainState, "__init__", without_batch_five)
        train(run, tmp_path / "expected")
    poison(monkeypatch, run, 5)
    train(run, tmp_path / "out")
    assert losses(tmp_path / "out") == losses(tmp_path / "expected")
    bad = [e for e in read_events(tmp_path / "out") if e["what"] == "bad"]
    assert [(e["step"], e["batch"], e["fault"]) for e in bad] == [(5, 5, "the gradient norm is nan")]
    # Stopped on the way and taken up again, it knows of the batch from what it saved.
    train(replace(run, train=replace(run.train, steps=6)), tmp_path / "part")
    train(run, tmp_path / "part")
    assert losses(tmp_path / "part") == losses(tmp_path / "expected")
    assert sum(e["what"] == "bad" for e in read_events(tmp_path / "part")) == 1


@pytest.mark.drawn(group="whole runs")
def test_a_rollback_frees_the_train_state_before_the_next_one_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(guard="rollback")
    poison(monkeypatch, run, 3)
    make, made = TrainState.__init__, list[weakref.ref[TrainState]]()
    alive: list[int] = []

    def watched(train_state: TrainState, *arguments: Any) -> None:
        alive.append(sum(state() is not None for state in made))
        make(train_state, *arguments)
        made.append(weakref.ref(train_state))

    monkeypatch.setattr(TrainState, "__init__", watched)
    train(run, tmp_path)
    assert alive == [0, 0]


def test_a_bad_step_is_skipped_or_ends_the_run_by_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(guard="skip")
    poison(monkeypatch, run, 3)
    train(run, tmp_path / "skip")
    records = [r for r in read_metrics(tmp_path / "skip") if "loss" in r]
    assert [r["step"] for r in records if r.get("skipped")] == [3]
    assert all(math.isfinite(r["grad_norm"]) for r in records if r["step"] != 3)
    with pytest.raises(UserError, match=r"step 3: the gradient norm is nan; train\.guard ="):
        train(replace(run, train=replace(run.train, guard="stop")), tmp_path / "stop")
    train(replace(run, train=replace(run.train, guard="none")), tmp_path / "none")
    assert read_metrics(tmp_path / "none")[-2]["grad_norm"] == "nan"
    # A run whose every step is bad ends.
    monkeypatch.setattr(Guard, "fault", lambda *_: "it is bad")
    with pytest.raises(UserError, match="10 bad steps in a row"):
        train(replace(run, train=replace(run.train, steps=12)), tmp_path / "all")
