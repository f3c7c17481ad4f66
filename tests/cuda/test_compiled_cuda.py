"""Compiled layers on ranks that share a GPU compute in float64 what one process computes on a CPU that compiles nothing."""

from __future__ import annotations

import layouts
import pytest
import torch
from parallel_pool import RankPool
from test_compiled import check

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.drawn(12)
@pytest.mark.parametrize("number", range(48))
def test_drawn_layouts(ranks: RankPool, number: int, request: pytest.FixtureRequest) -> None:
    drawn = layouts.compiled_layout(request.config.getoption("--seed"), 100 + number)
    check(ranks, drawn, device="cuda")
