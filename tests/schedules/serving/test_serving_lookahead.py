"""Steps scheduled before the last is known, and drafts, in cases small enough to write down."""

from __future__ import annotations

import pytest
from small_cases import added, chunks, made, run


def test_the_next_token_is_scheduled_before_the_last_is_known() -> None:
    scheduler = made()
    sequence = added(scheduler, 3, 3)
    first = scheduler.schedule()
    assert sequence.pending == 1
    second = scheduler.schedule()
    assert chunks(second) == [("s0", 3, 1, 1)]
    assert sequence.pending == 2
    with pytest.raises(RuntimeError, match="2 steps are under way"):
        scheduler.schedule()
    with pytest.raises(RuntimeError, match="in the order"):
        scheduler.update(second, [[5]])
    scheduler.update(first, [[4]])
    assert (sequence.tokens, sequence.pending) == ([0, 1, 2, 4], 1)
    third = scheduler.schedule()
    assert chunks(third) == [("s0", 4, 1, 1)]
    scheduler.update(second, [[5]])
    assert scheduler.schedule().chunks == []  # its last token is under way
    scheduler.update(third, [[6]])
    assert sequence.tokens == [0, 1, 2, 4, 5, 6]


def test_a_sequence_may_ask_to_know_its_tokens_first() -> None:
    scheduler = made()
    added(scheduler, 3, lookahead=False)
    first = scheduler.schedule()
    assert scheduler.schedule().chunks == []
    scheduler.update(first, [[1]])
    assert chunks(scheduler.schedule()) == [("s0", 3, 1, 1)]


def test_a_token_under_way_is_waited_for_before_its_sequence_comes_back() -> None:
    scheduler = made(pages=4, max_sequences=2)
    patient, late = added(scheduler, 7, 9, lookahead=False), added(scheduler, 7, 9)
    run(scheduler)
    step = scheduler.schedule()
    assert len(step.chunks) == 2
    assert scheduler.schedule().chunks == []  # one waits to know, the other is preempted at the edge of its page
    assert (late.state, late.pending) == ("waiting", 1)
    scheduler.finish(patient)
    assert scheduler.schedule().chunks == []
    scheduler.update(step, [[1], [2]])
    assert chunks(scheduler.schedule()) == [("s1", 0, 9, 1)]


def test_drafts_are_verified_and_rejected_ones_are_computed_again() -> None:
    scheduler = made()
    sequence = added(scheduler, 3, 20)
    run(scheduler)
    sequence.drafts = [1, 2, 3]
    step = scheduler.schedule()
    assert chunks(step) == [("s0", 3, 4, 4)]
    assert scheduler.schedule().chunks == []  # how far it got is not known yet
    scheduler.update(step, [[1, 9]])
    assert sequence.tokens == [0, 1, 2, 7, 1, 9]
    assert (sequence.computed, sequence.drafts, sequence.pending) == (5, [], 0)
    assert chunks(run(scheduler)) == [("s0", 5, 1, 1)]


def test_drafts_stay_within_the_budget_the_end_and_the_pages() -> None:
    scheduler = made(max_sequences=2, max_step_tokens=6)
    one, two = added(scheduler, 2, 5), added(scheduler, 2, 50)
    run(scheduler)
    one.drafts, two.drafts = [1] * 9, [1] * 9
    step = scheduler.schedule()
    assert [chunk.count for chunk in step.chunks] == [4, 2]  # one token to end with, and the rest of the budget
    assert len(one.drafts) == 3
    scheduler = made(pages=1)
    one = added(scheduler, 2, 3)
    run(scheduler)
    one.drafts = [1]
    assert chunks(scheduler.schedule()) == [("s0", 2, 2, 2)]
    scheduler = made(pages=2)
    one, two = added(scheduler, 2, 3), added(scheduler, 2, 6)
    run(scheduler)
    two.drafts = [1] * 5
    assert [chunk.count for chunk in scheduler.schedule().chunks] == [1, 1]  # rather none than preempt
    assert scheduler.preemptions == 0


def test_drafts_that_come_too_late_are_dropped() -> None:
    scheduler = made()
    sequence = added(scheduler, 3)
    scheduler.schedule()
    sequence.drafts = [1, 2]
    assert chunks(scheduler.schedule()) == [("s0", 3, 1, 1)]
    assert sequence.drafts == []


@pytest.mark.parametrize(("preemption", "computed"), [("recompute", 0), ("swap", 8)])
def test_drafts_may_be_judged_after_their_sequence_was_preempted(preemption: str, computed: int) -> None:
    scheduler = made(pages=5, host_pages=9, preemption=preemption)
    early, late = added(scheduler, 7, 9), added(scheduler, 7, 9)
    run(scheduler)
    late.drafts = [1, 2, 3, 4]
    step = scheduler.schedule()
    assert chunks(step) == [("s0", 7, 1, 1), ("s1", 7, 5, 5)]
    ahead = scheduler.schedule()
    assert chunks(ahead) == [("s0", 8, 1, 1)]
    assert late.drafts == []
    scheduler.update(step, [[1], [3]])
    assert (late.state, late.tokens[7:], late.computed) == ("waiting", [7, 3], computed)
    scheduler.finish(early)
    assert chunks(scheduler.schedule()) == [("s1", computed, 9 - computed, 1)]


def test_a_step_wants_the_samples_it_asked_for_once() -> None:
    scheduler = made()
    added(scheduler, 3)
    step = scheduler.schedule()
    with pytest.raises(ValueError, match="1 chunks of the step sample, but there are tokens for 2"):
        scheduler.update(step, [[1], [2]])
    scheduler.update(step, [[1]])
    with pytest.raises(RuntimeError, match="once each"):
        scheduler.update(step, [[1]])


def test_stages_have_their_shares_of_the_sequences_and_nobody_waits_for_long() -> None:
    scheduler = made(stages=3, max_sequences=8)
    sequences = [added(scheduler, 1, 100, lookahead=False) for _ in range(7)]
    run(scheduler)
    under_way = []
    for _ in range(60):
        step = scheduler.schedule()
        assert len(step.chunks) <= 3, "a third of seven, rounded up"
        if step.chunks:
            under_way.append(step)
        names = [chunk.sequence.key for each in under_way for chunk in each.chunks]
        assert len(set(names)) == len(names), "no sequence is in two steps"
        if len(under_way) == 3 or not step.chunks:
            done = under_way.pop(0)
            scheduler.update(done, [[7]] * done.sampling)
    made_tokens = [sequence.generated for sequence in sequences]
    assert max(made_tokens) - min(made_tokens) <= 2
    assert min(made_tokens) >= 15
