"""ZeRO's collectives without copies, which a GPU's trainer uses, on CPU ranks: the numbers are those of one process and of
`fully_shard`'s own collectives, and what is sent is what the plan says."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import cases
import numpy as np
import pytest
import torch
from interpreted_kernels import Interpreter
from parallel_pool import RankPool
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.measure.verify import TOLERANCE, Verdict, counted, planned, random_batch
from shardwise.parallel.in_place import padded
from shardwise.plan.cost.job import job_of
from shardwise.run import Run, read_run
from shardwise.run.derive import (
    exchanges_gradients,
    fresh_and_near,
    gathers_embedding_apart,
    gathers_head_apart,
    gathers_in_place,
    reduces_in_place,
)
from shardwise.train.step import TrainState

Layout = dict[str, Any]
LOW = dict(dtype="bfloat16", steps=2, lr=1e-3, layers=2)


class Calls(TorchDispatchMode):
    """Counts the calls of each collective."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.name().split("::")[1]
            self.found[name] = self.found.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


@contextmanager
def as_on_a_gpu(near: bool = True) -> Iterator[None]:
    """The rules of collectives are those of a GPU, and of ranks that share a machine if they are `near`."""
    rules = (gathers_in_place, reduces_in_place, exchanges_gradients, gathers_head_apart)
    as_there = {rule.__name__: functools.partial(_there, rule) for rule in rules}
    if not near:
        as_there |= {rule.__name__: functools.partial(_no, rule) for rule in (exchanges_gradients, gathers_head_apart)}
    with contextlib.ExitStack() as stack:
        for module in ("parallel.shard", "plan.trainer.rank", "plan.trainer.units"):
            read = importlib.import_module(f"shardwise.{module}")
            for name in as_there.keys() & vars(read).keys():
                stack.enter_context(mock.patch.object(read, name, as_there[name]))
        yield


def _there(rule: Callable[..., bool], run: Run, *, gpu: bool, **others: bool) -> bool:
    return rule(run, gpu=True, **others)


def _no(rule: Callable[..., bool], run: Run, **others: bool) -> bool:
    return False


def trained(rank: int, run: Run, near: bool = True) -> dict[str, Any]:
    with as_on_a_gpu(near), Calls() as calls:
        return cases.train(rank, run, documents=False) | dict(calls=calls.found)


def by_fully_shard(rank: int, run: Run) -> dict[str, Any]:
    return cases.train(rank, run, documents=False)


@functools.cache
def alone(model: str) -> dict[str, Any]:
    return cases.train(0, cases.make_run(model, {}, layers=2), documents=False)


EXACT: list[tuple[str, Layout]] = [
    ("dense", dict(shard=2)),
    ("dense", dict(shard=4, recompute="full")),
    ("dense", dict(shard=3)),
    ("mixture", dict(shard=4, expert=2)),
    ("mixture", dict(shard=2, tensor=2)),
    ("tied", dict(shard=2, pipeline=2)),
    ("dense", dict(shard=2, context=2, zero=2)),
    ("dense", dict(shard=2, replicate=2)),
    ("dense", dict(shard=2, zero=1)),
    ("dense", dict(shard=2, prefetch=2)),
    ("dense", dict(shard=2, pipeline=2, schedule="zb-h1", zero=1)),
]


@pytest.mark.parametrize(("model", "layout"), EXACT, ids=str)
@pytest.mark.drawn(4)
def test_parameters_gathered_in_place_give_the_numbers_of_one_process(
    ranks: RankPool, model: str, layout: Layout
) -> None:
    batch = dict(global_batch=12) if layout["shard"] == 3 else {}
    run = cases.make_run(model, layout, layers=2, **batch)
    want = alone(model) if not batch else cases.train(0, cases.make_run(model, {}, layers=2, **batch), documents=False)
    for got in ranks.run(run.layout.world, trained, run):
        np.testing.assert_allclose(got["losses"], want["losses"], rtol=1e-9)
        np.testing.assert_allclose(got["norms"], want["norms"], rtol=1e-9)
        assert got["calls"]["allgather_into_tensor_coalesced_"]


def low_run(model: str, layout: Layout) -> Run:
    batch = dict(global_batch=12) if layout["shard"] == 3 else {}
    return cases.make_run(model, layout, **LOW | batch)  # type: ignore[arg-type]


LOW_LAYOUTS: list[tuple[str, Layout]] = [
    ("dense", dict(shard=4)),
    ("dense", dict(shard=2, zero=2)),
    ("mixture", dict(shard=4, expert=2)),
    ("dense", dict(shard=3)),
    ("dense", dict(shard=2, tensor=2)),
]


@pytest.mark.parametrize(("model", "layout"), LOW_LAYOUTS, ids=str)
@pytest.mark.drawn(2)
def test_exchanged_gradients_are_those_of_a_reduce_scatter(ranks: RankPool, model: str, layout: Layout) -> None:
    run = low_run(model, layout)
    assert run.accumulation > 1
    assert gathers_head_apart(run, gpu=True) == run.layout.gathers_each_pass
    usual = ranks.run(run.layout.world, by_fully_shard, run)
    for got, want in zip(ranks.run(run.layout.world, trained, run), usual, strict=True):
        assert got["calls"]["alltoall_base_"]
        np.testing.assert_allclose(got["losses"], want["losses"], rtol=1e-6)
        np.testing.assert_allclose(got["norms"], want["norms"], rtol=1e-6)


@pytest.mark.parametrize(("model", "layout"), LOW_LAYOUTS, ids=str)
@pytest.mark.drawn(2)
def test_gradients_of_several_machines_are_those_of_fully_shard(ranks: RankPool, model: str, layout: Layout) -> None:
    run = low_run(model, layout)
    usual = ranks.run(run.layout.world, by_fully_shard, run)
    for got, want in zip(ranks.run(run.layout.world, trained, run, False), usual, strict=True):
        assert got["calls"]["reduce_scatter_tensor_coalesced_"]
        assert "alltoall_base_" not in got["calls"] or "expert" in layout
        np.testing.assert_array_equal(got["losses"], want["losses"])
        np.testing.assert_array_equal(got["norms"], want["norms"])


def verified(rank: int, run: Run, near: bool = True) -> Verdict:
    with as_on_a_gpu(near):
        train_state = TrainState(run)
        batch = random_batch(run, train_state.mesh.data_index)
        train_state.train_step(batch)
        account, same, actions = counted(train_state, batch)
        return Verdict(rank, planned(run, rank), account, same, actions)


PLANNED = [
    *LOW_LAYOUTS,
    ("dense", dict(shard=2, pipeline=2, schedule="zb-h1", zero=2)),
    ("tied", dict(shard=4, zero=1)),
]


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize(("model", "layout"), PLANNED, ids=str)
@pytest.mark.drawn(4)
def test_plan_equals_run(ranks: RankPool, model: str, layout: Layout, near: bool) -> None:
    run = low_run(model, layout)
    for verdict in ranks.run(run.layout.world, verified, run, near):
        assert verdict.schedule
        assert not verdict.beyond(TOLERANCE), (verdict.rank, verdict.beyond(TOLERANCE)[:5])


def test_what_is_fresh_and_near_is_exchanged() -> None:
    """Elsewhere a reduce-scatter sends less, or adds what is in the dtype of the sum already."""
    base = [
        "model.preset=llama3-8b",
        "cluster.chip=h200",
        "train.device=cuda",
        "train.dtype=bfloat16",
        "train.microbatch=1",
    ]

    def made(*words: str) -> Run:
        return read_run(None, [*base, "layout.shard=8", "train.global_batch=16", *words])

    for words, there in (
        ((), True),
        (("cluster.nodes=2",), False),
        (("layout.zero=1",), False),
        (("layout.replicate=2",), False),
        (("train.reduce_dtype=bfloat16",), False),
        (("train.dtype=float32",), False),
        (("layout.secondary_shard=4",), False),
        (("layout.compress_shards=int4",), False),
    ):
        run = made(*words)
        assert exchanges_gradients(run, gpu=True) == there, words
        assert job_of(run).exchanges_gradients == there, words
        assert not exchanges_gradients(run, gpu=False)
    for words, embedding, head in (
        ((), True, True),
        (("cluster.nodes=2",), True, False),
        (("train.dtype=float32",), True, False),
        (("layout.compress_shards=int4",), True, False),
        (("layout.zero=2",), False, False),
        (("layout.pipeline=2",), False, False),
        (("model.tied_embeddings=true",), False, False),
    ):
        run = made(*words)
        assert gathers_embedding_apart(run) == embedding, words
        assert gathers_head_apart(run, gpu=True) == head, words
        assert not gathers_head_apart(run, gpu=False)
    layout = made().layout
    assert fresh_and_near(layout, np.array([4, 8, 16])).tolist() == [False, True, True]


def test_rows_are_padded_for_the_ranks() -> None:
    gradient = torch.arange(10.0).view(5, 2)
    assert padded(gradient, 5).tolist() == list(range(10))
    assert padded(gradient, 3).tolist() == [*range(10), 0, 0]
    assert padded(gradient.mT, 2).tolist() == [0, 2, 4, 6, 8, 1, 3, 5, 7, 9]


@pytest.mark.drawn(group="kernels")
def test_the_kernel_adds_in_the_order_of_the_ranks(interpreter: Interpreter) -> None:
    interpreter.run(Path(__file__).with_name("sum_parts_kernels.py"))


@pytest.mark.drawn(group="kernels")
def test_many_tensors_are_cast_and_squared_in_one_launch(interpreter: Interpreter) -> None:
    interpreter.run(Path(__file__).with_name("many_kernels.py"))
