"""Many costs on one schedule at once: the same, to the last bit, as playing each alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.plan.time.waves import Waves
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
