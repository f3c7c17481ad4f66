"""A schedule with several stages on a pipeline of one rank is verified as what it is."""

from __future__ import annotations

import cases
import pytest

from shardwise.measure.verify import TOLERANCE, verify_dry


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
@pytest.mark.drawn(group="dry ranks")
def test_stages_of_one_rank_are_as_planned(schedule: str) -> None:
    run = cases.make_run("dense", dict(shard=2, schedule=schedule, chunks=2))
    verdict = verify_dry(run, 0)
    assert verdict.schedule
    assert not verdict.beyond(TOLERANCE)
