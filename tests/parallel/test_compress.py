"""Compressed gradients: each method against a loop over replicas in one process, and every layout with it against its plan."""

from __future__ import annotations

import random
from typing import Any

import cases
import compress_reference
import layouts
import numpy as np
import pytest
import torch
import torch.distributed as dist
from observed import Observed
from parallel_pool import RankPool

from shardwise.measure.verify import TOLERANCE, verify_dry
from shardwise.parallel.compress.exchange import make_compressor
from shardwise.parallel.compress.sharded import QuantizedAllGather, QuantizedReduceScatter
from shardwise.run import LayoutConfig, Run, UserError

SHAPES = [(40, 24), (7,), (3, 20, 30), (1,), (300,), (5, 5)]
METHODS: dict[str, dict[str, Any]] = {
    "int8": {},
    "fp8": {},
    "int4": {},
    "onebit": {},
    "powersgd": dict(compress_rank=2),
    "topk": dict(compress_density=0.03),
    "topk momentum": dict(compress_density=0.1, compress_momentum=0.7),
}
STEPS = 4


def gradients(replica: int, step: int) -> list[np.ndarray]:
    """Like no other replica's or step's; the last tensor is zero at first."""
    generator = np.random.default_rng((replica, step))
    drawn = [generator.standard_normal(shape) * 10.0 ** generator.integers(-3, 2) for shape in SHAPES]
    drawn[-1] *= step > 0
    return drawn


def add_up_on_ranks(rank: int, layout: LayoutConfig) -> tuple[list[Any], list[Any]]:
    """What this rank gets in a few steps, and what it keeps at the end."""
    group = dist.group.WORLD
    assert group is not None
    compressor = make_compressor(layout, group, [torch.empty(s, dtype=torch.float64) for s in SHAPES], beta=0.0)
    start = [state["factor"].numpy().copy() if "factor" in state else None for state in compressor.states]
    results = []
    for step in range(STEPS):
        tensors = [torch.from_numpy(g) for g in gradients(rank, step)]
        if layout.compress == "onebit":  # without momentum it is a quantised sum with error feedback
            compressor.know([torch.zeros_like(t) for t in tensors], torch.ones(()))  # type: ignore[attr-defined]
        compressor.add_up(tensors)
        results.append([t.numpy() for t in tensors])
    kept = [{name: value.numpy() for name, value in state.items()} for state in compressor.states]
    return [start, results], kept


def unsent(state: dict[str, Any]) -> list[np.ndarray]:
    """What a rank has not sent of a tensor, where it keeps that."""
    return [value for name, value in state.items() if name in ("error", "momentum_error")]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("replicas", [2, 3, 4])
@pytest.mark.drawn(7, "method")
def test_each_method_is_that_of_one_process(ranks: RankPool, method: str, replicas: int) -> None:
    settings = METHODS[method]
    layout = LayoutConfig(replicate=replicas, compress=method.partition(" ")[0], **settings)  # type: ignore[arg-type]
    records = ranks.run(replicas, add_up_on_ranks, layout)
    factors = {n: f.copy() for n, f in enumerate(records[0][0][0]) if f is not None}
    named = {name.removeprefix("compress_"): value for name, value in settings.items()}
    reference = compress_reference.Replicas(layout.compress, replicas, SHAPES, factors=factors, **named)
    for step in range(STEPS):
        want = reference.step([gradients(r, step) for r in range(replicas)])
        for rank, ((_, results), _) in enumerate(records):
            for got, expected, first in zip(results[step], want, records[0][0][1][step], strict=True):
                np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12, err_msg=f"{method} {step} {rank}")
                assert np.array_equal(got, first)  # ranks must stay the same bits
    for rank, (_, kept) in enumerate(records):
        for n, state in enumerate(kept):
            for left in unsent(state):
                np.testing.assert_allclose(left, reference.error[rank][n], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("method", ["onebit", "powersgd", "topk"])
def test_what_is_not_sent_is_kept(ranks: RankPool, method: str) -> None:
    """Over the steps, what all ranks were given is what they got and what they keep."""
    layout = LayoutConfig(replicate=2, compress=method, **METHODS[method])  # type: ignore[arg-type]
    records = ranks.run(2, add_up_on_ranks, layout)
    for n in range(len(SHAPES)):
        given = sum(gradients(replica, step)[n] for replica in range(2) for step in range(STEPS))
        got = sum(results[n] for results in records[0][0][1])
        left = sum(each for _, kept in records for each in unsent(kept[n]))
        np.testing.assert_allclose(got + left, given, rtol=1e-12, atol=1e-12)


EVERYTHING = dict(compress="topk", compress_density=1.0)
LAYOUTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("dense", dict(replicate=2) | EVERYTHING, {}),
    ("mixture", dict(replicate=2, shard=2, expert=2, zero=2) | EVERYTHING, {}),
    ("tied", dict(replicate=2, pipeline=2) | EVERYTHING, {}),
    ("dense", dict(replicate=2, tensor=2, compress="int8"), {}),
    ("tied", dict(replicate=2, pipeline=2, compress="int4"), dict(dtype="bfloat16")),
    ("dense", dict(replicate=3, compress="fp8"), dict(global_batch=6)),
    ("mixture", dict(replicate=2, shard=2, compress="powersgd"), {}),
    ("dense", dict(replicate=2, context=2, compress="onebit", compress_warmup=1), {}),
    ("mixture", dict(shard=2, expert=2, compress_weights="int8", compress_shards="int4"), {}),
    (
        "dense",
        dict(pipeline=2, shard=2, zero=2, compress_weights="int4", compress_shards="fp8"),
        dict(dtype="bfloat16"),
    ),
    ("latent", dict(replicate=2, shard=2, zero=1, compress="topk", compress_momentum=0.5), {}),
    (
        "mixture",
        dict(shard=4, secondary_shard=2, compress_weights="int8", compress_shards="int4"),
        dict(dtype="bfloat16"),
    ),
    ("tied", dict(replicate=2, pipeline=2, schedule="dualpipe") | EVERYTHING, {}),
    ("dense", dict(replicate=2, compress="topk", compress_warmup=1), {}),
]


@pytest.mark.parametrize("drawn", LAYOUTS, ids=lambda drawn: f"{drawn[0]} {drawn[1]}")
@pytest.mark.drawn(1)
def test_layouts_send_and_keep_what_the_plan_says(
    ranks: RankPool, drawn: tuple[str, dict[str, Any], dict[str, Any]]
) -> None:
    observed = Observed(ranks, *drawn)
    observed.assert_messages_are_as_planned()
    observed.assert_computes_and_sends_as_planned()
    observed.assert_holds_what_the_plan_says()
    if observed.run.layout.compress_density == 1.0:  # everything is sent
        observed.assert_trains_as_one_process()


def gather_and_reduce(rank: int, method: str) -> tuple[np.ndarray, np.ndarray]:
    """What a rank makes of the shards of all, and its shard of the sum of their gradients."""
    group = dist.group.WORLD
    assert group is not None
    shard, whole = torch.from_numpy(uneven(rank, 700)), torch.from_numpy(uneven(10 + rank, 3 * 700))
    gathered, reduced = torch.empty(3 * 700, dtype=torch.float64), torch.empty(700, dtype=torch.float64)
    QuantizedAllGather(method, lambda: NUMELS, 3)(gathered, shard, group)
    QuantizedReduceScatter(method, lambda: NUMELS)(reduced, whole, group, dist.ReduceOp.SUM)
    return gathered.numpy(), reduced.numpy()


NUMELS = [300, 64, 1, 335]
"""The parameters of a shard of 700 values; each has its own blocks."""


def uneven(seed: int, length: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.standard_normal(length) * 10.0 ** generator.integers(-3, 2, length)


@pytest.mark.parametrize("method", ["int8", "fp8", "int4"])
def test_shards_are_gathered_and_reduced_as_in_one_process(ranks: RankPool, method: str) -> None:
    def rounded(values: np.ndarray) -> np.ndarray:
        each = np.split(values, np.cumsum(NUMELS)[:-1])
        return np.concatenate([compress_reference.rounded(method, part) for part in each])

    weights = np.concatenate([rounded(uneven(rank, 700)) for rank in range(3)])
    parts = [[rounded(part) for part in uneven(10 + rank, 3 * 700).reshape(3, 700)] for rank in range(3)]
    for rank, (gathered, reduced) in enumerate(ranks.run(3, gather_and_reduce, method)):
        np.testing.assert_allclose(gathered, weights, rtol=1e-12)
        np.testing.assert_allclose(reduced, sum(part[rank] for part in parts), rtol=1e-12, atol=1e-12)


@pytest.mark.drawn(group="outer")
def test_secondary_shards_bring_back_what_the_forward_pass_had(ranks: RankPool) -> None:
    """Bit for bit: the backward pass gathers values that were rounded before, and does not round them once more."""
    every = dict(shard=4, compress_weights="int4", recompute="full")
    runs = [cases.make_run("tied", every | more, layers=2, dtype="float32") for more in ({}, dict(secondary_shard=2))]
    plain, near = (ranks.run(4, cases.train, run) for run in runs)
    for one, other in zip(plain, near, strict=True):
        assert (one["losses"], one["norms"], one["evaluated"]) == (other["losses"], other["norms"], other["evaluated"])
        for name, (_, values) in one["parameters"].items():
            assert np.array_equal(values, other["parameters"][name][1]), name


CHOICES: list[dict[str, Any]] = [
    *(dict(compress=method) for method in ("int8", "fp8", "int4")),
    dict(compress="onebit", compress_warmup=3),
    *(dict(compress="powersgd", compress_rank=rank) for rank in (1, 4)),
    dict(compress="topk", compress_density=0.07),
    dict(compress="topk", compress_momentum=0.9),
    dict(compress="powersgd", compress_warmup=2),
    dict(sync_every=3, outer_optimizer="average"),
    dict(sync_every=4, sync_fragments=3, sync_overlap=1, compress="int4"),
    dict(compress_weights="int8", compress_shards="int4"),
    dict(compress="int4", compress_weights="fp8", compress_shards="int8"),
    dict(secondary_shard=2, compress_weights="int8"),
]


def combination(seed: int, number: int) -> Run:
    """A drawn layout of any axes, with a method in turn."""
    generator = random.Random(f"{seed} compressed {number}")
    more = CHOICES[number % len(CHOICES)]
    while True:
        model, layout, train = layouts.draw(generator, world=8, axes=1)
        layout |= more
        if "compress" in more or "sync_every" in more:
            layout["replicate"] = generator.choice([2, 3])
        if "secondary_shard" in more:
            layout |= dict(zero=3)
        if "compress_weights" in more:
            layout["shard"] = 2 * more.get("secondary_shard", 1)
        train |= dict(global_batch=12, microbatch=1, balance_rate=0.0 if "sync_every" in more else 0.01)
        try:
            return cases.make_run(model, layout, **cases.layers_for(layout) | train)
        except UserError:
            continue


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "number" in metafunc.fixturenames:
        mark = pytest.mark.large("40 drawn combinations with other axes; the small tier has each method on one or two")
        metafunc.parametrize("number", [pytest.param(n, marks=mark) for n in range(40)])


def test_every_combination_agrees_with_its_plan(number: int, request: pytest.FixtureRequest) -> None:
    run = combination(request.config.getoption("--seed"), number)
    verdict = verify_dry(run, number % run.layout.world, whole=True)
    assert not verdict.beyond(TOLERANCE), (run.layout, verdict.beyond(TOLERANCE)[:5])
