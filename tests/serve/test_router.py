"""Requests go where their prefix is cached, as long as nobody has much more to do than the others."""

from __future__ import annotations

import random

import pytest

from shardwise.serve.router import MOST, Router


def test_equal_prefixes_go_to_one_replica() -> None:
    router = Router(3, page_tokens=4, pages=100)
    draw = random.Random(0)
    prefixes = [tuple(draw.randrange(50) for _ in range(16)) for _ in range(6)]
    places: dict[int, set[int]] = {}
    for _ in range(60):
        number = draw.randrange(6)
        replica = router.choose(prefixes[number] + tuple(draw.randrange(50) for _ in range(3)))
        places.setdefault(number, set()).add(replica)
        router.ended(replica)
    assert all(len(found) == 1 for found in places.values())
    assert len(set.union(*places.values())) == 3, "each replica has some of them"


def test_a_longer_prefix_counts_more() -> None:
    router = Router(2, page_tokens=2, pages=100)
    first = router.choose((1, 2, 3, 4))
    router.under_way = [0, 0]
    router.known[1 - first].update(dict.fromkeys(router._digests((1, 2, 3, 4, 5, 6))))
    assert router.choose((1, 2, 3, 4, 5, 6, 7)) == 1 - first


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_a_prefix_that_all_have_does_not_overload_one(replicas: int) -> None:
    """At every moment nobody has more than 5/4 of an even share, whoever ends when."""
    router, draw, open_ = Router(replicas, page_tokens=4, pages=100), random.Random(replicas), []
    for _ in range(2000):
        if open_ and draw.random() < 0.45:
            router.ended(open_.pop(draw.randrange(len(open_))))
            continue
        before = sum(router.under_way)
        open_.append(router.choose((1, 2, 3, 4, 5, 6, 7, 8, draw.randrange(50))))
        assert router.under_way[open_[-1]] <= -(-(before + 1) * MOST // replicas)
    assert sum(router.under_way) == len(open_)


def test_many_answers_of_one_request_count_each() -> None:
    router = Router(2, page_tokens=4, pages=100)
    first = router.choose((1, 2, 3), answers=5)
    assert [router.choose((n,)) for n in range(4)] == [1 - first] * 4


def test_no_more_is_remembered_than_a_replica_has_pages() -> None:
    router = Router(1, page_tokens=1, pages=8)
    router.choose((1, 2, 3, 4))
    router.choose((5, 6, 7, 8, 9, 10))
    assert len(router.known[0]) == 8
    assert router._found(0, router._digests((1, 2, 3, 4))) == 2, "the end of a prompt is forgotten first"
    off = Router(2, page_tokens=1, pages=8, prefix_cache=False)
    assert {off.choose((1, 2, 3)) for _ in range(2)} == {0, 1}
    assert not off.known[0]
