"""What the prefix cache saves, to the token, and what it must not share."""

from __future__ import annotations

import pytest
from small_cases import chunks, made, run, service_of

from shardwise.schedules.serving import Scheduler, Sequence, Step

SYSTEM = list(range(100, 110))
"""Two pages of four tokens and a half."""


def asked(scheduler: Scheduler, key: str, tokens: list[int], max_new: int = 20, salt: bytes = b"") -> Sequence:
    sequence = Sequence(key, list(tokens), max_new, salt=salt)
    scheduler.add(sequence)
    return sequence


def ended(scheduler: Scheduler, sequence: Sequence) -> Sequence:
    while len(sequence.tokens) < sequence.end:
        run(scheduler)
    scheduler.finish(sequence)
    return sequence


def test_a_prefix_is_computed_once_also_within_one_step() -> None:
    scheduler = made(cache=True, max_step_tokens=100)
    for number in range(5):
        asked(scheduler, f"s{number}", [*SYSTEM, number])
    step = run(scheduler)
    assert chunks(step) == [("s0", 0, 11, 1), *((f"s{number}", 8, 3, 1) for number in range(1, 5))]
    assert step.tokens == 11 + 4 * (11 - 8)
    assert scheduler.pool.used == 2 + 5
    assert (scheduler.pool.queried_tokens, scheduler.pool.found_tokens) == (5 * 11, 4 * 8)


def test_without_the_cache_everything_is_computed() -> None:
    scheduler = made(cache=False, max_step_tokens=100)
    for number in range(5):
        asked(scheduler, f"s{number}", [*SYSTEM, number])
    assert run(scheduler).tokens == 55
    assert scheduler.pool.cached == 0


def test_at_least_one_token_is_left_to_compute() -> None:
    scheduler = made(cache=True)
    ended(scheduler, asked(scheduler, "first", SYSTEM[:8]))
    again = asked(scheduler, "again", SYSTEM[:8])
    assert chunks(run(scheduler)) == [("again", 4, 4, 1)]
    assert again.cached == 4


def test_the_next_turn_finds_what_was_generated() -> None:
    scheduler = made(cache=True)
    first = ended(scheduler, asked(scheduler, "first", SYSTEM, 15))
    assert len(first.tokens) == 25
    second = asked(scheduler, "second", [*first.tokens, 1, 2])
    assert chunks(run(scheduler)) == [
        ("second", 24, 3, 1)
    ]  # the last generated token is not computed, but begins a page
    assert second.cached == 24


def test_what_ends_under_way_is_found_too() -> None:
    scheduler = made(cache=True)
    first = asked(scheduler, "first", SYSTEM[:7], 9)
    run(scheduler)
    steps = [scheduler.schedule(), scheduler.schedule()]
    scheduler.update(steps[0], [[5]])
    scheduler.finish(first)  # [..., 7, 5], and the step under way computes the 5
    asked(scheduler, "second", [*first.tokens, 1])
    assert chunks(scheduler.schedule()) == [("second", 8, 2, 1)]


def test_sequences_of_another_salt_share_nothing() -> None:
    scheduler = made(cache=True)
    ended(scheduler, asked(scheduler, "first", SYSTEM))
    assert asked(scheduler, "other", SYSTEM, salt=b"x").cached == -1
    assert chunks(run(scheduler)) == [("other", 0, 10, 1)]


def test_a_sequence_may_have_its_whole_prompt_computed() -> None:
    scheduler = made(cache=True)
    ended(scheduler, asked(scheduler, "first", SYSTEM))
    sequence = Sequence("whole", list(SYSTEM), 5, reads_cache=False)
    scheduler.add(sequence)
    assert chunks(run(scheduler)) == [("whole", 0, 10, 1)]
    assert sequence.cached == 0


def test_different_tokens_after_the_prefix_are_not_confused() -> None:
    scheduler = made(cache=True)
    ended(scheduler, asked(scheduler, "first", [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    asked(scheduler, "second", [9, 9, 9, 9, 5, 6, 7, 8, 9])  # its second page has the tokens of another
    assert chunks(run(scheduler)) == [("second", 0, 9, 1)]


def test_nobody_is_charged_for_what_was_found() -> None:
    scheduler = made(cache=True, max_step_tokens=100)
    for user in ("first", "second"):
        scheduler.add(Sequence(user, list(SYSTEM), 5, user=user))
    run(scheduler)
    assert [service_of(scheduler._waiting, user) for user in ("first", "second")] == [10, 2]


def preempted(scheduler: Scheduler) -> tuple[Sequence, Step]:
    """Two sequences fill six pages; the second loses its three, and one of them to the first."""
    first = asked(scheduler, "first", list(range(11)), 5)
    second = asked(scheduler, "second", list(range(50, 61)), 5)
    run(scheduler, 3)
    assert second.state == "waiting"
    scheduler.finish(first)
    return second, run(scheduler)


def test_a_preempted_sequence_finds_its_pages_again() -> None:
    second, step = preempted(made(cache=True, pages=6, max_step_tokens=32))
    assert second.tokens[11:] == [7, 7, 7]
    assert chunks(step) == [("second", 8, 5, 1)]


def test_swapped_pages_that_are_still_cached_do_not_travel() -> None:
    second, step = preempted(made(cache=True, pages=6, host_pages=6, preemption="swap", max_step_tokens=32))
    assert chunks(step) == [("second", 12, 1, 1)]
    assert [page for _, page in step.swap_in] == [second.pages[2]]
    second, step = preempted(made(cache=False, pages=6, host_pages=6, preemption="swap", max_step_tokens=32))
    assert chunks(step) == [("second", 12, 1, 1)]
    assert [page for _, page in step.swap_in] == second.pages[:3]


@pytest.mark.parametrize(("window", "found"), [(0, 0), (5, 24)])
def test_with_a_window_only_what_can_be_seen_has_to_be_there(window: int, found: int) -> None:
    scheduler = made(cache=True, pages=12, window=window)
    first = ended(scheduler, asked(scheduler, "first", SYSTEM, 15))
    begun = scheduler.pool.find(first.digests[0])
    assert begun is not None
    scheduler.pool.forget(begun)
    second = asked(scheduler, "second", first.tokens)
    run(scheduler)
    assert second.cached == found
    assert second.pages.count(-1) == (5 if window else 0)
