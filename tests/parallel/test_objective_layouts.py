"""Every objective computes on any layout what it computes in one process: losses, norms, evaluation and parameters in float64. What
they send, compute and hold, and a layout of each in the small tier, is in `test_layouts.py`."""

from __future__ import annotations

import itertools
import random
from typing import Any

import cases
import layouts
import pytest
from observed import assert_same, one_process
from parallel_pool import RankPool

KINDS = ("sft", "dpo", "dpo ipo", "dpo hinge", "kto", "orpo", "simpo", "reward", *cases.OBJECTIVES)
LARGE = pytest.mark.large(
    "objectives on eight ranks and three axes at once, on every axis and pair of axes, experts among them"
)
DRAWN = 40
PAIRS = [layouts.ONE_AXIS[one] | layouts.ONE_AXIS[other] for one, other in itertools.combinations(layouts.AXES, 2)]


def hold(ranks: RankPool, model: str, layout: dict[str, Any], train: dict[str, Any]) -> None:
    keys = dict(cases.layers_for(layout), steps=2) | train
    run = cases.make_run(model, layout, **keys)
    want = one_process(model, **keys | dict(microbatch=1))
    for rank, got in enumerate(ranks.run(run.layout.world, cases.train, run)):
        assert_same(got, want, f"{model} {layout} {train} rank {rank}")


def drawn(seed: int, number: int, world: int) -> tuple[str, dict[str, Any], dict[str, Any]]:
    generator = random.Random(f"{seed} objective {number}")
    model, layout, train = layouts.draw(generator, world)
    return model, layout, train | dict(objective=KINDS[number % len(KINDS)])


@LARGE
@pytest.mark.parametrize("number", range(DRAWN))
def test_objectives_on_layouts_that_were_drawn(ranks: RankPool, request: pytest.FixtureRequest, number: int) -> None:
    hold(ranks, *drawn(request.config.getoption("--seed"), number, world=8))


@LARGE
@pytest.mark.parametrize("kind", KINDS)
def test_objectives_on_every_axis_and_pair(ranks: RankPool, kind: str) -> None:
    for layout in [*layouts.ONE_AXIS.values(), *PAIRS]:
        hold(ranks, "mixture", layout, dict(objective=kind))
