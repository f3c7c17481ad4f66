"""Compiled layers compute what one process computes that compiles nothing, on every axis: in float64, where code that was generated
wrongly, or memory that it used twice, cannot hide behind rounding."""

from __future__ import annotations

import shutil
from typing import Any

import cases
import layouts
import numpy as np
import pytest
import torch
from parallel_pool import RankPool

from shardwise.run import Run

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
LARGE = pytest.mark.large("generates code for each layout")


def train_anew(rank: int, run: Run) -> dict[str, Any]:
    torch._dynamo.reset()  # a process compiles a function for eight cases and then runs it as written
    return cases.train(rank, run)


def check(ranks: RankPool, drawn: layouts.Drawn, **more: Any) -> None:
    model, layout, train = drawn
    train = cases.layers_for(layout) | train
    want = cases.train(0, cases.make_run(model, {}, **train))
    run = cases.make_run(model, layout, **train | dict(compile=True), **more)
    for got in ranks.run(run.layout.world, train_anew, run):
        np.testing.assert_allclose(got["losses"], want["losses"], rtol=1e-9)
        np.testing.assert_allclose(got["norms"], want["norms"], rtol=1e-9)


def test_tensor_ranks(ranks: RankPool) -> None:
    check(ranks, ("dense", dict(tensor=2), dict(layers=1, steps=2)))


@LARGE
@pytest.mark.parametrize("number", range(12))
def test_drawn_layouts(ranks: RankPool, number: int, request: pytest.FixtureRequest) -> None:
    check(ranks, layouts.compiled_layout(request.config.getoption("--seed"), number))
