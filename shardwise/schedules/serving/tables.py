"""The page table of a sequence: how it grows, is shared, copied on write, released, found in the prefix cache and swapped.

A page is written by one sequence only. A fork shares the page its parent is writing to: the parent continues there, behind all that
the fork reads. The fork gets a copy when it first writes, or the page itself if the parent has released it. Where the prefix cache
knows such a page, it forgets it. Full pages need no copies, since writes only ever follow them.
"""

from __future__ import annotations

from shardwise.schedules.serving.pages import PagePool, page_digest
from shardwise.schedules.serving.sequence import GIVEN_BACK, Sequence, Step


class PageTables:
    """Changes the page tables of sequences and accounts for it in the pool. `window`: the latest positions that a token sees,
    itself included; 0: all."""

    def __init__(self, pool: PagePool, window: int) -> None:
        self.pool, self.window = pool, window

    def pages_of(self, tokens: int) -> int:
        """Pages that this many tokens fill, the last perhaps in part."""
        return -(-tokens // self.pool.page_tokens)

    def fewest(self, tokens: int) -> int:
        """The fewest pages with which a sequence of this many tokens can be computed, if need be one token at a time."""
        whole = self.pages_of(tokens)
        return min(whole, self.pages_of(self.window - 1) + 1) if self.window else whole

    def missing(self, sequence: Sequence, end: int) -> int:
        """Pages it lacks to compute up to position `end`."""
        return max(0, self.pages_of(end) - len(sequence.pages)) + self._shared(sequence)

    def reach(self, sequence: Sequence) -> int:
        """The position up to which it can be computed with all available pages."""
        usable = self.pool.available - self._shared(sequence)
        return (len(sequence.pages) + usable) * self.pool.page_tokens if usable >= 0 else sequence.computed

    def extend(self, sequence: Sequence, end: int, step: Step) -> bool:
        """Give it its own pages to compute up to position `end`; they must be available. True when the table has changed."""
        pages, pool = sequence.pages, self.pool
        at, have = sequence.computed // pool.page_tokens, len(pages)
        changed = False
        if at < have:
            page = pages[at]
            if pool.counts[page] > 1:
                [pages[at]] = pool.take(1)
                step.copies.append((page, pages[at]))
                pool.pin(page)
                pool.release((page,))
                changed = True
            else:
                pool.forget(page)
        more = self.pages_of(end) - have
        if more > 0:
            pages += pool.take(more)
            changed = True
        return changed

    def give_back(self, sequence: Sequence) -> bool:
        """Release the pages that neither its next token nor any later one can see. True when there were any."""
        if not self.window:
            return False
        first = min(sequence.computed, len(sequence.tokens))  # drafts may yet be rejected
        behind = min((first - self.window + 1) // self.pool.page_tokens, len(sequence.pages))
        before = sequence.given_back
        if behind <= before:
            return False
        self.register(sequence)
        self.pool.release(sequence.pages[before:behind])
        sequence.pages[before:behind] = [GIVEN_BACK] * (behind - before)
        sequence.given_back = behind
        return True

    def register(self, sequence: Sequence) -> None:
        """Add its full pages, of known tokens, to the prefix cache."""
        pool = self.pool
        full = min(sequence.computed, len(sequence.tokens)) // pool.page_tokens
        if full > sequence.registered and pool.prefix_cache:
            digests, pages = self._digest(sequence, full), sequence.pages
            for at in range(max(sequence.registered, sequence.given_back), full):
                pool.cache(pages[at], digests[at], digests[at - 1] if at else sequence.salt)
            sequence.registered = full

    def match(self, sequence: Sequence) -> tuple[int, list[int]]:
        """Returns (number of pages before the found ones, which cannot be seen from there; pages of the prefix cache that its next
        token to compute may follow). At least one token is left to compute."""
        pool = self.pool
        if not (pool.prefix_cache and sequence.reads_cache):
            return 0, []
        found: list[int] = []
        limit = (len(sequence.tokens) - 1) // pool.page_tokens
        if not self.window:
            for at in range(limit):
                page = pool.find(self._digest(sequence, at + 1)[at])
                if page is None:
                    break
                found.append(page)
            return 0, found
        digests, end = self._digest(sequence, limit), limit
        for at in reversed(range(limit)):
            page = pool.find(digests[at])
            if page is None:
                found, end = [], at
                continue
            found.append(page)
            if at <= (end * pool.page_tokens - self.window + 1) // pool.page_tokens:
                return at, found[::-1]
        return 0, found[::-1]

    def adopt(self, sequence: Sequence, first: int, found: list[int]) -> None:
        """Share the pages that `match` has found."""
        for page in found:
            self.pool.share(page)
        sequence.pages = [GIVEN_BACK] * first + found
        sequence.given_back, sequence.registered = first, len(sequence.pages)
        sequence.computed = len(sequence.pages) * self.pool.page_tokens

    def fork(self, parent: Sequence, child: Sequence, length: int) -> bool:
        """Let the child share what is computed of its first `length` tokens, except its last token. False where the pages are
        gone."""
        computed = min(parent.computed, length, len(child.tokens) - 1)
        end = self.pages_of(computed)
        first = max(0, (computed - self.window + 1) // self.pool.page_tokens) if self.window else 0
        if computed <= 0 or parent.given_back > first or len(parent.pages) < end:
            return False
        for page in parent.pages[first:end]:
            self.pool.share(page)
        child.pages = [GIVEN_BACK] * first + parent.pages[first:end]
        child.given_back, child.computed = first, computed
        child.registered = computed // self.pool.page_tokens
        return True

    def release(self, sequence: Sequence) -> None:
        """Release all its pages; full ones may be found again in the prefix cache."""
        if sequence.pages:  # none when it is swapped
            self.register(sequence)
            self.pool.release(reversed(sequence.pages[sequence.given_back :]))
        self.pool.release_host(sequence.host_pages)
        sequence.pages, sequence.host_pages = [], []
        sequence.computed = sequence.registered = sequence.given_back = sequence.limit = 0

    def swap_out(self, sequence: Sequence, step: Step) -> bool:
        """Move its computed pages to host pages; False if there are too few."""
        self.give_back(sequence)
        kept = sequence.pages[sequence.given_back : self.pages_of(sequence.computed)]
        if len(kept) > self.pool.available_host:
            return False
        computed, given_back = sequence.computed, sequence.given_back
        self.release(sequence)
        sequence.host_pages = self.pool.take_host(len(kept))
        step.swap_out += zip(kept, sequence.host_pages, strict=True)
        sequence.computed, sequence.given_back = computed, given_back
        return True

    def swap_in(self, sequence: Sequence, step: Step) -> None:
        """Bring it back to the device. Pages that the prefix cache still holds need no copy."""
        pool = self.pool
        first, end = sequence.given_back, self.pages_of(sequence.computed)
        full = min(sequence.computed, len(sequence.tokens)) // pool.page_tokens
        pages = sequence.pages = [GIVEN_BACK] * first
        for at, host in zip(range(first, end), sequence.host_pages, strict=False):
            page = pool.find(self._digest(sequence, full)[at]) if at < full and pool.prefix_cache else None
            if page is None:
                [page] = pool.take(1)
                step.swap_in.append((host, page))
            else:
                pool.share(page)
            pages.append(page)
        pool.release_host(sequence.host_pages)
        sequence.host_pages = []

    def _shared(self, sequence: Sequence) -> bool:
        """Whether the page to be written next has to be copied."""
        at, pages = sequence.computed // self.pool.page_tokens, sequence.pages
        return at < len(pages) and self.pool.counts[pages[at]] > 1

    def _digest(self, sequence: Sequence, pages: int) -> list[bytes]:
        """The digests of its pages, at least this many, which are full of known tokens."""
        digests, size = sequence.digests, self.pool.page_tokens
        for at in range(len(digests), pages):
            previous = digests[at - 1] if at else sequence.salt
            digests.append(page_digest(previous, sequence.tokens[at * size : (at + 1) * size]))
        return digests
