"""Pages shared by forks, and pages behind a sliding window."""

from __future__ import annotations

import pytest
from small_cases import added, chunks, made, run

from shardwise.schedules.serving import GIVEN_BACK


def test_pages_behind_the_window_are_given_back() -> None:
    scheduler = made(pages=4, page_tokens=4, window=6, max_sequences=1, max_step_tokens=8)
    sequence = added(scheduler, 30, 30)
    while len(sequence.tokens) < sequence.end:
        run(scheduler)
        kept = [page for page in sequence.pages if page != GIVEN_BACK]
        assert len(kept) <= 4
    assert len(sequence.pages) == 15
    assert sequence.pages[:11] == [GIVEN_BACK] * 11
    assert scheduler.preemptions == 0


def test_a_fork_copies_the_page_it_writes_to_and_shares_the_rest() -> None:
    scheduler = made(page_tokens=4)
    parent = added(scheduler, 10)
    run(scheduler)
    child = scheduler.fork(parent, "fork")
    assert child.pages == parent.pages
    assert scheduler.pool.used == 3
    step = run(scheduler)
    assert chunks(step) == [("s0", 10, 1, 1), ("fork", 9, 1, 1)]  # the last token again, for a sample of its own
    assert step.copies == [(parent.pages[2], child.pages[2])]
    assert child.pages[:2] == parent.pages[:2]
    assert run(scheduler).copies == []
    scheduler.finish(parent)
    assert scheduler.pool.used == 3


def test_a_fork_with_a_sample_begins_behind_the_prompt() -> None:
    scheduler = made(page_tokens=4)
    parent = added(scheduler, 8)
    run(scheduler)
    child = scheduler.fork(parent, "fork", sampled=[5])
    step = run(scheduler)
    assert chunks(step)[-1] == ("fork", 8, 1, 1)
    assert step.copies == []  # at the edge of a page
    assert child.tokens == [*range(8), 5, 7]
    assert child.end == parent.end


def test_a_fork_of_what_has_ended_is_computed_like_any_other() -> None:
    scheduler = made()
    parent = added(scheduler, 10)
    run(scheduler)
    scheduler.finish(parent)
    scheduler.fork(parent, "fork")
    assert chunks(run(scheduler)) == [("fork", 0, 10, 1)]
    with pytest.raises(ValueError, match="a fork after 3 tokens"):
        scheduler.fork(parent, "other", length=3)


def test_forks_that_wait_lose_their_pages_before_anyone_is_preempted() -> None:
    scheduler = made(pages=3, page_tokens=4, max_sequences=1)
    parent = added(scheduler, 7, 6)
    run(scheduler)
    child = scheduler.fork(parent, "fork")
    scheduler.finish(parent)
    other = added(scheduler, 5, 6, priority=-1)
    run(scheduler)
    assert (other.state, scheduler.preemptions) == ("decode", 0)
    assert (child.state, child.computed, child.pages) == ("waiting", 0, [])
    scheduler.finish(other)
    assert chunks(run(scheduler)) == [("fork", 0, 7, 1)]


def test_the_cache_forgets_a_page_that_a_fork_writes_to() -> None:
    scheduler = made(page_tokens=4, cache=True)
    parent = added(scheduler, 6)
    run(scheduler, 4)  # its second page is full, of two tokens of the prompt and two generated
    child = scheduler.fork(parent, "fork")
    scheduler.finish(parent)
    assert scheduler.pool.find(parent.digests[1]) == child.pages[1]
    step = run(scheduler)
    assert chunks(step) == [("fork", 5, 1, 1)]
    assert step.copies == []  # nobody else holds the page
    assert scheduler.pool.find(parent.digests[0]) == child.pages[0]
    assert scheduler.pool.find(parent.digests[1]) is None


def test_what_rejected_drafts_would_have_put_behind_the_window_is_not_given_back() -> None:
    scheduler = made(pages=6, page_tokens=2, host_pages=9, window=4, preemption="swap")
    early, late = added(scheduler, 3, 9), added(scheduler, 7, 9)
    run(scheduler)
    late.drafts = [1, 2, 3, 4]
    step = scheduler.schedule()
    assert chunks(step) == [("s0", 3, 1, 1), ("s1", 7, 5, 5)]
    scheduler.schedule()
    assert (late.state, late.given_back, len(late.host_pages)) == ("waiting", 2, 4)  # 5, 6 and 7 are seen from 8
    scheduler.update(step, [[1], [3]])
    scheduler.finish(early)
    step = scheduler.schedule()
    assert chunks(step) == [("s1", 8, 1, 1)]
    assert late.pages[:2] == [GIVEN_BACK, GIVEN_BACK]
    assert [page for _, page in step.swap_in] == late.pages[2:4]
