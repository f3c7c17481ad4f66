"""Saved tensors that wait elsewhere: the same bits as those that stay, and the bytes of the plan on both sides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import cases
import pytest
import torch

from shardwise.measure.verify import TOLERANCE, verify_dry, verify_rank
from shardwise.plan.cost.rematerialization import Tensor, Window, choices
from shardwise.plan.trainer.rank import PlannedRank
from shardwise.run import Run
from shardwise.train.step import TrainState

PLAIN = "dense + no query norm"
OTHERS = [("tied", "bfloat16"), ("mixture", "float32"), ("latent", "float64")]
LARGE = pytest.mark.large("other models and dtypes; the small tier has every tensor that leaves")


def run_of(
    model: str,
    where: Literal["device", "host", "disk"],
    folder: str = "",
    layout: dict[str, Any] | None = None,
    **train: Any,
) -> Run:
    layout = layout or {}
    plain = cases.make_run(model, layout, **cases.layers_for(layout) | train)
    return replace(plain, memory=replace(plain.memory, activations=where, folder=folder))


def trained(run: Run) -> list[torch.Tensor]:
    """Losses of some steps, and the parameters behind them."""
    train_state = TrainState(run)
    losses = [train_state.train_step(cases.batch(step, True)).loss for step in range(2)]
    return [*losses, *(h.parameter.detach() for h in train_state.parallel.parameters)]


@pytest.mark.parametrize(
    ("model", "dtype"),
    [(PLAIN, "float32"), ("dense + alibi", "bfloat16"), *(pytest.param(*each, marks=LARGE) for each in OTHERS)],
)
def test_on_the_host_it_is_the_same_bits_and_the_bytes_of_the_plan(model: str, dtype: str) -> None:
    run = run_of(model, "host", dtype=dtype)
    for one, other in zip(trained(run), trained(run_of(model, "device", dtype=dtype)), strict=True):
        assert torch.equal(one, other)
    verdict = verify_rank(run, steps=1)
    assert not verdict.beyond(TOLERANCE), verdict.beyond(TOLERANCE)
    planned, measured = verdict.planned.memory, verdict.measured.memory
    assert planned.ranks[0]["activations"] == measured.ranks[0]["activations"]
    assert planned.host == measured.host
    assert planned.host[0] > 0


def test_on_disk_it_is_the_same_bits(tmp_path: Path) -> None:
    for one, other in zip(trained(run_of(PLAIN, "disk", str(tmp_path))), trained(run_of(PLAIN, "device")), strict=True):
        assert torch.equal(one, other)
    assert not list(tmp_path.iterdir())


def test_the_planner_chooses_for_each_tensor() -> None:
    chosen = dict(recompute="optimal", recompute_budget=1e-9)
    run = run_of(PLAIN, "host", layout=chosen, dtype="float32")
    words = PlannedRank(run, 0).recomputed[0]
    assert {word.removeprefix("host ") for word in words} >= {"gate", "up", "heads", "attended"}
    assert any(word.startswith("host ") for word in words)
    verdict = verify_rank(run, steps=1)
    assert not verdict.beyond(TOLERANCE), verdict.beyond(TOLERANCE)
    for one, other in zip(trained(run), trained(run_of(PLAIN, "device", dtype="float32")), strict=True):
        assert torch.equal(one, other)


@pytest.mark.large("a pipeline's microbatches in flight; the small tier has one stage")
def test_a_pipeline_keeps_as_many_as_are_in_flight() -> None:
    run = run_of("dense", "host", layout=dict(pipeline=2))
    verdict = verify_dry(run, 0, whole=True)
    assert not verdict.beyond(TOLERANCE), verdict.beyond(TOLERANCE)


def test_what_is_hidden_costs_nothing_and_what_is_not_is_weighed() -> None:
    tensors = {"up": Tensor(100.0, 4.0, ()), "gate": Tensor(50.0, 1.0, ()), "inner": Tensor(10.0, 0.1, ())}
    hidden = Window(to_host=50.0, to_device=100.0, forward=2.0, backward=4.0)  # 100 bytes leave unseen
    found = {choice.spared: choice for choice in choices(tensors, hidden)}
    assert found[100.0].seconds == 0.0
    assert found[100.0].dropped == {"host up"}
    assert found[110.0].dropped == {"host up", "inner"}
    assert found[110.0].seconds == pytest.approx(0.1)
    assert found[160.0].seconds == pytest.approx(1.1)  # 60 bytes more take 1.2 s to leave
    assert found[160.0].dropped == {"host up", "gate", "inner"}
