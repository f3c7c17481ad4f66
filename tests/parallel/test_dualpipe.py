"""Pipelines whose microbatches enter at both ends: steps of other lengths than planned, and checkpoints of what two ranks hold."""

from __future__ import annotations

from typing import Any

import cases
import numpy as np
import pytest
from observed import EXACT
from parallel_pool import RankPool

from shardwise.checkpoint.state import local_shards
from shardwise.run import Run
from shardwise.train.step import TrainState


def short_steps(rank: int, run: Run, rows: int) -> tuple[list[float], dict[str, Any]]:
    """Two steps of fewer rows than the run has, as packed answers may have them."""
    state, losses = TrainState(run), []
    for step in range(2):
        losses.append(state.train_step(cases.take(cases.batch(step, False), np.arange(rows))).loss.item())
    return losses, cases.held_parameters(state)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_step_may_be_so_short_that_nothing_goes_the_other_way(ranks: RankPool, rows: int) -> None:
    train = dict(microbatch=1, layers=2)
    want = short_steps(0, cases.make_run("dense", {}, **train), rows)
    for losses, parameters in ranks.run(
        2, short_steps, cases.make_run("dense", dict(pipeline=2, schedule="dualpipe"), **train), rows
    ):
        np.testing.assert_allclose(losses, want[0], rtol=EXACT)
        for name, (where, values) in parameters.items():
            np.testing.assert_allclose(values, want[1][name][1][where], rtol=0, atol=EXACT, err_msg=name)


def written(rank: int, run: Run) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    state = TrainState(run)
    state.train_step(cases.batch(0, False))
    return [(shard.name, tuple(shard.offset), tuple(shard.values.shape)) for shard in local_shards(state)]


def test_a_checkpoint_has_each_stage_once(ranks: RankPool) -> None:
    """Both ranks hold every parameter; each writes those of the stage that microbatches reach from the first end."""
    own = dict(microbatch=1, layers=2, optimizer="adamw")
    both = ranks.run(2, written, cases.make_run("mixture", dict(pipeline=2, schedule="dualpipe"), **own))
    (alone,) = ranks.run(1, written, cases.make_run("mixture", {}, **own))
    shards = [[shard for shard in each if not shard[0].startswith("random/")] for each in both]
    assert sorted(shards[0] + shards[1]) == sorted(shard for shard in alone if not shard[0].startswith("random/"))
    assert all(shards)
