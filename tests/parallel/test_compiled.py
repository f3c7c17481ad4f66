"""Compiled layers compute what one process computes that compiles nothing, on every axis: in float64, where code that was generated
wrongly, or memory that it used twice, cannot hide behind rounding. The small tier runs the captured graphs, the large one the code
that Inductor generates for them, which takes a C++ compiler a minute."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cases
import layouts
import numpy as np
import pytest
import torch
from functorch.compile import make_boxed_func
from parallel_pool import RankPool

from shardwise.run import Run

LARGE = pytest.mark.large("code that Inductor generates for each layout; the graphs are PyTorch's own to translate")
COMPILER = pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")


def train_anew(rank: int, run: Run, backend: str | Callable[..., Any]) -> dict[str, Any]:
    torch._dynamo.reset()  # a process compiles a function for eight cases and then runs it as written
    real = torch.compile
    torch.compile = functools.partial(real, backend=backend)  # type: ignore[assignment]
    try:
        return cases.train(rank, run)
    finally:
        torch.compile = real


def check(ranks: RankPool, drawn: layouts.Drawn, backend: str = "inductor", **more: Any) -> None:
    model, layout, train = drawn
    train = cases.layers_for(layout) | train
    want = cases.train(0, cases.make_run(model, {}, **train))
    run = cases.make_run(model, layout, **train | dict(compile=True), **more)
    for got in ranks.run(run.layout.world, train_anew, run, backend):
        np.testing.assert_allclose(got["losses"], want["losses"], rtol=1e-9)
        np.testing.assert_allclose(got["norms"], want["norms"], rtol=1e-9)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[LARGE, COMPILER])])
@pytest.mark.drawn(group="compiled")
def test_tensor_ranks(ranks: RankPool, backend: str) -> None:
    check(ranks, ("dense", dict(tensor=2), dict(layers=1, steps=2)), backend)


def graphs(rank: int, run: Run) -> list[int]:
    """The operations of each graph that is compiled."""
    found: list[int] = []

    def count(graph: torch.fx.GraphModule, _: Any, **options: Any) -> torch.fx.GraphModule:
        found.append(len(graph.graph.nodes))
        return graph

    train_anew(rank, run, count)
    return found


def test_a_layer_of_a_replica_is_one_graph_and_so_is_the_norm(ranks: RankPool) -> None:
    run = cases.make_run("dense", dict(replicate=2), layers=1, steps=1, compile=True)
    large = dict(hidden=512, ffn=1024)  # several buckets
    for found in ranks.run(2, graphs, replace(run, model=replace(run.model, **large))):
        assert len(found) == 4, found  # for training and for evaluation


RECOMPUTED = [
    ("dense", dict(tensor=2, recompute="full")),
    ("dense", dict(shard=2, zero=3, recompute="full", recompute_every=2)),
    ("dense", dict(context=2, context_method="ulysses", recompute="full")),
    ("dense", dict(pipeline=2, tensor=2, recompute="full")),
    ("dense", dict(shard=2, zero=3, recompute="budget", recompute_budget=3e-4)),
    ("neox", dict(tensor=2, shard=2, zero=2, recompute="full")),
    ("latent", dict(tensor=2, recompute="full")),
    ("window", dict(replicate=2, recompute="full")),
    ("mixture", dict(shard=2, expert=2, recompute="full")),
    ("dense", dict(context=2, context_method="ring", recompute="full")),
]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[LARGE, COMPILER])])
@pytest.mark.parametrize(("model", "layout"), RECOMPUTED, ids=str)
@pytest.mark.drawn(group="compiled")
def test_layers_that_are_recomputed(ranks: RankPool, model: str, layout: dict[str, Any], backend: str) -> None:
    check(ranks, (model, layout, dict(steps=2)), backend)


@pytest.mark.drawn(group="compiled")
def test_adapters_of_layers_that_are_recomputed(ranks: RankPool) -> None:
    """Their dropout is that of the forward pass."""
    check(ranks, ("dense", dict(tensor=2, recompute="full"), dict(steps=2, adapter="lora dropout")), "aot_eager")


def counted(rank: int, run: Run, names: tuple[str, ...]) -> list[int]:
    """The operators of these names in each forward and backward graph that has any."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    found: list[int] = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        found.append(sum(any(name in str(node.target) for name in names) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    own = aot_autograd(fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    train_anew(rank, run, lambda graph, inputs, **_: own(graph, inputs))
    return [count for count in found if count]


def test_the_last_gemm_of_a_layer_is_not_recomputed(ranks: RankPool) -> None:
    """Queries, keys, values, attention's output, gate, up and down: 7, and twice as many backward."""
    run = cases.make_run("dense", dict(tensor=2), layers=1, steps=1, compile=True)
    again = replace(run, layout=replace(run.layout, recompute="full"))
    gemms = ("aten.mm.default", "aten.addmm.default")
    for plain, recomputed in zip(ranks.run(2, counted, run, gemms), ranks.run(2, counted, again, gemms), strict=True):
        assert (max(plain), max(recomputed)) == (14, 20)


def test_recomputing_attention_saves_no_state_of_a_generator(ranks: RankPool) -> None:
    run = cases.make_run("dense", dict(recompute="full"), layers=1, steps=1, compile=True)
    attention, state = ranks.run(1, counted, run, ("scaled_dot_product",))[0], ranks.run(1, counted, run, ("rng",))[0]
    assert attention
    assert not state


@LARGE
@COMPILER
def test_memory_of_a_gathered_sequence_that_nothing_saves(ranks: RankPool) -> None:
    """Frozen matrices save no input: the compiler would put what comes of them, and is saved, where the gathered sequence lay."""
    check(ranks, ("dense", dict(tensor=2), dict(layers=1, steps=2, adapter="lora last")))


@LARGE
@COMPILER
@pytest.mark.parametrize("number", range(4))
def test_drawn_layouts(ranks: RankPool, number: int, request: pytest.FixtureRequest) -> None:
    check(ranks, layouts.compiled_layout(request.config.getoption("--seed"), number))
