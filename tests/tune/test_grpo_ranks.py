"""GRPO on several ranks: whatever the layout, the same answers are drawn, and the same is learned from them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpo_runs import assert_learns_as_one_process, grpo_run, name_of, steps, train_rank
from parallel_pool import RankPool

from shardwise.plan.serving.rollouts import own_weight_bytes
from shardwise.plan.serving.weight_sync import rollout_layout
from shardwise.run import Run
from shardwise.train.loop import train
from shardwise.train.step import TrainState
from shardwise.tune.packing import Packing
from shardwise.tune.source import source_of
from shardwise.tune.weights import RolloutWeights

AXES: list[dict[str, Any]] = [
    dict(replicate=2),
    dict(shard=2),
    dict(tensor=2),
    dict(pipeline=2),
    dict(context=2),
]
DUALPIPE: dict[str, Any] = dict(pipeline=2, schedule="dualpipe")
MODEL = dict(layers=2, hidden=32, heads=4, kv_heads=2, vocab=260)
TO_EXPERTS = dict(experts=4, experts_per_token=2, router="sigmoid", shared_experts=1)
EXPERTS = MODEL | TO_EXPERTS


@pytest.mark.parametrize("layout", AXES, ids=lambda layout: "-".join(layout))
@pytest.mark.drawn(group="grpo on ranks")
def test_every_axis_learns_the_same(ranks: RankPool, task: Path, tmp_path: Path, layout: dict[str, Any]) -> None:
    """Two steps of each round, so that log-probabilities of before are needed; groups without a difference left out."""
    objective = dict(variant="dapo", iterations=2, filter_rounds=2)
    train_keys = dict(steps=3, microbatch=2)
    assert_learns_as_one_process(
        ranks, lambda lay: grpo_run(task, layout=lay, train=train_keys, objective=objective), layout, tmp_path
    )


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        (dict(shard=2, tensor=2, expert=2), EXPERTS | dict(vocab=261)),
        (dict(pipeline=2, tensor=2, schedule="interleaved"), MODEL | dict(layers=4, tied_embeddings=True)),
        (dict(tensor=4), MODEL),
        (dict(pipeline=2, schedule="dualpipe"), MODEL),
    ],
    ids=["experts", "interleaved", "copied heads", "both ends"],
)
@pytest.mark.drawn(group="grpo on ranks")
def test_engines_cut_otherwise_than_the_trainer_answer_the_same(
    ranks: RankPool, task: Path, tmp_path: Path, layout: dict[str, Any], model: dict[str, Any]
) -> None:
    """Experts dealt out over tensor ranks too, stages in another order, a head of keys on two ranks, a vocabulary of odd size."""
    found = assert_learns_as_one_process
    found(
        ranks, lambda lay: grpo_run(task, layout=lay, model=model, train=dict(steps=2, microbatch=1)), layout, tmp_path
    )


CUT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tensor": (dict(tensor=2), MODEL),
    "four tensor": (dict(tensor=4), MODEL),
    "pipeline": (dict(pipeline=2), MODEL),
    "expert": (dict(shard=2, expert=2), EXPERTS),
    "tensor and expert": (dict(tensor=2, shard=2, expert=2), EXPERTS),
    "tensor and pipeline": (dict(tensor=2, pipeline=2), EXPERTS),
}
"""Layouts whose engines are cut over ranks."""


@pytest.mark.parametrize("cut", CUT)
@pytest.mark.drawn(group="grpo on ranks")
def test_a_round_made_beside_training_by_engines_on_several_ranks(
    ranks: RankPool, task: Path, tmp_path: Path, cut: str
) -> None:
    """Two threads of each rank talk to those of others at a time: one trains, the other draws with the weights of before."""
    layout, model = CUT[cut]
    objective = dict(asynchronous=True, variant="dapo", filter_rounds=2)

    def run(layout: dict[str, Any]) -> Run:
        return grpo_run(task, layout=layout, model=model, train=dict(steps=4, microbatch=1), objective=objective)

    assert rollout_layout(run(layout)).replicate == 1
    assert_learns_as_one_process(ranks, run, layout, tmp_path)


@pytest.mark.parametrize("cut", CUT)
@pytest.mark.drawn(group="grpo on ranks")
def test_invariant_engines_on_several_ranks(ranks: RankPool, task: Path, tmp_path: Path, cut: str) -> None:
    """As one process; and where nothing is added up over ranks, its logprobs are the bits of the trainer's."""
    layout, model = CUT[cut]
    exact = "tensor" not in layout

    def run(layout: dict[str, Any]) -> Run:
        train_keys = dict(steps=3, microbatch=1, invariant=exact)
        return grpo_run(task, layout=layout, model=model, train=train_keys, serve=dict(invariant=True))

    assert rollout_layout(run(layout)).replicate == 1
    assert_learns_as_one_process(ranks, run, layout, tmp_path)
    if exact:
        assert [step["mismatch"] for step in steps(tmp_path / name_of(layout))] == [0, 0, 0]


@pytest.mark.large("an asynchronous pipeline that answers, stopped and resumed; three runs on two ranks")
def test_an_asynchronous_pipeline_answers_with_the_weights_of_a_checkpoint(
    ranks: RankPool, task: Path, tmp_path: Path
) -> None:
    """All stages have made the updates of the steps before a round; a resumed run, whose stages have, draws the same answers."""

    def run(count: int) -> Run:
        layout = dict(pipeline=2, schedule="pipedream")
        return grpo_run(task, layout=layout, train=dict(steps=count, microbatch=2, clip=0, checkpoint_every=0))

    ranks.run(2, train_rank, run(4), tmp_path / "whole")
    ranks.run(2, train_rank, run(2), tmp_path / "parts")
    ranks.run(2, train_rank, run(4), tmp_path / "parts")
    whole, parts = (steps(tmp_path / name) for name in ("whole", "parts"))
    assert len(whole) == 4
    for one, other in zip(whole, parts, strict=True):
        # The norm is that of the gradients each stage last updated with, and a resumed stage has none.
        assert other | dict(grad_norm=0) == one | dict(grad_norm=0)


@pytest.mark.drawn(group="grpo on ranks")
def test_a_reference_is_the_same_on_shards(ranks: RankPool, task: Path, tmp_path: Path) -> None:
    train(grpo_run(task, train=dict(steps=1)), tmp_path / "first", open_source=source_of)

    def run(layout: dict[str, Any]) -> Run:
        train_keys = dict(steps=3, weights=str(tmp_path / "first"))
        return grpo_run(task, layout=layout, train=train_keys, objective=dict(kl_beta=0.1))

    assert_learns_as_one_process(ranks, run, dict(shard=2, zero=1), tmp_path)
    found = steps(tmp_path / "alone")
    assert found[0]["kl"] == pytest.approx(0, abs=1e-12)
    assert found[-1]["kl"] > 1e-6


LARGE = pytest.mark.large("packed answers on every axis; the small tier draws of two")


@pytest.mark.parametrize(
    "layout",
    [
        dict(pipeline=2),
        dict(shard=2, zero=1),
        *(pytest.param(each, marks=LARGE) for each in (dict(replicate=1), *AXES, dict(tensor=2, context=2), DUALPIPE)),
    ],
    ids=lambda layout: "-".join(layout),
)
@pytest.mark.parametrize("variant", ["grpo", pytest.param("dapo", marks=LARGE)])
@pytest.mark.drawn(group="grpo on ranks")
def test_packed_answers_teach_what_they_teach_alone(
    ranks: RankPool, task: Path, tmp_path: Path, layout: dict[str, Any], variant: str
) -> None:
    """One process has a row for each answer; the others several in a row, and fewer microbatches."""

    def run(layout: dict[str, Any]) -> Run:
        objective = dict(pack=bool(layout), iterations=2, variant=variant, filter=False)
        return grpo_run(task, layout=layout, train=dict(steps=3, microbatch=1, seq_len=32), objective=objective)

    assert_learns_as_one_process(ranks, run, layout, tmp_path)


def test_packed_rows_hold_each_answer_once(task: Path) -> None:
    run = grpo_run(task, train=dict(microbatch=2), objective=dict(pack=True))
    sizes = np.array([5, 16, 3, 7, 1, 9, 4])
    packing = Packing(sizes, run)
    assert packing.rows == 4
    values = np.where(np.arange(16) < sizes[:, None], np.arange(7)[:, None] * 100 + np.arange(16) + 1, 0)
    laid = packing.lay(values, -1)
    assert sorted(laid[laid > 0]) == sorted(values[values > 0])
    assert (packing.unlay(laid) == values).all()
    for row in range(packing.rows):
        for document in np.unique(packing.documents[row]):
            own = packing.documents[row] == document
            assert packing.positions[row][own].tolist() == list(range(own.sum()))
            assert len({(value - 1) // 100 for value in laid[row][own]}) == 1


WIDE = MODEL | dict(hidden=128, ffn=256)
"""Whose rows are whole blocks of 4-bit weights, also on two tensor ranks."""


@pytest.mark.parametrize(
    ("layout", "adapter", "model"),
    [
        (dict(replicate=2), dict(kind="lora", rank=2), MODEL),
        (dict(shard=2, tensor=2), dict(kind="dora", rank=2, targets=["q", "out", "up"]), EXPERTS),
        (
            dict(shard=2, expert=2),
            dict(kind="qlora", rank=2, targets=["q", "down"]),
            WIDE | TO_EXPERTS | dict(expert_ffn=64),
        ),
    ],
    ids=["lora", "dora", "qlora"],
)
@pytest.mark.drawn(group="grpo on ranks")
def test_adapters_are_merged_for_the_engine(
    ranks: RankPool, task: Path, tmp_path: Path, layout: dict[str, Any], adapter: dict[str, Any], model: dict[str, Any]
) -> None:
    """Answers are those of the adapted network: the engine's log-probabilities are the trainer's. The reference is the network
    without adapters."""
    train(grpo_run(task, train=dict(steps=1), model=model), tmp_path / "first", open_source=source_of)

    def run(layout: dict[str, Any]) -> Run:
        train_keys = dict(steps=3, weights=str(tmp_path / "first"), lr=0.1)
        return grpo_run(
            task, layout=layout, train=train_keys, objective=dict(kl_beta=0.1), adapter=adapter, model=model
        )

    assert_learns_as_one_process(ranks, run, layout, tmp_path)
    found = steps(tmp_path / "alone")
    assert all(step["mismatch"] < 1e-11 for step in found)
    assert found[0]["kl"] == pytest.approx(0, abs=1e-12)
    assert found[-1]["kl"] > 1e-6


def stored_bytes(rank: int, run: Run) -> int:
    return sum(each.nbytes for each in RolloutWeights(TrainState(run)).copied.values())


@pytest.mark.parametrize("layout", [dict(replicate=2), dict(shard=2)], ids=lambda layout: "-".join(layout))
@pytest.mark.parametrize("kind", ["lora", "dora", "qlora"])
@pytest.mark.drawn(group="grpo on ranks")
def test_the_engine_holds_of_adapted_matrices_what_the_plan_says(
    ranks: RankPool, task: Path, kind: str, layout: dict[str, Any]
) -> None:
    run = grpo_run(task, model=WIDE, adapter=dict(kind=kind, rank=2, targets=["q", "down"]), layout=layout)
    assert ranks.run(2, stored_bytes, run) == [own_weight_bytes(run, gpu=False)] * 2


@pytest.mark.large("pairs of axes, experts and drawn layouts; the small tier has one axis at a time")
@pytest.mark.parametrize("number", range(12))
def test_drawn_layouts_learn_the_same(ranks: RankPool, task: Path, tmp_path: Path, number: int) -> None:
    draw = random.Random(number)
    while True:
        layout = {axis: draw.choice([1, 1, 2]) for axis in ("replicate", "shard", "context", "tensor", "pipeline")}
        world = 1
        for size in layout.values():
            world *= size
        if 2 <= world <= 8:
            break
    experts = draw.random() < 0.5
    if experts and layout["shard"] * layout["context"] > 1:
        layout["expert"] = 2
    layout |= dict(zero=draw.choice([1, 2, 3])) if layout["shard"] * layout["context"] > 1 else {}
    objective = dict(variant=draw.choice(["grpo", "dr_grpo", "dapo"]), minibatches=draw.choice([1, 2]))
    size = dict(model=EXPERTS if experts else MODEL)
    assert_learns_as_one_process(
        ranks,
        lambda lay: grpo_run(task, layout=lay, train=dict(steps=3, microbatch=1), objective=objective, **size),
        layout,
        tmp_path,
    )
