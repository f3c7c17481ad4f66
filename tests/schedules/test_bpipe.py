"""BPipe holds at most ceil((P + 2) / 2) microbatches on every rank, in the time of 1F1B, and hands over as its lists say."""

from __future__ import annotations

from collections import Counter

import pytest
from schedule_check import bubble

from shardwise.schedules import Cost, evictions, make_schedule, peak_activations, time


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7, 8, 12, 16])
@pytest.mark.parametrize("more", [-3, 0, 1, 9])
def test_memory_is_even_and_the_bubble_that_of_1f1b(ranks: int, more: int) -> None:
    microbatches = max(1, 2 * ranks + more)
    schedule, plain = (make_schedule(name, ranks, microbatches) for name in ("bpipe", "1f1b"))
    # Section 3 of the paper: 1F1B's P - r, and at most ceil((p + 2) / 2).
    most = -(-(ranks + 2) // 2)
    peaks, before = peak_activations(schedule), peak_activations(plain)
    for rank, (held, alone) in enumerate(zip(peaks, before, strict=True)):
        assert held <= most
        if 2 * rank < ranks:  # these evict what they have no room for
            assert held == min(alone, most)
        else:
            assert held >= alone
    for forward, backward in ((1, 1), (2, 3), (5, 2)):
        cost = Cost.even(ranks, forward, backward, backward)
        own = time(schedule, cost)
        assert own.makespan == time(plain, cost).makespan
        assert set(bubble(own)) == set(bubble(time(plain, cost)))
        # A transfer that takes no longer than a forward pass costs nothing, where that is the shorter one.
        if forward <= 2 * backward:
            assert time(schedule, cost, handing=forward).makespan == own.makespan


def test_transfers_that_take_longer_than_the_passes_beside_them_are_waited_for() -> None:
    schedule = make_schedule("bpipe", 8, 24)
    cost = Cost.even(8)
    spans = [time(schedule, cost, handing=seconds).makespan for seconds in (1, 2, 3)]
    assert spans[0] < spans[1] < spans[2]


@pytest.mark.parametrize("ranks", [2, 4, 5, 6, 9])
@pytest.mark.parametrize("microbatches", [1, 4, 9, 20])
def test_each_transfer_stands_in_the_lists_of_both_partners(ranks: int, microbatches: int) -> None:
    schedule = make_schedule("bpipe", ranks, microbatches)
    for rank, actions in enumerate(schedule.ranks):
        handed = [a for a in actions if a.kind in "EL"]
        partner = [a for a in schedule.ranks[ranks - 1 - rank] if a.kind in "EL"]
        assert Counter(handed) == Counter(partner)
        own = [a for a in handed if a.stage == rank]
        assert len(own) == 2 * evictions(ranks, rank, microbatches) if 2 * rank < ranks else not own
    # The newest is evicted: of four ranks the first holds three, and evicts every second microbatch at most.
    assert evictions(4, 0, 40) <= 20
