"""The pages of the KV cache: allocates them, counts the sequences that hold them, and finds those computed before.

A page holds the keys and values of `page_tokens` consecutive tokens of a sequence, anywhere in memory (PagedAttention, Kwon et al.
2023). Sequences with the same prefix share pages, which are reference-counted. A full page is identified by a digest of its tokens
and all before them; when no sequence holds it any more, it stays as it is until its memory is needed, so that a later sequence with
the same prefix finds it: the prefix cache. Page 0 is never allocated: tokens that only pad a batch are written there.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import sha256

NULL_PAGE = 0


def page_digest(previous: bytes, tokens: Sequence[int]) -> bytes:
    """Identifies a page by content: its tokens and the digest of the page before it. The first page of a sequence follows its salt.
    The digest is cryptographic, because anyone who could make two prompts collide would be answered from another's keys and
    values."""
    return sha256(previous + array("q", tokens).tobytes()).digest()


class PagePool:
    """Pages of a device and of its host, by number. `pages` includes page 0.

    Pages that were never allocated are the last ones taken, in order, and are listed nowhere: a small model has millions of pages
    and uses few of them."""

    def __init__(self, pages: int, page_tokens: int, host_pages: int = 0, prefix_cache: bool = True) -> None:
        if pages < 2 or page_tokens < 1 or host_pages < 0:
            raise ValueError(
                f"{pages} pages of {page_tokens} tokens and {host_pages} of the host: at least 2, as page 0 is not used, 1 and 0"
            )
        self.pages, self.page_tokens, self.host_pages, self.prefix_cache = pages, page_tokens, host_pages, prefix_cache
        self.leaves_first = True
        """Do not evict a page that a cached page follows, since that one would not be found without it; with a sliding window it
        would be."""
        self.counts = [0]
        """How many sequences hold each page that was ever allocated."""
        self.queried_tokens = 0
        self.found_tokens = 0
        """Tokens that admitted sequences looked up in the prefix cache, and how many of them were found."""
        self._free: list[int] = []  # allocated before
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached and held by no sequence, least recently used first
        self._pinned: set[int] = set()
        self._digests = [b""]  # of each cached page
        self._parents = [b""]
        self._cached: dict[bytes, int] = {}
        self._children: dict[bytes, int] = {}  # number of cached pages that follow the page of this digest
        self._free_host: list[int] = []  # allocated before
        self._first_host = 0  # the first that was never allocated

    @property
    def available(self) -> int:
        """Pages that can be allocated now, some by evicting them."""
        return len(self._free) + len(self._idle) + self.pages - len(self.counts)

    @property
    def used(self) -> int:
        """Pages that are held."""
        return self.pages - 1 - self.available

    @property
    def cached(self) -> int:
        """Pages that the prefix cache knows, held or not."""
        return len(self._cached)

    @property
    def available_host(self) -> int:
        """Free pages of the host."""
        return len(self._free_host) + self.host_pages - self._first_host

    def take(self, count: int) -> list[int]:
        """Allocate this many pages, no more than are available. Pages that are not in the prefix cache go first."""
        taken = [self._free.pop() if self._free else self._next() for _ in range(count)]
        for page in taken:
            self.counts[page] = 1
        return taken

    def share(self, page: int) -> None:
        """One more sequence holds this page."""
        if not self.counts[page]:
            self._idle.pop(page, None)
        self.counts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One sequence less holds each of these. Pass the last pages of a sequence first: they are evicted in the order given."""
        counts, pinned = self.counts, self._pinned
        for page in pages:
            counts[page] = left = counts[page] - 1
            if not left and page not in pinned:
                self._retire(page)

    def pin(self, page: int) -> None:
        """Do not allocate this page before `unpin`, even if no sequence holds it: the step being made copies from it, after other
        pages have already been written."""
        self._pinned.add(page)

    def unpin(self) -> None:
        """The step is made: its pages may be allocated in the next."""
        if self._pinned:
            pinned, self._pinned = self._pinned, set()
            for page in pinned:
                if not self.counts[page]:
                    self._retire(page)

    def cache(self, page: int, digest: bytes, parent: bytes) -> None:
        """The page is full: its content can be found from now on, unless another page with the same content is cached."""
        if digest in self._cached or self._digests[page]:
            return
        self._cached[digest] = page
        self._digests[page] = digest
        self._parents[page] = parent
        self._children[parent] = self._children.get(parent, 0) + 1

    def find(self, digest: bytes) -> int | None:
        """The cached page with this content."""
        return self._cached.get(digest)

    def forget(self, page: int) -> None:
        """Remove the page from the prefix cache, because something else will be written to it."""
        digest, parent = self._digests[page], self._parents[page]
        if digest:
            del self._cached[digest]
            self._digests[page] = self._parents[page] = b""
            left = self._children[parent] - 1
            if left:
                self._children[parent] = left
            else:
                del self._children[parent]

    def clear(self) -> None:
        """Remove all pages from the prefix cache: the weights that they were computed with have changed."""
        for page in range(1, len(self.counts)):
            self.forget(page)
        self._free += reversed(self._idle)
        self._idle.clear()

    def take_host(self, count: int) -> list[int]:
        """Allocate this many host pages, no more than are available."""
        free, first = self._free_host, self._first_host
        again = min(count, len(free))
        if first + count - again > self.host_pages:
            raise RuntimeError("too few host pages are available: ask `available_host` before taking any")
        self._first_host += count - again
        return [free.pop() for _ in range(again)] + list(range(first, self._first_host))

    def release_host(self, pages: Iterable[int]) -> None:
        """Free these host pages."""
        self._free_host.extend(pages)

    def _retire(self, page: int) -> None:
        if self._digests[page]:
            self._idle[page] = None
        else:
            self._free.append(page)

    def _next(self) -> int:
        """The first page that was never allocated; if there is none, one that is evicted."""
        page = len(self.counts)
        if page == self.pages:
            return self._evict()
        self.counts.append(0)
        self._digests.append(b"")
        self._parents.append(b"")
        return page

    def _evict(self) -> int:
        """The least recently used page that no cached page follows. Mostly that is the first: a sequence also holds the pages
        before its own, and releases its last page first. It is not the first where two sequences computed the same page at once and
        only one copy is cached: such a page is as recently used as the pages that follow it, and goes to the end."""
        idle = self._idle
        if not idle:
            raise RuntimeError("no page is available: ask `available` before taking any")
        page = next(iter(idle))
        for _ in range(len(idle) if self.leaves_first else 0):
            if self._digests[page] not in self._children:
                break
            idle.move_to_end(page)
            page = next(iter(idle))
        del idle[page]
        self.forget(page)
        return page
