"""Batches, pages, preemption and ends of the scheduler, in cases small enough to write down."""

from __future__ import annotations

import sys

import pytest
from small_cases import added, chunks, made, run

from shardwise.schedules.serving import Sequence, Settings
from shardwise.schedules.serving.queues import Running


def test_a_prompt_is_computed_in_chunks_and_then_token_by_token() -> None:
    scheduler = made(max_step_tokens=8)
    sequence = added(scheduler, 18, 3)
    seen = []
    while len(sequence.tokens) < sequence.end:
        seen += chunks(run(scheduler))
    assert seen == [("s0", 0, 8, 0), ("s0", 8, 8, 0), ("s0", 16, 2, 1), ("s0", 18, 1, 1), ("s0", 19, 1, 1)]
    assert sequence.tokens == [*range(18), 7, 7, 7]
    assert len(sequence.pages) == 5
    scheduler.finish(sequence)
    assert scheduler.idle
    assert scheduler.pool.used == 0


def test_decoding_goes_first_and_prompts_share_what_is_left_of_the_budget() -> None:
    scheduler = made(max_sequences=8, max_step_tokens=10)
    for prompt in (2, 3, 12, 9):
        added(scheduler, prompt)
    assert chunks(run(scheduler)) == [("s0", 0, 2, 1), ("s1", 0, 3, 1), ("s2", 0, 5, 0)]
    step = run(scheduler)
    assert chunks(step) == [("s0", 2, 1, 1), ("s1", 3, 1, 1), ("s2", 5, 7, 1), ("s3", 0, 1, 0)]
    assert (step.decoding, step.sampling, step.tokens) == (2, 3, 10)
    assert chunks(run(scheduler)) == [("s0", 3, 1, 1), ("s1", 4, 1, 1), ("s2", 12, 1, 1), ("s3", 1, 7, 0)]


def test_no_more_run_than_there_are_slots() -> None:
    scheduler = made(max_sequences=2)
    first, second, third = (added(scheduler, 2) for _ in range(3))
    run(scheduler)
    assert (scheduler.running, scheduler.waiting) == (2, 1)
    assert sorted((first.slot, second.slot, third.slot)) == [-1, 0, 1]
    slot = first.slot
    scheduler.finish(first)
    step = run(scheduler)
    assert (third.slot, first.slot) == (slot, -1)
    assert step.admitted == [third]


def test_pages_are_taken_at_their_edges_only() -> None:
    scheduler = made(page_tokens=4)
    sequence = added(scheduler, 3)
    held, changed = [], []
    for _ in range(8):
        changed.append(bool(run(scheduler).changed))
        held.append(len(sequence.pages))
    assert held == [1, 1, 2, 2, 2, 2, 3, 3]
    assert changed == [True, False, True, False, False, False, True, False]


def test_a_step_within_pages_calls_nothing_but_the_chunk() -> None:
    """The cost of a decoding sequence, counted, since time is not repeatable: the host must be done before the device is."""
    scheduler = made(pages=4000, page_tokens=16, max_sequences=256, max_step_tokens=8192)
    for _ in range(256):
        added(scheduler, 17)
    run(scheduler, 2)
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        step = scheduler.schedule()
    finally:
        sys.setprofile(None)
    assert len(step.chunks) == 256
    assert calls < 256 + 40


def test_admission_needs_room_for_the_prompt_and_leaves_some_for_the_others() -> None:
    scheduler = made(pages=10, page_tokens=4, watermark=0.2)
    added(scheduler, 8, 4)
    run(scheduler)
    other = added(scheduler, 21, 4)  # 6 pages; of the 7 that are free then, 2 are for the first to grow into
    run(scheduler)
    assert other.state == "waiting"
    scheduler.finish(other)
    other = added(scheduler, 20, 4)
    run(scheduler)
    assert other.state == "prefill"


def test_who_does_not_fit_is_not_passed_by() -> None:
    scheduler = made(pages=5)
    added(scheduler, 8, 4)
    large, small = added(scheduler, 16, 4), added(scheduler, 1, 4)
    run(scheduler, 2)
    assert (large.state, small.state) == ("waiting", "waiting")


def test_one_sequence_may_fill_the_pool() -> None:
    scheduler = made(pages=5, page_tokens=4)
    sequence = added(scheduler, 7, 14)
    run(scheduler, 14)
    assert len(sequence.tokens) == sequence.end
    assert scheduler.pool.available == 0
    assert scheduler.preemptions == 0


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_the_last_of_the_least_important_gives_up_its_pages(preemption: str) -> None:
    scheduler = made(pages=6, host_pages=9, preemption=preemption, max_step_tokens=32)
    early, important, late = added(scheduler, 7, 9), added(scheduler, 7, 9, priority=-1), added(scheduler, 7, 9)
    run(scheduler)
    assert scheduler.pool.available == 0
    run(scheduler)
    table = list(late.pages)
    step = run(scheduler)
    assert late.state == "waiting"
    assert late.slot == -1
    assert (early.state, important.state) == ("decode", "decode")
    assert scheduler.preemptions == 1
    if preemption == "swap":
        assert [page for page, _ in step.swap_out] == table
        assert late.computed == 8
    else:
        assert not step.swap_out
        assert late.computed == 0
    scheduler.finish(early)
    assert len(late.tokens) == 9
    step = run(scheduler)
    assert chunks(step)[-1] == (("s2", 8, 1, 1) if preemption == "swap" else ("s2", 0, 9, 1))
    assert len(step.swap_in) == (2 if preemption == "swap" else 0)
    assert len(late.pages) == 3
    assert scheduler.pool.available_host == 9


def test_who_comes_last_is_chosen_among_those_without_a_chunk() -> None:
    running = Running(4)
    sequences = [Sequence(key, [0], 1) for key in range(4)]
    for sequence, order in zip(sequences, [(1, 0), (0, 1), (0, 2), (0, 3)], strict=True):
        sequence.order = order
        running.start(sequence)
    low, first, second, third = sequences
    for sequence in (second, first):
        running.decodes(sequence)
    assert running.decode == [first, second]
    assert running.last(decoding=True) is running.last(decoding=False) is low
    running.stop(low)
    running.decodes(third)
    running.start(low)
    low.order = (-1, 0)
    assert running.last(decoding=True) is third
    assert running.last(decoding=False) is low


def test_swapping_falls_back_to_computing_again() -> None:
    scheduler = made(pages=4, host_pages=1, preemption="swap")
    added(scheduler, 7, 9)
    late = added(scheduler, 7, 9)
    run(scheduler, 3)
    assert (late.state, late.computed, late.host_pages) == ("waiting", 0, [])
    assert scheduler.pool.available_host == 1


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    scheduler = made(pages=4)
    added(scheduler, 7, 9)
    added(scheduler, 7, 9)
    run(scheduler, 2)
    small = added(scheduler, 1, 1, priority=-1)
    step = run(scheduler)
    assert scheduler.preemptions == 1
    assert small.state == "waiting"
    assert len(step.chunks) == 1


def test_what_was_preempted_goes_before_those_who_came_later() -> None:
    scheduler = made(pages=4)
    first, second = added(scheduler, 7, 9), added(scheduler, 7, 9)
    third = added(scheduler, 1, 1)
    run(scheduler, 3)
    assert second.state == "waiting"
    scheduler.finish(first)
    step = scheduler.schedule()
    assert step.admitted == [second, third]


def test_whoever_is_aborted_gives_its_pages_back_at_once() -> None:
    scheduler = made(pages=4, max_sequences=1)
    running, waiting = added(scheduler, 8, 9), added(scheduler, 8, 9)
    step = scheduler.schedule()
    assert (running.state, waiting.state) == ("decode", "waiting")
    scheduler.finish(running)
    scheduler.finish(waiting)
    scheduler.finish(waiting)
    assert scheduler.pool.used == 0
    assert scheduler.idle
    scheduler.update(step, [[1]])
    assert len(running.tokens) == 8


def test_a_sequence_may_end_while_it_is_preempted() -> None:
    scheduler = made(pages=4, host_pages=4, preemption="swap")
    added(scheduler, 7, 9)
    late = added(scheduler, 7, 9)
    run(scheduler)
    step = scheduler.schedule()
    scheduler.schedule()
    assert late.host_pages
    scheduler.update(step, [[1], [2]])
    assert late.tokens[-1] == 2
    scheduler.finish(late)
    assert scheduler.pool.available_host == 4


def test_what_can_never_run_is_refused_with_all_reasons() -> None:
    scheduler = made(pages=2, page_tokens=4, longest=20)
    assert scheduler.reasons(8, 1) == []
    with pytest.raises(ValueError, match=r"a sequence has 20 at most; 39 tokens do not fit the 2 pages of 4 tokens"):
        added(scheduler, 19, 20)
    with pytest.raises(ValueError, match="both have to be at least 1"):
        added(scheduler, 0, 1)
    assert scheduler.idle
    with pytest.raises(ValueError, match="a token for each"):
        Settings(8, 7, 100)
    with pytest.raises(ValueError, match='has to be "recompute" or "swap"'):
        Settings(8, 8, 100, "copy")  # type: ignore[arg-type]
