"""Rounding in other dtypes stays within bounds on several ranks, and gradients are added in the dtype that is asked for. That
layouts compute the same in float64 is in test_layouts.py."""

from __future__ import annotations

from typing import Any

import cases
import numpy as np
import pytest
from observed import one_process
from parallel_pool import RankPool

from shardwise.measure.verify import random_batch
from shardwise.run import Run
from shardwise.train.step import TrainState

Layout = dict[str, Any]
LARGE = pytest.mark.large("the other axes; that an axis computes the same is known from float64")


@pytest.mark.parametrize(
    "layout",
    [
        dict(shard=2, replicate=2),
        *(pytest.param(each, marks=LARGE) for each in (dict(shard=2), dict(tensor=2), dict(replicate=2))),
    ],
    ids=str,
)
@pytest.mark.drawn(group="rounding")
def test_float32_follows_float64(ranks: RankPool, layout: Layout) -> None:
    want = one_process("mixture", True, microbatch=1, layers=2)["losses"]
    run = cases.make_run("mixture", layout, layers=2, dtype="float32")
    for got in ranks.run(run.layout.world, cases.train, run, True):
        np.testing.assert_allclose(got["losses"], want, rtol=1e-5)


@pytest.mark.parametrize(
    "layout",
    [
        dict(pipeline=2, shard=2, schedule="zb-h1"),
        *(pytest.param({axis: 2}, marks=LARGE) for axis in ("shard", "tensor", "context", "pipeline", "replicate")),
    ],
    ids=str,
)
@pytest.mark.drawn(group="rounding")
def test_bfloat16_stays_within_the_spread_of_data_orders(ranks: RankPool, layout: Layout) -> None:
    settings = dict(dtype="bfloat16", layers=2, steps=3, lr=1e-3)
    one, other = (one_process("dense", True, seed, **settings)["losses"] for seed in (0, 1))
    dispatch = np.abs(np.subtract(one, other)).max()
    run = cases.make_run("dense", layout, **settings)
    for got in ranks.run(run.layout.world, cases.train, run, True):
        assert np.abs(np.subtract(got["losses"], one)).max() < dispatch


@pytest.mark.parametrize(
    "layout",
    [
        dict(replicate=2, shard=2),
        *(pytest.param(each, marks=LARGE) for each in (dict(replicate=4), dict(shard=4, zero=2))),
    ],
    ids=str,
)
@pytest.mark.drawn(group="rounding")
def test_gradients_are_added_in_the_dtype_that_is_asked_for(ranks: RankPool, layout: Layout) -> None:
    """Norms show it: beside float64's, bfloat16 sums are off by its rounding, float32's by a thousandth of that."""

    def norms(dtype: str) -> np.ndarray:
        run = cases.make_run("dense", layout, layers=2, dtype="bfloat16", reduce_dtype=dtype, steps=1, clip=0)
        return np.array(ranks.run(4, cases.train, run)[0]["norms"])

    exact = norms("float64")
    assert 1e-6 < np.abs(norms("bfloat16") / exact - 1).max() < 2**-8
    assert np.abs(norms("float32") / exact - 1).max() < 1e-6


def gradients_in_buckets(rank: int, run: Run) -> tuple[bool, bool]:
    """Whether the gradients that a step without a reduction adds to are those of the step before, and are zero before it."""
    state = TrainState(run)
    for number in range(2):  # the buckets are made anew behind the first step
        state.train_step(random_batch(run, number)).read()
    before = [each.leaf.grad for each in state.parallel.parameters]
    state.optimizer.zero_grad()
    after = [each.leaf.grad for each in state.parallel.parameters]
    return all(a is b for a, b in zip(before, after, strict=True)), not any(g.any() for g in after if g is not None)


def test_replicas_with_several_microbatches_hold_their_gradients_once(ranks: RankPool) -> None:
    run = cases.make_run("dense", dict(replicate=2), global_batch=8, microbatch=2)
    assert run.accumulation == 2
    assert ranks.run(2, gradients_in_buckets, run) == [(True, True)] * 2
