"""Chooses the replica for a request: the one whose prefix cache holds most of its prompt, among those that are not much busier
than the others.

The router remembers the page digests of the prompts sent to each replica, the latest first, as many as the replica has pages. No
replica gets more than 5/4 of an even share of the running requests (bounded loads: Mirrokni, Thorup and Zadimoghaddam 2018). So a
prefix that all prompts share spreads over as many replicas as it needs, and each of them finds it from then on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from shardwise.schedules.serving.pages import page_digest

MOST = 1.25
"""The largest load of a replica, as a multiple of an even share; the result is rounded up."""


class Router:
    """Counts the running answers of each replica, and remembers which prompts went there."""

    def __init__(self, replicas: int, page_tokens: int, pages: int, prefix_cache: bool = True) -> None:
        self.page_tokens, self.pages = page_tokens, pages if prefix_cache else 0
        self.under_way = [0] * replicas
        self.given = [0] * replicas
        """Requests routed in total."""
        self.known: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(replicas)]

    def choose(self, prompt: Sequence[int], answers: int = 1) -> int:
        """The replica for a prompt; counts `answers` more running answers there."""
        digests = self._digests(prompt)
        share = -(-(sum(self.under_way) + answers) * MOST // len(self.under_way))
        free = [n for n, load in enumerate(self.under_way) if load + answers <= share]
        if not free:  # more answers than a share
            free = [min(range(len(self.under_way)), key=self.under_way.__getitem__)]
        chosen = min(free, key=lambda n: (-self._found(n, digests), self.under_way[n], self.given[n]))
        self.under_way[chosen] += answers
        self.given[chosen] += 1
        known = self.known[chosen]
        for digest in reversed(digests):  # the first page of a prompt is evicted last
            known[digest] = None
            known.move_to_end(digest)
        while len(known) > self.pages:
            known.popitem(last=False)
        return chosen

    def ended(self, replica: int) -> None:
        """An answer on this replica has ended."""
        self.under_way[replica] -= 1

    def _digests(self, prompt: Sequence[int]) -> list[bytes]:
        """Digests of the full pages that a later prompt could share; none without a prefix cache."""
        size, found, previous = self.page_tokens, [], b""
        for at in range(0, len(prompt) - size + 1, size) if self.pages else ():
            previous = page_digest(previous, prompt[at : at + size])
            found.append(previous)
        return found

    def _found(self, replica: int, digests: Sequence[bytes]) -> int:
        known = self.known[replica]
        return next((n for n, digest in enumerate(digests) if digest not in known), len(digests))
