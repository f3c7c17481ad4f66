"""The pages of key/value memory: who hands them out, counts who holds them, and finds those computed before.

A page holds the keys and values of `page_tokens` consecutive tokens of a sequence, anywhere in memory (PagedAttention, Kwon et al.
2023). Sequences that begin alike share pages, which are counted. A full page is known by a digest of its tokens and all before
them; when nobody holds it any more it stays as it is until its room is needed, so that a later sequence that begins alike finds it:
the prefix cache. Page 0 is never handed out: what is computed only to fill up a batch is written there.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import sha256

NULL_PAGE = 0


def page_digest(previous: bytes, tokens: Sequence[int]) -> bytes:
    """What identifies a page by content: its tokens and the digest of the page before it. The first page of a sequence follows its
    salt. Cryptographic, because whoever could make two prompts collide would be answered from another's keys and values."""
    return sha256(previous + array("q", tokens).tobytes()).digest()


class PagePool:
    """Pages of a device and of its host, by number. `pages` counts page 0 too."""

    def __init__(self, pages: int, page_tokens: int, host_pages: int = 0, prefix_cache: bool = True) -> None:
        if pages < 2 or page_tokens < 1 or host_pages < 0:
            raise ValueError(
                f"{pages} pages of {page_tokens} tokens and {host_pages} of the host: at least 2, as page 0 is not used, 1 and 0"
            )
        self.pages = pages
        self.page_tokens = page_tokens
        self.host_pages = host_pages
        self.prefix_cache = prefix_cache
        self.leaves_first = True
        """Evict no page that a cached one follows, which nothing would find without it; with a sliding window it would be found."""
        self.counts = [0] * pages
        """How many sequences hold each page."""
        self.queried_tokens = 0
        self.found_tokens = 0
        """Tokens that admitted sequences looked for in the prefix cache, and how many of them were there."""
        self.evictions = 0
        self._free = list(range(pages - 1, NULL_PAGE, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached and held by nobody, least recently used first
        self._pinned: set[int] = set()
        self._digests: list[bytes] = [b""] * pages  # of a cached page
        self._parents: list[bytes] = [b""] * pages
        self._cached: dict[bytes, int] = {}
        self._children: dict[bytes, int] = {}  # how many cached pages follow the page of this digest
        self._free_host = list(range(host_pages - 1, -1, -1))

    @property
    def available(self) -> int:
        """Pages that can be handed out now, some after being evicted."""
        return len(self._free) + len(self._idle)

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
        return len(self._free_host)

    def take(self, count: int) -> list[int]:
        """Hand out so many pages, no more than are available. Those that were never cached or are forgotten go first."""
        free, counts = self._free, self.counts
        taken = []
        for _ in range(count):
            page = free.pop() if free else self._evict()
            counts[page] = 1
            taken.append(page)
        return taken

    def share(self, page: int) -> None:
        """One more sequence holds this page."""
        if not self.counts[page]:
            self._idle.pop(page, None)
        self.counts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One sequence less holds each of these. Give the last of a sequence first: they are evicted in the order given."""
        counts, pinned = self.counts, self._pinned
        for page in pages:
            counts[page] = left = counts[page] - 1
            if not left and page not in pinned:
                self._retire(page)

    def pin(self, page: int) -> None:
        """Do not hand out this page before `unpin`, though nobody may hold it: the step being made copies from it, when other pages
        have been written already."""
        self._pinned.add(page)

    def unpin(self) -> None:
        """The step is made: its pages may be handed out in the next."""
        if self._pinned:
            pinned, self._pinned = self._pinned, set()
            for page in pinned:
                if not self.counts[page]:
                    self._retire(page)

    def cache(self, page: int, digest: bytes, parent: bytes) -> None:
        """The page is full: its content can be found from now on, unless another page with the same is known."""
        if digest in self._cached or self._digests[page]:
            return
        self._cached[digest] = page
        self._digests[page] = digest
        self._parents[page] = parent
        self._children[parent] = self._children.get(parent, 0) + 1

    def find(self, digest: bytes) -> int | None:
        """The page with this content."""
        return self._cached.get(digest)

    def forget(self, page: int) -> None:
        """The page is no longer in the prefix cache, because something else will be written to it."""
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
        """Forget what all pages hold: the weights that it was computed with have changed."""
        for page in range(1, self.pages):
            self.forget(page)
        self._free += reversed(self._idle)
        self._idle.clear()

    def take_host(self, count: int) -> list[int]:
        """Hand out so many pages of the host, no more than are available."""
        return [self._free_host.pop() for _ in range(count)]

    def release_host(self, pages: Iterable[int]) -> None:
        """These pages of the host are free."""
        self._free_host.extend(pages)

    def _retire(self, page: int) -> None:
        if self._digests[page]:
            self._idle[page] = None
        else:
            self._free.append(page)

    def _evict(self) -> int:
        """The least recently used page that nothing cached follows. Mostly that is the first: a sequence holds the pages before its
        own and releases its last page first. It is not where two sequences computed the same page at once and one copy is known:
        such a page is as recently used as what follows it, and goes to the end."""
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
        self.evictions += 1
        return page
