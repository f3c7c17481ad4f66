"""Who goes next: priorities, then users by the service they had, then arrival; nobody starves and nobody saves up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count
from random import Random

import pytest
from small_cases import added, made, run, service_of

from shardwise.schedules.serving import Scheduler, Sequence, Settings
from shardwise.schedules.serving.queues import REMEMBERED_USERS, WaitingQueue


@pytest.fixture
def arrivals() -> Iterator[int]:
    return count()


def put(queue: WaitingQueue, arrival: int, user: str = "", priority: int = 0) -> Sequence:
    sequence = Sequence(arrival, [0], 1, priority, user)
    sequence.arrival, sequence.order = arrival, (priority, arrival)
    queue.add(sequence)
    return sequence


def served(queue: WaitingQueue, tokens: int) -> str:
    """Let the next have so many tokens, and go."""
    head = queue.head()
    assert head is not None
    queue.remove(head)
    head.prompt = head.computed = tokens
    queue.charge(head)
    queue.leave(head)
    return head.user


def test_priority_goes_before_service_and_service_before_arrival(arrivals: Iterator[int]) -> None:
    queue = WaitingQueue()
    for user, priority in (("a", 1), ("a", 0), ("a", 0), ("b", 0), ("b", 1)):
        put(queue, next(arrivals), user, priority)
    order = []
    while head := queue.head():
        order.append((head.key, head.user, head.priority))
        served(queue, 10)
    assert order == [(1, "a", 0), (3, "b", 0), (2, "a", 0), (4, "b", 1), (0, "a", 1)]
    assert len(queue) == 0


def test_what_was_preempted_is_next_of_its_priority(arrivals: Iterator[int]) -> None:
    queue = WaitingQueue()
    late, early = put(queue, 5, "a"), put(queue, 3, "b")
    put(queue, 1, "c")
    urgent = put(queue, 9, "d", priority=-1)
    for sequence in (late, early):
        queue.remove(sequence)
        queue.put_back(sequence)
    assert queue.head() is urgent
    queue.remove(urgent)
    assert queue.head() is early
    queue.remove(early)
    assert queue.head() is late
    assert len(queue) == 2


def test_two_users_get_the_same_however_much_one_asks(arrivals: Iterator[int]) -> None:
    queue = WaitingQueue()
    for _ in range(200):
        put(queue, next(arrivals), "greedy")
    for _ in range(20):
        put(queue, next(arrivals), "modest")
    turns = Counter(served(queue, 10) for _ in range(40))
    assert turns == {"greedy": 20, "modest": 20}


def test_a_pause_is_no_credit(arrivals: Iterator[int]) -> None:
    queue = WaitingQueue()
    for _ in range(50):
        put(queue, next(arrivals), "busy")
    for _ in range(30):
        served(queue, 100)
    for _ in range(50):
        put(queue, next(arrivals), "newcomer")
    turns = Counter(served(queue, 100) for _ in range(20))
    assert turns == {"busy": 10, "newcomer": 10}


def test_generated_tokens_count_twice_and_computing_again_not_at_all() -> None:
    queue = WaitingQueue()
    sequence = put(queue, 0, "a")
    sequence.prompt = 10
    for computed, service in ((6, 6), (12, 14), (0, 14), (12, 14), (13, 16)):
        sequence.computed = computed
        queue.charge(sequence)
        assert service_of(queue, "a") == service


def test_the_next_is_always_the_one_a_sort_would_choose() -> None:
    """Against sorting everything each time; users come and go, and wait in several priorities."""
    for seed in range(30):
        draw, queue, alive = Random(seed), WaitingQueue(), []
        for arrival in range(200):
            event = draw.random()
            if event < 0.5:
                alive.append(put(queue, arrival, draw.choice("abcd"), draw.choice((0, 0, 1))))
            elif alive and event < 0.6:
                gone = alive.pop(draw.randrange(len(alive)))
                queue.remove(gone)
                queue.leave(gone)
            elif alive:
                best = min(alive, key=lambda s: (s.priority, service_of(queue, s.user), s.arrival))
                assert queue.head() is best
                alive.remove(best)
                served(queue, draw.randint(1, 50))
            assert len(queue) == len(alive)
        assert (queue.head() is None) == (not alive)


def test_users_who_are_gone_are_forgotten_in_time() -> None:
    queue = WaitingQueue()
    for number in range(3 * REMEMBERED_USERS):
        put(queue, number, f"user {number}")
        served(queue, 5)
    assert len(queue._gone) == REMEMBERED_USERS
    assert not queue._users
    assert not queue._classes or queue.head() is None


def test_service_stays_even_between_users_of_different_habits() -> None:
    """Everyone always has more to ask; one asks three times as often, for long answers to long prompts."""
    scheduler = made(pages=200, max_sequences=4, max_step_tokens=32)
    live: list[Sequence] = []
    for _ in range(1500):
        while scheduler.waiting < 6:
            for user, prompt, new in (("long", 60, 40), ("long", 60, 40), ("long", 60, 40), ("short", 10, 10)):
                live.append(added(scheduler, prompt, new, user=user))
        run(scheduler)
        for sequence in [s for s in live if len(s.tokens) == s.end]:
            scheduler.finish(sequence)
            live.remove(sequence)
    long, short = (service_of(scheduler._waiting, user) for user in ("long", "short"))
    assert abs(long - short) <= 2 * 4 * (60 + 2 * 40)  # the paper's bound: twice what may run at once
    assert min(long, short) > 10_000


def test_least_important_sequences_starve_only_while_others_want_everything() -> None:
    scheduler = Scheduler(Settings(2, 16, 100), made().pool)
    low = added(scheduler, 4, 4, priority=9)
    high = [added(scheduler, 4, 4) for _ in range(6)]
    while low.state == "waiting":
        run(scheduler)
        for sequence in [s for s in high if len(s.tokens) == s.end]:
            scheduler.finish(sequence)
            high.remove(sequence)
    assert len(high) <= 1
