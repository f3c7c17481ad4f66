"""What compressed gradients have not sent yet survives a checkpoint: bit for bit on the same layout, its sum on another."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import cases
import checkpoint_cases
import numpy as np
import pytest
from parallel_pool import RankPool

from shardwise.checkpoint import replicas
from shardwise.checkpoint.resume import resume
from shardwise.parallel.local_parameter import local_box
from shardwise.run import Run
from shardwise.train.step import TrainState

BEFORE, LAST = 2, 4


def through(rank: int, run: Run) -> dict[str, Any]:
    """The same steps without a stop."""
    train_state = checkpoint_cases.trained(run, BEFORE)
    losses, norms = cases.steps(train_state, BEFORE, LAST, True)
    return dict(losses=losses, norms=norms)


def unsent(rank: int, run: Run, out: Path | None) -> dict[str, Any]:
    """What a rank keeps, where it lies in the whole: of some steps, or of a checkpoint."""
    train_state = checkpoint_cases.trained(run, BEFORE) if out is None else TrainState(run)
    if out is not None:
        resume(train_state, out, checkpoint_cases.DATA, print)
    assert train_state.exchange is not None
    kept = {}
    for n, held in enumerate(train_state.parallel.parameters):
        state = train_state.exchange.state_of(n)
        if "error" in state:
            where = cases.slices(local_box(held, train_state.mesh))
            kept[held.name] = (held.whole, where, state["error"].numpy().copy())
    return kept


@pytest.mark.parametrize(
    "layout",
    [
        dict(replicate=2, compress="powersgd", compress_rank=2),
        dict(replicate=2, compress="onebit", compress_warmup=1),
        dict(replicate=2, shard=2, compress="topk", compress_momentum=0.5),
    ],
    ids=str,
)
@pytest.mark.drawn(group="resharding")
def test_a_run_goes_on_bit_for_bit(ranks: RankPool, tmp_path: Path, layout: dict[str, Any]) -> None:
    run = cases.make_run("dense", layout, steps=LAST, layers=2)
    ranks.run(run.layout.world, checkpoint_cases.train_and_save, run, tmp_path, BEFORE)
    unbroken = ranks.run(run.layout.world, through, run)
    for got, want in zip(
        ranks.run(run.layout.world, checkpoint_cases.resume_and_train, run, tmp_path, LAST), unbroken, strict=True
    ):
        assert got["losses"] == want["losses"]
        assert got["norms"] == want["norms"]


def save_as_before(rank: int, run: Run, out: Path, steps: int) -> None:
    """As versions did whose gradients had been divided by the count of a full batch; here the residuals have not been."""
    with mock.patch.object(replicas, "RESIDUAL", replicas.DIVIDED):
        checkpoint_cases.train_and_save(rank, run, out, steps)


def test_residuals_of_older_checkpoints_are_brought_to_the_scale_of_today(ranks: RankPool, tmp_path: Path) -> None:
    run = cases.make_run(
        "dense", dict(replicate=2, compress="topk", compress_density=0.02), steps=LAST, layers=1, global_batch=4
    )
    ranks.run(2, save_as_before, run, tmp_path, BEFORE)
    kept, resumed = ranks.run(2, unsent, run, None), ranks.run(2, unsent, run, tmp_path)
    for before, after in zip(kept, resumed, strict=True):
        for name, (_, _, values) in before.items():
            np.testing.assert_allclose(after[name][2], values * run.batch_tokens, rtol=1e-12, err_msg=name)


@pytest.mark.parametrize("after", [dict(replicate=2, shard=2), dict(replicate=4)], ids=str)
@pytest.mark.drawn(group="resharding")
def test_on_another_layout_nothing_is_lost(ranks: RankPool, tmp_path: Path, after: dict[str, Any]) -> None:
    compress = dict(compress="topk", compress_density=0.02)
    before = cases.make_run("dense", dict(replicate=2) | compress, steps=LAST, layers=2)
    ranks.run(2, checkpoint_cases.train_and_save, before, tmp_path, BEFORE)
    want: dict[str, np.ndarray] = {}
    for record in ranks.run(2, unsent, before, None):
        for name, (whole, where, values) in record.items():
            want.setdefault(name, np.zeros(whole))[where] += values
    end = cases.make_run("dense", after | compress, steps=LAST, layers=2)
    got = {name: np.zeros_like(values) for name, values in want.items()}
    for record in ranks.run(end.layout.world, unsent, end, tmp_path):
        for name, (_, where, values) in record.items():
            got[name][where] += values
    assert any(np.abs(values).max() > 0 for values in want.values())
    for name, values in want.items():
        np.testing.assert_allclose(got[name], values, rtol=1e-12, atol=1e-15, err_msg=name)


@pytest.mark.parametrize("now", [1, 3])
@pytest.mark.drawn(group="resharding")
def test_factors_of_another_rank_start_anew(ranks: RankPool, tmp_path: Path, now: int) -> None:
    before, after = (
        cases.make_run("dense", dict(replicate=2, compress="powersgd", compress_rank=each), steps=LAST, layers=2)
        for each in (2, now)
    )
    ranks.run(2, checkpoint_cases.train_and_save, before, tmp_path, BEFORE)
    want, got = (ranks.run(2, unsent, run, out) for run, out in ((before, None), (after, tmp_path)))
    for one, other in zip(want, got, strict=True):
        assert all(np.array_equal(one[name][2], other[name][2]) for name in one)
    for record in ranks.run(2, checkpoint_cases.resume_and_train, after, tmp_path, LAST):
        assert np.isfinite(record["losses"]).all()
