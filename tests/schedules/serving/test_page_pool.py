"""Pages are handed out once, counted, found by content, and evicted in the right order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.schedules.serving import NULL_PAGE, PagePool
from shardwise.schedules.serving.pages import page_digest


def chain(pool: PagePool, pages: list[int], name: str) -> list[bytes]:
    """Cache pages as those of one sequence."""
    digests = [b""]
    for page, letter in zip(pages, name, strict=True):
        digests.append(page_digest(digests[-1], [ord(letter)]))
        pool.cache(page, digests[-1], digests[-2])
    return digests[1:]


def test_every_page_but_the_null_page_is_handed_out_once() -> None:
    pool = PagePool(10, 4)
    taken = pool.take(9)
    assert sorted(taken) == list(range(1, 10))
    assert NULL_PAGE not in taken
    assert (pool.available, pool.used) == (0, 9)
    with pytest.raises(RuntimeError, match="no page is available"):
        pool.take(1)
    with pytest.raises(RuntimeError, match="host pages"):
        pool.take_host(1)
    with pytest.raises(ValueError, match="page 0 is not used"):
        PagePool(1, 4)


def test_pages_that_nobody_used_are_listed_nowhere() -> None:
    most = 10**15  # a list of them fits no machine
    pool = PagePool(most, 16, host_pages=most)
    assert (pool.available, pool.available_host) == (most - 1, most)
    first, hosts = pool.take(3), pool.take_host(2)
    assert (first, hosts) == ([1, 2, 3], [0, 1])
    assert (pool.used, pool.available_host) == (3, most - 2)
    pool.release([2])
    pool.release_host([0])
    assert (pool.take(2), pool.take_host(2)) == ([2, 4], [0, 2])
    pool.clear()
    assert (pool.used, pool.available_host) == (4, most - 3)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40))
def test_the_page_released_last_is_taken_first_and_new_ones_last(turns: list[tuple[bool, int]]) -> None:
    pool, free, free_host = PagePool(13, 1, host_pages=12), list(range(12, 0, -1)), list(range(11, -1, -1))
    held: list[int] = []
    for takes, count in turns:
        if takes:
            count = min(count, len(free))
            pages, hosts = pool.take(count), pool.take_host(count)
            assert pages == [free.pop() for _ in pages]
            assert hosts == [free_host.pop() for _ in hosts]
            assert [page - 1 for page in pages] == hosts
            held += pages
        else:
            back, held = held[:count], held[count:]
            pool.release(back)
            pool.release_host(page - 1 for page in back)
            free += back
            free_host += (page - 1 for page in back)
        assert (pool.available, pool.available_host) == (len(free), len(free_host))


def test_a_shared_page_is_free_when_the_last_lets_go() -> None:
    pool = PagePool(3, 4)
    [page] = pool.take(1)
    pool.share(page)
    pool.release([page])
    assert pool.used == 1
    pool.release([page])
    assert pool.used == 0


def test_content_is_the_tokens_of_a_page_and_all_before_it() -> None:
    assert page_digest(b"", [1, 2]) == page_digest(b"", [1, 2])
    different = {
        page_digest(b"", [1, 2]),
        page_digest(b"salt", [1, 2]),
        page_digest(b"", [2, 1]),
        page_digest(b"", [513]),
    }
    assert len(different) == 4


def test_what_nobody_holds_is_found_until_its_room_is_needed() -> None:
    pool = PagePool(4, 1)
    pages = pool.take(2)
    digests = chain(pool, pages, "ab")
    pool.release(reversed(pages))
    assert (pool.available, pool.cached) == (3, 2)
    pool.share(pages[0])
    assert (pool.available, pool.find(digests[0])) == (2, pages[0])
    assert pool.take(1) != [pages[1]]  # a free page goes before a cached one
    assert pool.take(1) == [pages[1]]
    assert pool.find(digests[1]) is None
    assert pool.find(digests[0]) == pages[0]
    assert pool.cached == 1


def test_the_least_recently_used_goes_first_and_leaves_before_their_prefixes() -> None:
    pool = PagePool(7, 1)
    old, new = pool.take(3), pool.take(3)
    chain(pool, old, "abc")
    chain(pool, new, "xyz")
    pool.release(reversed(old))
    pool.release(reversed(new))
    assert pool.take(4) == [old[2], old[1], old[0], new[2]]


def test_a_prefix_outlives_a_leaf_that_was_used_later() -> None:
    pool = PagePool(4, 1)
    first, second, leaf = pool.take(3)
    a, _ = chain(pool, [first, leaf], "ab")
    pool.cache(second, a, b"")  # the same content twice: the page known first stays
    assert pool.find(a) == first
    pool.release([first])
    pool.release([leaf, second])
    assert pool.take(3) == [second, leaf, first]


def test_a_prefix_of_a_page_in_use_is_the_last_resort() -> None:
    pool = PagePool(4, 1)
    pages = pool.take(3)
    digests = chain(pool, pages, "abc")
    pool.release(pages[:2])
    assert pool.take(2) == [pages[0], pages[1]]
    assert [pool.find(digest) for digest in digests] == [None, None, pages[2]]
    pool.release([pages[2]])
    pool.forget(pages[2])
    assert pool.cached == 0


def test_a_pinned_page_is_not_handed_out_before_the_step_is_made() -> None:
    pool = PagePool(3, 1)
    source, other = pool.take(2)
    pool.pin(source)
    pool.release([source, other])
    assert pool.take(pool.available) == [other]
    pool.unpin()
    assert pool.take(1) == [source]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_leaf_is_evicted_as_long_as_there_is_one(data: st.DataObject) -> None:
    """Sequences over two letters come and go, share what is found, and sometimes compute what another has."""
    pool = PagePool(data.draw(st.integers(6, 14)), 1)
    content: dict[int, str] = {}
    held: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 40))):
        if held and data.draw(st.booleans()):
            pool.release(reversed(held.pop(data.draw(st.integers(0, len(held) - 1)))))
            continue
        name = data.draw(st.text("ab", min_size=1, max_size=4))
        pages: list[int] = []
        digest, blind = b"", data.draw(st.booleans())
        for at in range(len(name)):
            before, digest = digest, page_digest(digest, [ord(name[at])])
            page = None if blind else pool.find(digest)
            if page is None:
                if not pool.available:
                    break
                cached = {text: page for page, text in content.items() if pool.find(digest_of(text)) == page}
                idle = {text for text, page in cached.items() if not pool.counts[page]}
                leaves = {text for text in idle if not any(other[:-1] == text for other in cached)}
                [page] = pool.take(1)
                evicted = content.get(page, "")
                if evicted in idle and cached[evicted] == page:
                    assert evicted in leaves or not leaves
                content[page] = name[: at + 1]
                pool.cache(page, digest, before)
            else:
                assert content[page] == name[: at + 1]
                pool.share(page)
            pages.append(page)
        held.append(pages)
    for pages in held:
        pool.release(reversed(pages))
    assert pool.available == pool.pages - 1


def digest_of(text: str) -> bytes:
    digest = b""
    for letter in text:
        digest = page_digest(digest, [ord(letter)])
    return digest
