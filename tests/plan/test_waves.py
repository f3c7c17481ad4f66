"""Many costs on one schedule at once: the same, to the last bit, as playing each alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng

from shardwise.plan.time.step import makespans
from shardwise.plan.time.waves import Waves
from shardwise.run import LayoutConfig
from shardwise.run.axes import BIDIRECTIONAL
from shardwise.schedules import SCHEDULES, Action, Cost, Deadlock, Schedule, make_schedule, time


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(SCHEDULES), st.integers(1, 6), st.integers(1, 13), st.data())
def test_makespans_are_those_of_each_cost_alone(name: str, ranks: int, microbatches: int, data: st.DataObject) -> None:
    schedule = make_schedule(name, ranks + ranks % 2 if name in BIDIRECTIONAL else ranks, microbatches)
    seconds = st.floats(1e-6, 10.0)
    durations = st.lists(seconds, min_size=schedule.stages, max_size=schedule.stages)
    whole = st.none() | durations
    costs = data.draw(st.lists(st.builds(Cost, durations, durations, durations, whole), min_size=1, max_size=4))
    wires = data.draw(st.lists(st.floats(0.0, 5.0), min_size=len(costs), max_size=len(costs)))
    alone = [time(schedule, cost, wire).makespan for cost, wire in zip(costs, wires, strict=True)]
    assert Waves(schedule).makespans(costs, wires).tolist() == alone


def test_lists_that_wait_for_each_other_are_named() -> None:
    lists = ((Action("B", 0, 0), Action("F", 0, 0)), (Action("F", 1, 0), Action("B", 1, 0)))
    with pytest.raises(Deadlock, match=r"rank 0 waits before B0\.0; rank 1 waits before F1\.0"):
        Waves(Schedule("wrong", lists, (0, 1), 1))


@pytest.mark.parametrize(
    "name", ["1f1b", "interleaved", "breadth-first", "zb-h1", "zb-2p", "zb-v", "dualpipe-v", "dualpipe"]
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_long_schedule_of_unequal_stages_takes_what_its_busiest_rank_does(name: str, ranks: int) -> None:
    """It is played in part and extrapolated. In the part, ranks with less to do may still be those that others wait for."""
    microbatches, random = 20 * ranks, default_rng(5)
    chunks = 2 if name in ("interleaved", "breadth-first", "zb-v", "dualpipe-v") else 1
    schedule = make_schedule(name, ranks, microbatches, None if name == "dualpipe" else chunks)
    layout = LayoutConfig(pipeline=ranks, schedule=name, chunks=chunks)  # type: ignore[arg-type]
    for _ in range(6):
        unequal = random.choice([1.0, 1.2], schedule.stages)
        passes = [[each * seconds for each in unequal] for seconds in (1.0, *random.uniform(0.6, 1.6, 2))]
        cost = Cost(*passes)
        whole = time(schedule, cost, 0.02).makespan
        assert makespans(layout, [microbatches], [cost], [0.02]) == pytest.approx([whole], rel=0.015)
