"""Replicas that rarely speak: against a loop over replicas in one process, to 1e-9, and against the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import checkpoint_cases
import numpy as np
import outer_reference
import pytest
from parallel_pool import RankPool

from shardwise.measure.verify import TOLERANCE, verify_dry, verify_rank
from shardwise.run import Run
from shardwise.run.ranks.coordinates import RankCoordinates

STEPS = 5
LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("dense", dict(replicate=2, sync_every=2)),
    ("dense", dict(replicate=2, sync_every=3, outer_optimizer="average")),
    ("tied", dict(replicate=2, pipeline=2, sync_every=3, sync_fragments=3, sync_overlap=1)),
    ("dense", dict(replicate=2, shard=2, sync_every=2, sync_fragments=2, outer_lr=0.5, outer_momentum=0.8)),
    ("dense", dict(replicate=3, sync_every=4, sync_fragments=2, sync_overlap=2, sync_mix=0.3, compress="int8")),
    ("dense", dict(replicate=2, sync_every=2, compress_warmup=2)),
]


def make(model: str, layout: dict[str, Any], **more: Any) -> Run:
    return cases.make_run(model, layout, steps=STEPS, global_batch=6 if layout["replicate"] == 3 else 8, **more)


def train(rank: int, run: Run) -> dict[str, Any]:
    """All steps; losses and this rank's parts of the parameters."""
    train_state = checkpoint_cases.TrainState(run)
    losses, _ = cases.steps(train_state, 0, STEPS, True)
    return dict(losses=losses, parameters=cases.held_parameters(train_state))


@pytest.mark.parametrize(("model", "layout"), LAYOUTS, ids=str)
@pytest.mark.drawn(group="outer")
def test_replicas_train_as_a_loop_over_them(ranks: RankPool, model: str, layout: dict[str, Any]) -> None:
    run = make(model, layout)
    losses, weights = outer_reference.simulated(run)
    for rank, got in enumerate(ranks.run(run.layout.world, train, run)):
        replica = RankCoordinates(run.layout, rank).index("replicate")
        np.testing.assert_allclose(got["losses"], [each[replica] for each in losses], rtol=1e-9)
        for name, (where, value) in got["parameters"].items():
            whole = weights[replica][name]
            worst = np.abs(value - whole[where]).max(initial=0) / max(np.abs(whole).max(), 0.1)
            assert worst < 1e-9, f"{name} {worst}"


@pytest.mark.parametrize(("model", "layout"), [LAYOUTS[n] for n in (0, 2, 4)], ids=str)
@pytest.mark.drawn(group="outer")
def test_they_send_and_keep_what_the_plan_says(ranks: RankPool, model: str, layout: dict[str, Any]) -> None:
    """In the mean of a round."""
    run = make(model, layout)
    for verdict in ranks.run(run.layout.world, measured, run):
        assert not verdict.beyond(TOLERANCE), verdict.beyond(TOLERANCE)
        assert verdict.measured.traffic.bytes["replicate"]


def measured(rank: int, run: Run) -> Any:
    return verify_rank(run, steps=1)


@pytest.mark.large("a dry rank's mean round; real ranks are held to the plan above")
def test_a_dry_rank_agrees() -> None:
    run = make("dense", dict(replicate=2, shard=2, sync_every=3, sync_fragments=2, compress="int4"))
    assert verify_dry(run, 1).agrees(TOLERANCE)


def resumed(rank: int, run: Run, out: Path) -> dict[str, Any]:
    return checkpoint_cases.resume_and_train(rank, run, out, STEPS)


@pytest.mark.parametrize("stop", [2, 3])
@pytest.mark.drawn(group="outer")
def test_each_replica_goes_on_with_its_own(ranks: RankPool, tmp_path: Path, stop: int) -> None:
    """Between two exchanges, and while one is underway."""
    run = make("dense", dict(replicate=2, sync_every=2, sync_fragments=2, sync_overlap=1, compress="int8"), layers=2)
    unbroken = ranks.run(2, train, run)
    ranks.run(2, checkpoint_cases.train_and_save, run, tmp_path, stop)
    for got, want in zip(ranks.run(2, resumed, run, tmp_path), unbroken, strict=True):
        assert got["losses"] == want["losses"][stop:]
        for name, (_, value) in want["parameters"].items():
            assert np.array_equal(got["parameters"][name][1], value), name
