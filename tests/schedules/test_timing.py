"""The times of a schedule: by hand, against a slow oracle, with transfers, and quickly."""

from __future__ import annotations

from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_check import bubble, busy, idle

from shardwise.run.axes import BIDIRECTIONAL
from shardwise.schedules import KINDS, PASSES, SCHEDULES, Cost, Schedule, make_schedule, time


def longest_path(schedule: Schedule, cost: Cost, wire: list[float]) -> list[list[float]]:
    """The end of every action by relaxing all constraints until nothing moves."""
    length = {kind: cost.of(kind) for kind in KINDS}
    end: dict[tuple[str, int, int], float] = {}
    ends = [[0.0] * len(actions) for actions in schedule.ranks]
    changed = True
    while changed:
        changed = False
        for rank, actions in enumerate(schedule.ranks):
            now = 0.0
            for at, (kind, stage, microbatch) in enumerate(actions):
                neighbour = stage - 1 if kind == "F" else stage + 1
                begins = schedule.is_first(stage) if kind == "F" else schedule.is_last(stage)
                if kind in PASSES and not begins:
                    far = schedule.placement[neighbour] != rank
                    arrival = end.get(("F" if kind == "F" else "I", neighbour, microbatch), 0.0)
                    now = max(now, arrival + (wire[min(stage, neighbour)] if far else 0))
                now += length[kind][stage]
                end["I" if kind == "B" else kind, stage, microbatch] = now
                changed |= ends[rank][at] != now
                ends[rank][at] = now
    return ends


def test_two_ranks_by_hand() -> None:
    timing = time(make_schedule("1f1b", 2, 2), Cost([1, 2], [1, 2], [1, 1]), latency=0.5)
    # Rank 1 receives the first microbatch at 1.5; 2 forward and 3 back, twice.
    assert timing.start == ((0, 1, 7, 12), (1.5, 3.5, 6.5, 8.5))
    assert timing.end == ((1, 2, 9, 14), (3.5, 6.5, 8.5, 11.5))
    assert timing.makespan == 14
    assert busy(timing) == (6, 10)
    assert bubble(timing) == (8, 4)
    assert idle(timing) == (8, 0)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(SCHEDULES), st.integers(1, 5), st.integers(1, 9), st.data())
def test_times_are_those_of_the_longest_path(name: str, ranks: int, microbatches: int, data: st.DataObject) -> None:
    schedule = make_schedule(name, ranks + ranks % 2 if name in BIDIRECTIONAL else ranks, microbatches)
    durations = st.lists(st.integers(0, 9), min_size=schedule.stages, max_size=schedule.stages)
    whole = data.draw(st.none() | durations)
    cost = Cost(data.draw(durations), data.draw(durations), data.draw(durations), whole)
    wire = data.draw(st.lists(st.integers(0, 5), min_size=schedule.stages - 1, max_size=schedule.stages - 1))
    timing = time(schedule, cost, wire)
    ends = longest_path(schedule, cost, wire)
    assert [list(rank) for rank in timing.end] == ends
    assert timing.makespan == max(max(rank) for rank in ends)
    for rank, actions in enumerate(schedule.ranks):
        lengths = [end - start for start, end in zip(timing.start[rank], timing.end[rank], strict=True)]
        assert lengths == [cost.of(action.kind)[action.stage] for action in actions]


def test_latency_is_paid_between_ranks_and_not_on_one() -> None:
    v = make_schedule("zb-v", 2, 1)
    # One microbatch goes down and up: 4 forwards, 4 back, the last W; 2 of the 3 boundaries are between ranks.
    assert time(v, Cost.even(4)).makespan + 4 * 10 == time(v, Cost.even(4), latency=10).makespan
    assert time(v, Cost.even(4), latency=[10, 99, 10]).makespan == time(v, Cost.even(4), latency=10).makespan
    assert bubble(time(make_schedule("zb-v", 1, 4), Cost.even(2), latency=10)) == (0,)


def test_a_cost_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="4 stages"):
        time(make_schedule("zb-v", 2, 4), Cost.even(2))


def test_a_large_schedule_is_timed_in_milliseconds() -> None:
    schedule = make_schedule("zb-v", 16, 128)
    cost = Cost.even(schedule.stages)
    assert sum(map(len, schedule.ranks)) == 3 * 32 * 128

    def once() -> float:
        begin = process_time()
        time(schedule, cost, 0.1)
        return process_time() - begin

    # About 10 ms of this process's own time; the best of several. Quadratic time would take seconds.
    assert min(once() for _ in range(5)) < 0.5
