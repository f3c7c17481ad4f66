"""The checker catches every kind of corruption, and says which; a sound schedule passes without a word."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_check import check

from shardwise.run.axes import ASYNCHRONOUS, BIDIRECTIONAL
from shardwise.schedules import SCHEDULES, Action, Cost, Deadlock, Schedule, make_schedule, time


def with_rank(schedule: Schedule, rank: int, actions: list[Action]) -> Schedule:
    return replace(schedule, ranks=(*schedule.ranks[:rank], tuple(actions), *schedule.ranks[rank + 1 :]))


def moved(actions: tuple[Action, ...], what: Action, before: Action) -> list[Action]:
    rest = [action for action in actions if action != what]
    rest.insert(rest.index(before), what)
    return rest


PLAIN = [name for name in SCHEDULES if name != "bpipe" and name not in ASYNCHRONOUS]


@st.composite
def placed(draw: st.DrawFn) -> tuple[Schedule, int, int]:
    """A sound schedule with the place of one of its actions."""
    name = draw(st.sampled_from(PLAIN))
    ranks = draw(st.sampled_from((2, 4, 6)) if name in BIDIRECTIONAL else st.integers(2, 5))
    schedule = make_schedule(name, ranks, draw(st.integers(1, 9)))
    rank = draw(st.integers(0, len(schedule.ranks) - 1))
    return schedule, rank, draw(st.integers(0, len(schedule.ranks[rank]) - 1))


@settings(max_examples=100, deadline=None)
@given(placed())
def test_a_dropped_action_is_missed_by_name(place: tuple[Schedule, int, int]) -> None:
    schedule, rank, at = place
    actions = list(schedule.ranks[rank])
    gone = actions.pop(at)
    (problem,) = check(with_rank(schedule, rank, actions)).problems
    if gone.kind == "F":
        assert problem == f"{gone} is listed never"
    else:
        assert problem.startswith(f"microbatch {gone.microbatch} of stage {gone.stage} goes back with")
        assert f"{gone.kind} never" in problem


@settings(max_examples=100, deadline=None)
@given(placed())
def test_an_action_twice_is_reported(place: tuple[Schedule, int, int]) -> None:
    schedule, rank, at = place
    actions = list(schedule.ranks[rank])
    again = actions[at]
    (problem,) = check(with_rank(schedule, rank, [*actions, again])).problems
    assert "twice" in problem
    assert (f"{again} is" in problem) if again.kind == "F" else (f"{again.kind} twice" in problem)


@settings(max_examples=100, deadline=None)
@given(placed())
def test_an_action_on_another_rank_is_reported_with_the_rank_it_belongs_to(place: tuple[Schedule, int, int]) -> None:
    schedule, rank, at = place
    actions = list(schedule.ranks[rank])
    stray = actions.pop(at)
    other = (rank + 1) % len(schedule.ranks)
    corrupt = with_rank(with_rank(schedule, rank, actions), other, [*schedule.ranks[other], stray])
    problems = check(corrupt).problems
    assert f"rank {other} lists {stray}, but stage {stray.stage} stands on rank {rank}" in problems


@pytest.mark.parametrize(
    ("name", "what", "before"),
    [
        ("1f1b", Action("B", 1, 0), Action("F", 1, 0)),  # the last stage: no gradient to wait for, only its own forward
        ("zb-h1", Action("I", 1, 2), Action("F", 1, 2)),
        ("zb-h1", Action("W", 1, 0), Action("I", 1, 0)),
        ("zb-h1", Action("W", 0, 3), Action("I", 0, 3)),
        ("zb-v", Action("F", 2, 1), Action("F", 1, 1)),  # two stages on one rank
        ("zb-v", Action("I", 1, 1), Action("I", 2, 1)),
    ],
)
def test_an_action_before_what_it_needs_is_reported_and_nothing_else(name: str, what: Action, before: Action) -> None:
    schedule = make_schedule(name, 2, 4)
    rank = schedule.placement[what.stage]
    report = check(with_rank(schedule, rank, moved(schedule.ranks[rank], what, before)))
    assert report.problems == (f"rank {rank} lists {what} before {before}, which it needs",)


def test_a_deadlock_names_who_waits_for_whom() -> None:
    schedule = make_schedule("1f1b", 2, 2)
    # Rank 0 wants the first gradient before it sends the second microbatch, and rank 1 that before it goes back.
    first = [Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1)]
    second = [Action("F", 1, 0), Action("F", 1, 1), Action("B", 1, 0), Action("B", 1, 1)]
    corrupt = replace(schedule, ranks=(tuple(first), tuple(second)))
    assert check(corrupt).problems == (
        "deadlock: rank 0 waits before B0.0 for B1.0 of rank 1; rank 1 waits before F1.1 for F0.1 of rank 0",
    )
    with pytest.raises(Deadlock, match=r"rank 0 waits before B0\.0; rank 1 waits before F1\.1"):
        time(corrupt, Cost.even(2))
    # Either list alone is sound: only the two together wait for each other.
    assert check(with_rank(schedule, 0, first)).ok
    assert check(with_rank(schedule, 1, second)).ok


@settings(max_examples=100, deadline=None)
@given(placed(), st.randoms(use_true_random=False))
def test_a_shuffled_list_passes_only_when_it_can_really_be_played(
    place: tuple[Schedule, int, int], random: object
) -> None:
    schedule, rank, _ = place
    actions = list(schedule.ranks[rank])
    random.shuffle(actions)  # type: ignore[attr-defined]
    corrupt = with_rank(schedule, rank, actions)
    # Oracle: any order of the actions that respects what each reads, found by doing whatever can be done.
    done: set[tuple[str, int, int]] = set()
    left = [list(listed) for listed in corrupt.ranks]
    moving = True
    while moving:
        moving = False
        for listed in left:
            while listed:
                kind, stage, microbatch = listed[0]
                needs = {
                    "F": {("F", stage - 1, microbatch)} if not schedule.is_first(stage) else set(),
                    "W": {("I", stage, microbatch)},
                }.get(
                    kind,
                    {("F", stage, microbatch)}
                    | ({("I", stage + 1, microbatch)} if not schedule.is_last(stage) else set()),
                )
                if not needs <= done:
                    break
                done.add(("I" if kind == "B" else kind, stage, microbatch))
                listed.pop(0)
                moving = True
    assert check(corrupt).ok == (not any(left))


def test_numbers_that_name_nothing_are_reported_and_stop_the_check() -> None:
    schedule = make_schedule("gpipe", 2, 2)
    stray = [*schedule.ranks[0], Action("F", 2, 0), Action("F", 0, 2), Action("X", 0, 0)]  # type: ignore[arg-type]
    assert len(check(with_rank(schedule, 0, stray)).problems) == 3
    assert "stands on rank 5" in check(replace(schedule, placement=(0, 5))).problems[0]


def test_many_problems_are_counted_rather_than_spelt_out() -> None:
    schedule = replace(make_schedule("gpipe", 4, 20), ranks=((), (), (), ()))
    problems = check(schedule, most=10).problems
    assert len(problems) == 11
    assert problems[-1] == f"… and {4 * 20 * 2 - 10} more"
    assert len(check(schedule, most=1000).problems) == 4 * 20 * 2


def test_in_flight_counts_follow_the_list() -> None:
    report = check(make_schedule("zb-h1", 2, 2))
    assert report.in_flight == ((1, 2, 2, 1, 1, 0), (1, 1, 2, 2, 1, 0))
    assert report.high_water == (2, 2)
    assert report.high_water_input == (2, 1)


@pytest.mark.parametrize(
    ("name", "gone", "words"),
    [
        ("bpipe", Action("E", 0, 3), "is evicted once and loaded twice"),
        ("bpipe", Action("L", 0, 3), "is evicted twice and loaded once"),
        ("pipedream", Action("U", 0, 7), "stage 0 is updated never"),
    ],
)
def test_a_dropped_handover_or_update_is_missed(name: str, gone: Action, words: str) -> None:
    schedule = make_schedule(name, 6, 8)
    rank = next(n for n, actions in enumerate(schedule.ranks) if gone in actions)
    problems = check(with_rank(schedule, rank, [a for a in schedule.ranks[rank] if a != gone])).problems
    assert any(words in problem for problem in problems), problems


def test_a_handover_on_a_rank_that_is_not_the_partner_is_reported() -> None:
    schedule = make_schedule("bpipe", 6, 8)
    problems = check(with_rank(schedule, 3, [Action("E", 0, 3), *schedule.ranks[3]])).problems
    assert "rank 3 lists E0.3, but stage 0 stands on rank 0" in problems


def test_a_partner_that_returns_too_late_is_a_deadlock() -> None:
    schedule = make_schedule("bpipe", 6, 8)
    late = moved(schedule.ranks[5], Action("L", 0, 3), Action("B", 5, 7))
    assert check(with_rank(schedule, 5, late)).ok  # before its last pass is early enough
    evict = [a for a in schedule.ranks[0] if a != Action("F", 0, 4)]
    evict.insert(evict.index(Action("L", 0, 3)), Action("F", 0, 4))
    assert not check(with_rank(schedule, 0, evict)).ok
