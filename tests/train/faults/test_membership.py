"""Who takes part in an exchange, decided without processes: threads ask, and die, in every order that matters."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from shardwise.run import UserError
from shardwise.train.faults.coordinator import Coordinator, Remote
from shardwise.train.faults.membership import Gone, Membership


class Replicas:
    """Replicas of one rank each that ask a membership."""

    def __init__(self, count: int, ranks: int = 1) -> None:
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.membership = Membership(count, ranks, lambda what, **values: self.said.append((what, values)))
        self.pool = ThreadPoolExecutor(16)
        self.starts = [0] * count

    def ask(self, replica: int, what: str, rank: int = 0, **values: Any) -> Future[dict[str, Any]]:
        """What a rank asks; it has reached the membership, or has its answer, when this returns."""
        reached = threading.Event()
        message = dict(what=what, replica=replica, start=self.starts[replica], rank=rank, **values)

        def work() -> dict[str, Any]:
            return self.membership.ask(message, reached.set)

        found = self.pool.submit(work)
        while not reached.wait(0.01) and not found.done():
            pass
        return found

    def arrive(self, *replicas: int, step: int = 4, last: bool = False, stop: bool = False) -> list[dict[str, Any]]:
        every = [self.ask(r, "arrive", step=step, last=last, stop=stop) for r in replicas]
        return [each.result(5) for each in every]

    def vote(self, *replicas: int, ok: bool = True) -> list[Future[dict[str, Any]]]:
        return [self.ask(r, "vote", ok=ok, problem="" if ok else "reset") for r in replicas]

    def die(self, replica: int) -> None:
        self.membership.leave(replica, self.starts[replica])
        self.starts[replica] += 1


@pytest.fixture
def three() -> Iterator[Replicas]:
    made = Replicas(3)
    began = [made.ask(r, "begin") for r in range(3)]
    assert [each.result(5)["source"] for each in began] == [-1, -1, -1]
    yield made
    for r in range(3):
        made.membership.give_up(r)
    made.pool.shutdown()


def test_those_that_are_left_go_on_when_one_dies_before_an_exchange(three: Replicas) -> None:
    waiting = [three.ask(r, "arrive", step=4, last=False, stop=False) for r in (0, 2)]
    assert not any(each.done() for each in waiting)
    three.die(1)
    assert [each.result(5)["members"] for each in waiting] == [[0, 2], [0, 2]]
    assert three.said == [("left", dict(replica=1, step=0, members=[0, 2]))]


def test_an_exchange_is_repeated_where_one_died_in_it(three: Replicas) -> None:
    before = three.arrive(0, 1, 2)[0]["generation"]
    votes = three.vote(0, 2, ok=False)
    three.die(1)
    answers = [each.result(5) for each in votes]
    assert [(a["commit"], a["members"]) for a in answers] == [(False, [0, 2])] * 2
    assert answers[0]["generation"] > before
    assert [each.result(5)["commit"] for each in three.vote(0, 2)] == [True, True]
    assert three.said[-1][1]["added"] == [0, 2]
    assert three.membership.reached == [4, -1, 4]


def test_sums_that_all_others_have_count_with_the_one_that_died_behind_them(three: Replicas) -> None:
    three.arrive(0, 1, 2)
    votes = three.vote(0, 2)
    three.die(1)
    assert all(each.result(5)["commit"] for each in votes)
    assert next(v for what, v in three.said if what == "exchange")["added"] == [0, 1, 2]


def test_a_group_is_made_anew_only_where_members_change(three: Replicas) -> None:
    generations = []
    for _ in range(3):
        generations.append(three.arrive(0, 1, 2)[0]["generation"])
        for each in three.vote(0, 1, 2):
            each.result(5)
    assert len(set(generations)) == 1


def test_one_that_comes_back_joins_behind_an_exchange_from_a_member(three: Replicas) -> None:
    three.die(1)
    comes = three.ask(1, "begin")
    assert not comes.done()
    three.arrive(0, 2)
    votes = [each.result(5) for each in three.vote(0, 2)]
    assert votes[0]["joined"] == {1: 0}
    assert votes[0]["members"] == [0, 1, 2]
    assert not comes.done()  # the member has not said that its state is there to be taken
    three.ask(0, "give").result(5)
    assert comes.result(5)["source"] == 0
    assert comes.result(5)["round"] == votes[0]["round"]
    assert three.ask(1, "received", ok=True).result(5) == {"has": True}
    assert [a["members"] for a in three.arrive(0, 1, 2)] == [[0, 1, 2]] * 3


@pytest.mark.parametrize("ready", [False, True])
def test_one_whose_giver_dies_waits_for_the_next_exchange(three: Replicas, ready: bool) -> None:
    three.die(1)
    comes = three.ask(1, "begin")
    three.arrive(0, 2)
    for each in three.vote(0, 2):
        each.result(5)
    if ready:
        three.ask(0, "give").result(5)
        comes.result(5)
    three.die(0)
    assert three.membership.writer == 2  # and not the one that joins, which has no records
    if ready:
        assert three.ask(1, "received", ok=False).result(5) == {"has": False}
        comes = three.ask(1, "begin")
    assert three.arrive(2)[0]["members"] == [2]
    assert three.vote(2)[0].result(5)["joined"] == {1: 2}
    three.ask(2, "give").result(5)
    assert comes.result(5)["source"] == 2


def test_nobody_joins_behind_the_last_step_or_a_stop(three: Replicas) -> None:
    three.die(1)
    three.ask(1, "begin")
    three.arrive(0, 2, stop=True)
    assert [each.result(5)["joined"] for each in three.vote(0, 2)] == [{}, {}]
    three.arrive(0, 2, last=True)
    answers = [each.result(5) for each in three.vote(0, 2)]
    assert [(a["joined"], a["stop"]) for a in answers] == [({}, False)] * 2


def test_one_writes_the_end_and_the_next_where_it_dies(three: Replicas) -> None:
    ends = [three.ask(r, "finish") for r in (1, 2)]
    assert three.ask(0, "finish").result(5) == {"write": True}
    assert not any(each.done() for each in ends)
    three.die(0)
    assert ends[0].result(5) == {"write": True}
    assert not ends[1].done()
    three.ask(1, "finished").result(5)
    assert ends[1].result(5) == {"write": False}
    assert three.membership.over


def test_where_all_died_all_begin_anew(three: Replicas) -> None:
    for r in range(3):
        three.die(r)
    three.membership.give_up(2)
    comes = [three.ask(r, "begin") for r in (0, 1)]
    answers = [each.result(5) for each in comes]
    assert [(a["source"], a["members"], a["era"], a["round"]) for a in answers] == [(-1, [0, 1], 2, 0)] * 2


def test_a_rank_of_an_earlier_start_is_refused(three: Replicas) -> None:
    late = three.ask(1, "arrive", step=4, last=False, stop=False)
    three.die(1)
    with pytest.raises(Gone):
        late.result(5)


def test_members_that_are_all_there_and_cannot_exchange_do_not_try_for_ever(three: Replicas) -> None:
    three.arrive(0, 1, 2)
    answers: list[dict[str, Any]] = []
    while not answers or "refused" not in answers[0]:
        answers = [each.result(5) for each in three.vote(0, 1, 2, ok=False)]
        assert three.membership.generation < 20
    assert "reset" in answers[0]["refused"]


def test_a_replica_asks_when_all_its_ranks_have() -> None:
    two = Replicas(2, ranks=2)
    first = [two.ask(0, "begin", rank) for rank in range(2)]
    half = two.ask(1, "begin", 0)
    assert not any(each.done() for each in first)
    two.ask(1, "begin", 1).result(5)
    assert {each.result(5)["source"] for each in [*first, half]} == {-1}
    two.pool.shutdown()


def test_a_machine_has_its_number_while_its_command_lives() -> None:
    with Coordinator(4, 1, lambda what, **values: None, machines=3) as coordinator:
        at = coordinator.address, coordinator.port
        others = [Remote(*at, machine=-1), Remote(*at, machine=-1)]
        assert [each.machine for each in others] == [1, 2]
        assert others[0].view() == coordinator.view()
        with pytest.raises(UserError, match="all machines of the run are at"):
            Remote(*at, machine=-1)
        others[0].close()
        while 1 in coordinator._claims:
            pass
        returned = Remote(*at, machine=-1)
        assert returned.machine == 1
        returned.give_up(3)
        assert coordinator.view()["starts"] == [0, 0, 0, -1]
        for each in (returned, others[1]):
            each.close()
