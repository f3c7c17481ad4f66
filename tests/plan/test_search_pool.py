"""What a search leaves out before it looks closer: nothing that is among the fastest, or the fastest that is as lean."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardwise.plan.search.pool import BINS, screen_all
from shardwise.plan.search.screen import Space
from shardwise.plan.search.search import spaces_of
from shardwise.run import run_from_dict

MOST = 60


def spaces(model: dict[str, Any], **keys: Any) -> list[Space]:
    """All layouts on 16 devices."""
    train = dict(seq_len=4096, global_batch=32, dtype="bfloat16") | keys
    cluster = dict(chip="h100", nodes=2, devices_per_node=8)
    return spaces_of(run_from_dict(dict(model=model, layout="auto", train=train, cluster=cluster)), 16, 8)


SHAPE = dict(layers=12, hidden=2048, heads=16, kv_heads=8, ffn=8192, vocab=32000)
MODELS = [SHAPE, SHAPE | dict(experts=8, experts_per_token=2, expert_ffn=2048, dense_layers=1)]


@pytest.mark.parametrize("model", MODELS, ids=["dense", "experts"])
def test_the_bound_is_below_every_layout(model: dict[str, Any]) -> None:
    """Of every schedule, also those whose layers are not compiled."""
    for space in spaces(model):
        for group in space.groups:
            for one in group.screen(group.schedules, group.rows()):
                at = group.at(one.rows)
                least = group.least_seconds(one.schedule, one.chunks, at.microbatches, *group.mean_rank(at))
                assert (one.seconds >= least * (1 - 1e-12)).all(), (group.pipeline, one.schedule, one.chunks)


@pytest.mark.parametrize("share", [1.0, 0.2])
@pytest.mark.drawn(1)
def test_the_fastest_and_the_leanest_are_those_of_all(share: float) -> None:
    for space in spaces(MODELS[0]):
        most = share * space.capacity
        every = [one for group in space.groups for one in group.screen(group.schedules, group.rows())]
        fits = [
            (seconds, need)
            for one in every
            for row in one.seconds
            for seconds, need in zip(row, one.memory, strict=True)
        ]
        fits = sorted((s, m) for s, m in fits if m <= most and np.isfinite(s))
        assert len(fits) > 20 * MOST
        fast = screen_all(space, MOST, most, lean=False)
        assert [one.seconds for one in fast.found] == [seconds for seconds, _ in fits[:MOST]]
        assert fast.complete == pytest.approx(fits[MOST - 1][0], rel=1e-6)
        both = screen_all(space, MOST, most)
        assert {one.seconds for one in both.found} >= {one.seconds for one in fast.found}
        for step in range(BINS):
            lean = [seconds for seconds, need in fits if need < most * (step + 1) / BINS * (1 - 1e-9)]
            if lean and lean[0] < 1.6 * fits[0][0]:
                assert any(one.seconds == lean[0] for one in both.found), step
