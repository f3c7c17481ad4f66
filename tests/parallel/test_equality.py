"""Every layout computes what one process computes: losses, gradient norms, evaluation and final parameters, in float64, where a
bug cannot hide behind rounding. Each axis alone, every pair, every variant of each axis, and many random combinations."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import cases
import numpy as np
import pytest
from parallel_pool import RankPool

TOLERANCE = 1e-9
Layout = dict[str, Any]


@functools.cache
def one_process(model: str, documents: bool, seed: int = 0, **train: Any) -> dict[str, Any]:
    return cases.train(0, cases.make_run(model, {}, **train), documents, seed)


def assert_equal(
    ranks: RankPool, model: str, layout: Layout, documents: bool = True, **train: Any
) -> list[dict[str, Any]]:
    # Only a pipeline needs four layers to be cut; two, one of each kind, show the rest in half the messages.
    train = dict(layers=4 if layout.get("pipeline", 1) > 1 else 2) | train
    run = cases.make_run(model, layout, **train)
    # One process may cut the batch as it likes; the result is the same.
    alone = train | dict(microbatch=1)
    want = one_process(model, documents, **alone)
    results = ranks.run(run.layout.world, cases.train, run, documents)
    seen = set()
    for rank, got in enumerate(results):
        context = f"{model} {layout} {train} rank {rank}"
        np.testing.assert_allclose(got["losses"], want["losses"], rtol=TOLERANCE, err_msg=context)
        np.testing.assert_allclose(got["norms"], want["norms"], rtol=TOLERANCE, err_msg=context)
        np.testing.assert_allclose(got["evaluated"], want["evaluated"], rtol=TOLERANCE, err_msg=context)
        for name, (where, value) in got["parameters"].items():
            seen.add(name)
            whole = want["parameters"][name][1]
            # Relative to the parameter's size. A key bias has no gradient but rounding, hence a floor to that size.
            worst = np.abs(value - whole[where]).max(initial=0) / max(np.abs(whole).max(), 0.1)
            assert worst < TOLERANCE, f"{context} {name} {worst}"
    assert seen == set(want["parameters"])
    return results


AXES: dict[str, Layout] = {
    "replicate": dict(replicate=2),
    "shard": dict(shard=2),
    "context": dict(context=2),
    "tensor": dict(tensor=2),
    "pipeline": dict(pipeline=2),
    "expert": dict(shard=2, expert=2),
}


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("model", ["dense", "mixture"])
def test_each_axis_alone(ranks: RankPool, model: str, axis: str) -> None:
    if axis == "expert" and model == "dense":
        pytest.skip("a dense model has no experts")
    assert_equal(ranks, model, AXES[axis])


@pytest.mark.parametrize("pair", list(itertools.combinations(AXES, 2)), ids="+".join)
@pytest.mark.parametrize("model", ["dense", "mixture"])
def test_every_pair_of_axes(ranks: RankPool, model: str, pair: tuple[str, str]) -> None:
    layout = AXES[pair[0]] | AXES[pair[1]]
    if "expert" in pair and model == "dense":
        pytest.skip("a dense model has no experts")
    assert_equal(ranks, model, layout)


VARIANTS: list[tuple[str, Layout]] = [
    ("dense", dict(replicate=4)),
    ("dense", dict(shard=4)),
    ("dense", dict(shard=2, zero=1)),
    ("dense", dict(shard=2, zero=2)),
    ("mixture", dict(shard=2, replicate=2, zero=1)),
    ("mixture", dict(shard=2, context=2, expert=2, zero=2)),
    ("dense", dict(shard=2, prefetch=2)),
    ("dense", dict(tensor=4)),
    ("tied", dict(tensor=4)),
    ("dense", dict(tensor=4, async_tensor=True)),
    ("tied", dict(tensor=2, async_tensor=True, recompute="full")),
    ("mixture", dict(tensor=2, shard=2, expert=2, async_tensor=True)),
    ("latent", dict(tensor=2, async_tensor=True, pipeline=2, schedule="zb-h1")),
    ("latent", dict(tensor=2)),
    ("parallel", dict(tensor=2, shard=2, recompute="full")),
    ("parallel", dict(tensor=2, async_tensor=True, pipeline=2, schedule="zb-h1")),
    ("latent", dict(context=2)),
    ("softmax", dict(tensor=2, context=2)),
    ("softmax", dict(tensor=2, shard=2, expert=2, expert_tensor=True)),
    ("mixture", dict(tensor=2, expert_tensor=True)),
    ("capacity", dict(tensor=2, context=2)),
    ("capacity", dict(shard=2, expert=2)),
    ("window", dict(context=2)),
    ("window", dict(context=2, context_method="gather")),
    *[("dense", dict(context=4, context_method=method)) for method in ("ring", "ulysses", "gather")],
    *[("latent", dict(context=2, context_method=method)) for method in ("ulysses", "gather")],
    *[("mixture", dict(shard=4, expert=4, zero=zero)) for zero in (1, 2, 3)],
    *[("dense", dict(recompute=mode)) for mode in ("attention", "full")],
    ("mixture", dict(recompute="full", recompute_every=2, shard=2, expert=2)),
    ("mixture", dict(recompute="operations", recompute_operations=("norm", "attention", "ffn"), tensor=2)),
    ("dense", dict(recompute="budget", recompute_budget=1e-4, shard=2)),
    ("tied", dict(pipeline=4)),
    ("dense", dict(pipeline=2, stages=(1, 3))),
]


@pytest.mark.parametrize(("model", "layout"), VARIANTS, ids=str)
def test_each_variant_of_an_axis(ranks: RankPool, model: str, layout: Layout) -> None:
    assert_equal(ranks, model, layout)


@pytest.mark.parametrize(("model", "layout", "train"), cases.FEWER_EXPERTS_THAN_RANKS, ids=str)
def test_fewer_experts_than_ranks_that_share_them(ranks: RankPool, model: str, layout: Layout, train: Layout) -> None:
    assert_equal(ranks, model, layout, **train)


@pytest.mark.parametrize("schedule", cases.SCHEDULES)
@pytest.mark.parametrize(("model", "more"), [("tied", {}), ("mixture", dict(shard=2, expert=2, recompute="full"))])
def test_each_schedule_runs_as_listed(ranks: RankPool, model: str, more: Layout, schedule: str) -> None:
    from schedule_check import check

    from shardwise.schedules import make_schedule

    layout = dict(pipeline=2, schedule=schedule, **more)
    run = cases.make_run(model, layout, microbatch=1)
    listed = make_schedule(schedule, 2, run.accumulation, run.layout.stages_per_rank)
    assert check(listed).ok
    results = assert_equal(ranks, model, layout, microbatch=1)
    world = run.layout.world
    for rank, got in enumerate(results):
        # The evaluation at the end of the case runs the forward passes of the same list.
        own = listed.ranks[rank * 2 // world]
        assert got["executed"] == [action for action in own if action.kind == "F"]
        assert got["trained"] == list(own)


@pytest.mark.parametrize("schedule", cases.SCHEDULES)
@pytest.mark.parametrize("batch", [1, 3, 5])
def test_microbatches_that_do_not_divide(ranks: RankPool, schedule: str, batch: int) -> None:
    assert_equal(ranks, "dense", dict(pipeline=2, schedule=schedule), global_batch=batch, microbatch=1, steps=2)


@pytest.mark.parametrize("layout", [dict(shard=2), dict(tensor=2, shard=2), dict(pipeline=2, tensor=2)], ids=str)
def test_muon_orthogonalises_whole_matrices(ranks: RankPool, layout: Layout) -> None:
    assert_equal(ranks, "mixture", layout, optimizer="muon")


@pytest.mark.parametrize(
    ("model", "layout", "train"),
    [
        ("few", dict(shard=4, expert=2), {}),
        ("few", dict(shard=4, tensor=2, expert=2, expert_tensor=True), {}),
        ("mixture", dict(shard=3), dict(global_batch=6)),
    ],
    ids=str,
)
def test_muon_orthogonalises_experts_that_ranks_hold_parts_of(
    ranks: RankPool, model: str, layout: Layout, train: Layout
) -> None:
    assert_equal(ranks, model, layout, optimizer="muon", **train)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "number" in metafunc.fixturenames:
        metafunc.parametrize("number", range(metafunc.config.getoption("--layouts")))


def test_random_combinations(ranks: RankPool, number: int) -> None:
    generator = random.Random(2026 + number)
    model, layout, train = cases.random_layout(generator)
    assert_equal(ranks, model, layout, **train)


@pytest.mark.parametrize(
    "layout", [dict(shard=2), dict(shard=2, replicate=2), dict(tensor=2), dict(replicate=2)], ids=str
)
def test_float32_follows_float64(ranks: RankPool, layout: Layout) -> None:
    want = one_process("mixture", True, microbatch=1)["losses"]
    run = cases.make_run("mixture", layout, dtype="float32")
    for got in ranks.run(run.layout.world, cases.train, run, True):
        np.testing.assert_allclose(got["losses"], want, rtol=1e-5)


@pytest.mark.parametrize(
    "layout",
    [
        dict(shard=2), dict(tensor=2), dict(context=2), dict(pipeline=2), dict(replicate=2),
        dict(pipeline=2, shard=2, schedule="zb-h1"),
    ],
    ids=str,
)  # fmt: skip
def test_bfloat16_stays_within_the_spread_of_data_orders(ranks: RankPool, layout: Layout) -> None:
    settings = dict(dtype="bfloat16", steps=8, lr=1e-3)
    one, other = (one_process("dense", True, seed, **settings)["losses"] for seed in (0, 1))
    dispatch = np.abs(np.subtract(one, other)).max()
    run = cases.make_run("dense", layout, **settings)
    for got in ranks.run(run.layout.world, cases.train, run, True):
        assert np.abs(np.subtract(got["losses"], one)).max() < dispatch


@pytest.mark.parametrize("layout", [dict(replicate=4), dict(shard=4, zero=2), dict(replicate=2, shard=2)], ids=str)
def test_gradients_are_added_in_the_dtype_that_is_asked_for(ranks: RankPool, layout: Layout) -> None:
    """Norms show it: beside float64's, bfloat16 sums are off by its rounding, float32's by a thousandth of that."""

    def norms(dtype: str) -> np.ndarray:
        run = cases.make_run("dense", layout, dtype="bfloat16", reduce_dtype=dtype, steps=1, clip=0)
        return np.array(ranks.run(4, cases.train, run)[0]["norms"])

    exact = norms("float64")
    assert 1e-6 < np.abs(norms("bfloat16") / exact - 1).max() < 2**-8
    assert np.abs(norms("float32") / exact - 1).max() < 1e-6
