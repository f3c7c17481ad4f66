"""Asynchronous pipelines learn what one process with delayed weights learns, to 1e-9 in float64; a checkpoint changes no bit;
operations, messages and memory are those of the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import checkpoint_cases
import delayed_reference
import numpy as np
import pytest
from observed import EXACT, EXACTLY
from parallel_pool import RankPool

from shardwise.measure.verify import Verdict, counted, planned, random_batch
from shardwise.run import Run, UserError
from shardwise.schedules import versions_kept
from shardwise.train.step import TrainState

STEPS = 5
LARGE = pytest.mark.large(
    "more ranks and microbatches, tensor ranks and recomputation; the small tier has each schedule"
)
DRAWN = pytest.mark.drawn(group="outer")
RUNS: list[Any] = [
    ("dense", dict(pipeline=2, schedule="pipedream"), dict(global_batch=1, microbatch=1)),
    ("dense", dict(pipeline=2, schedule="pipedream-2bw"), dict(global_batch=4, microbatch=2)),
    *(pytest.param("dense", dict(pipeline=2) | layout, dict(global_batch=4, microbatch=1), marks=DRAWN) for layout in [
        dict(replicate=2, schedule="pipedream"), dict(shard=2, schedule="pipedream-2bw"),
    ]),
    *(pytest.param(model, layout, train, marks=LARGE) for model, layout, train in [
        ("dense", dict(pipeline=4, schedule="pipedream"), dict(global_batch=1, microbatch=1)),
        ("dense", dict(pipeline=4, schedule="pipedream"), dict(global_batch=2, microbatch=1)),
        ("dense", dict(pipeline=4, schedule="pipedream", recompute="full"), dict(global_batch=5, microbatch=1)),
        ("dense", dict(pipeline=4, schedule="pipedream-2bw"), dict(global_batch=4, microbatch=1)),
        ("latent", dict(pipeline=2, tensor=2, schedule="pipedream-2bw"), dict(global_batch=6, microbatch=1)),
        ("parallel", dict(pipeline=2, tensor=2, schedule="pipedream"), dict(global_batch=3, microbatch=1)),
        ("dense", dict(pipeline=3, schedule="pipedream-2bw", recompute="attention"), dict(global_batch=9, microbatch=1)),
        ("dense", dict(pipeline=2, shard=3, zero=1, schedule="pipedream"), dict(global_batch=9, microbatch=1)),
        ("dense", dict(pipeline=3, shard=2, zero=2, schedule="pipedream"), dict(global_batch=4, microbatch=1, layers=7)),
        ("dense", dict(pipeline=3, shard=2, prefetch=2, schedule="pipedream"), dict(global_batch=8, microbatch=1, layers=9)),
        ("dense", dict(pipeline=2, replicate=2, shard=2, schedule="pipedream-2bw"), dict(global_batch=8, microbatch=1)),
        ("latent", dict(pipeline=2, context=2, schedule="pipedream"), dict(global_batch=3, microbatch=1)),
        ("dense", dict(pipeline=2, replicate=2, tensor=2, schedule="pipedream-2bw"), dict(global_batch=4, microbatch=1)),
    ]),
]  # fmt: skip


def make(model: str, layout: dict[str, Any], train: dict[str, Any]) -> Run:
    return cases.make_run(model, layout, steps=STEPS, clip=0.0, **train)


def learn(rank: int, run: Run, out: Path) -> dict[str, Any]:
    """All steps, then a count of one more; and once more with a checkpoint and an evaluation between."""
    train_state = TrainState(run)
    losses, norms = cases.steps(train_state, 0, STEPS, True)
    flying = len(train_state.parallel.pipeline.flying)  # type: ignore[attr-defined]
    train_state.drain()
    parameters = cases.held_parameters(train_state)
    broken = TrainState(run)
    cases.steps(broken, 0, 2, True)
    broken.evaluate(lambda rows: cases.take(cases.batch(99, True), rows), np.arange(4))
    cases.steps(broken, 2, 3, True)
    saver = checkpoint_cases.saver_of(broken, out)
    saver.save(broken, more=dict(note=[1, 2]))
    assert saver.finish() == ""
    resumed = checkpoint_cases.resume_and_train(rank, run, out, STEPS)["losses"]
    account, same, actions = counted(train_state, random_batch(run, train_state.mesh.data_index))
    verdict = Verdict(rank, planned(run, rank), account, same, actions)
    return dict(losses=losses, norms=norms, parameters=parameters, resumed=resumed, flying=flying, verdict=verdict)


def resumed_parameters(rank: int, run: Run, out: Path) -> dict[str, Any]:
    from shardwise.checkpoint.resume import resume

    train_state = TrainState(run)
    assert resume(train_state, out, checkpoint_cases.DATA, print) is not None
    cases.steps(train_state, 3, STEPS, True)
    train_state.drain()
    return cases.held_parameters(train_state)


@pytest.mark.parametrize(("model", "layout", "train"), RUNS, ids=str)
def test_it_learns_as_one_process_with_delayed_weights(
    ranks: RankPool, tmp_path: Path, model: str, layout: dict[str, Any], train: dict[str, Any]
) -> None:
    run = make(model, layout, train)
    want, weights = delayed_reference.trained(run, make(model, {}, train), STEPS)
    plain, _ = delayed_reference.trained(
        make(model, layout | dict(schedule="1f1b"), train), make(model, {}, train), STEPS
    )
    assert abs(want[-1] - plain[-1]) > 1e-6, "delayed weights must make a difference, or this shows nothing"
    records = ranks.run(run.layout.world, learn, run, tmp_path)
    again = ranks.run(run.layout.world, resumed_parameters, run, tmp_path)
    stride = run.layout.world // run.layout.pipeline
    for rank, record in enumerate(records):
        np.testing.assert_allclose(record["losses"], want, rtol=EXACT)
        behind = run.layout.pipeline - 1 - rank // stride
        assert record["flying"] == behind  # steps overlap: nothing is flushed between them
        assert record["resumed"] == record["losses"][3:]
        for name, (where, value) in record["parameters"].items():
            worst = np.abs(value - weights[name][where]).max(initial=0) / max(np.abs(weights[name]).max(), 0.1)
            assert worst < EXACT, (rank, name, worst)
            assert np.array_equal(again[rank][name][1], value), (rank, name)
        assert record["verdict"].schedule
        assert not record["verdict"].beyond(EXACTLY), (rank, record["verdict"].beyond(EXACTLY)[:5])


def test_versions_are_those_of_the_papers() -> None:
    # PipeDream, section 3.3: with a minibatch of one microbatch the first of four stages keeps four versions, the last one.
    assert [1 + versions_kept("pipedream", behind, 1) for behind in (3, 2, 1, 0)] == [4, 3, 2, 1]
    assert [1 + versions_kept("pipedream", 3, m) for m in (2, 3, 8)] == [3, 2, 2]
    assert [1 + versions_kept("pipedream-2bw", behind, 4) for behind in (3, 0)] == [2, 2]


@pytest.mark.parametrize(
    ("layout", "train", "words"),
    [
        (dict(schedule="pipedream"), dict(clip=1.0), "set it to 0"),
        (dict(schedule="pipedream", replicate=2, compress="int8"), {}, "needs all stages at the same step"),
        (dict(schedule="pipedream", shard=4, secondary_shard=2), {}, "passes that need other versions"),
        (dict(schedule="pipedream-2bw"), dict(global_batch=1, microbatch=1), "as layout.pipeline = 2, and there are 1"),
        (dict(schedule="pipedream", auto=True), {}, "trains with stale weights"),
    ],
    ids=str,
)
def test_what_does_not_go_with_it_is_refused_in_a_sentence(
    layout: dict[str, Any], train: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        cases.make_run("dense", dict(pipeline=2) | layout, **dict(clip=0.0) | train)
