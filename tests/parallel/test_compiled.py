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
