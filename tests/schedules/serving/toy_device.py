"""A device that executes steps of the serving scheduler on a toy memory, and finds every page that does not hold what it should.

In place of keys and values, each position of a page holds its number and a hash of all tokens up to it, because keys and values,
too, depend on all tokens before. The next token is a function of that hash. So wrong sharing, a page reused too early, a lost swap
or a wrong hit of the prefix cache is a wrong hash where a chunk reads, and what a sequence should become is known without pages.

The device is told of a step when it is scheduled, and reads tables and drafts then; it executes it later, when the host may have
ended, preempted or forked sequences.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from shardwise.schedules.serving import GIVEN_BACK, Sequence, Step

Entry = tuple[int, int]
NOTHING: Entry = (-1, -1)


def following(before: int, token: int) -> int:
    """The hash of a token and all before it."""
    return hash((before, token))


def hashes(tokens: Iterable[int], salt: bytes) -> list[int]:
    """The hash at each position, that of nothing first."""
    result = [int.from_bytes(salt, "little")]
    for token in tokens:
        result.append(following(result[-1], token))
    return result


def sample(before: int, key: object, vocab: int) -> int:
    """The next token. Keys that are even numbers sample alike, so that they may share what they generate."""
    return hash((before, key if isinstance(key, int) and key % 2 else 0)) % vocab


def continuation(tokens: list[int], count: int, key: object, salt: bytes, vocab: int) -> list[int]:
    """The tokens that follow, computed without pages."""
    new: list[int] = []
    state = hashes(tokens, salt)[-1]
    for _ in range(count):
        new.append(sample(state, key, vocab))
        state = following(state, new[-1])
    return new


@dataclass
class Order:
    """A chunk as the device was told of it."""

    sequence: Sequence
    start: int
    count: int
    samples: int
    table: list[int]
    drafts: list[int]


class ToyDevice:
    def __init__(self, pages: int, page_tokens: int, host_pages: int, window: int, vocab: int) -> None:
        self.page_tokens, self.window, self.vocab = page_tokens, window, vocab
        self.memory = [[NOTHING] * page_tokens for _ in range(pages)]
        self.host = [[NOTHING] * page_tokens for _ in range(host_pages)]
        self.tokens: dict[Sequence, list[int]] = {}  # also those that the host has not heard of
        self.tables: dict[int, list[int]] = {}  # by slot, changed only where the step says so
        self.submitted: deque[tuple[Step, list[Order]]] = deque()
        self.computed = 0

    def begin(self, sequence: Sequence) -> None:
        self.tokens[sequence] = list(sequence.tokens)

    def submit(self, step: Step) -> None:
        """Read what the step refers to, now."""
        for sequence in step.admitted:
            assert sequence in step.changed
        for sequence in step.changed:
            self.tables[sequence.slot] = list(sequence.pages)
        orders = []
        for chunk in step.chunks:
            sequence = chunk.sequence
            assert self.tables[sequence.slot] == sequence.pages, "a table changed, and the step does not say so"
            drafts = list(sequence.drafts) if chunk.samples > 1 else []
            table = list(sequence.pages)
            orders.append(Order(sequence, chunk.start, chunk.count, chunk.samples, table, drafts))
        self.submitted.append((step, orders))

    def execute(self, last: Step) -> list[list[int]]:
        """Do what was submitted up to this step; what it samples."""
        while True:
            step, orders = self.submitted.popleft()
            written = [{to for _, to in moves} for moves in (step.swap_in, step.copies)]
            assert not {page for page, _ in step.copies} & set.union(*written)
            self._move(step.swap_out, self.memory, self.host)
            self._move(step.swap_in, self.host, self.memory)
            self._move(step.copies, self.memory, self.memory)
            sampled = [new for order in orders if (new := self._compute(order))]
            if step is last:
                return sampled

    def _move(self, moves: list[tuple[int, int]], source: list[list[Entry]], target: list[list[Entry]]) -> None:
        """All at once."""
        assert len({to for _, to in moves}) == len(moves), "two pages move to one place"
        assert source is not self.memory or all(page > 0 for page, _ in moves)
        assert target is not self.memory or all(page > 0 for _, page in moves)
        contents = [list(source[page]) for page, _ in moves]
        for (_, to), content in zip(moves, contents, strict=True):
            target[to] = content

    def _compute(self, order: Order) -> list[int]:
        """Read what is before the chunk, write the chunk, sample."""
        sequence, size = order.sequence, self.page_tokens
        tokens = self.tokens[sequence]
        inputs = tokens[: order.start + order.count] + order.drafts
        assert order.start + order.count == len(inputs), "tokens that nobody knows"
        state = hashes(inputs, sequence.salt)
        first = max(0, order.start - self.window + 1) if self.window else 0
        for at in range(first, order.start):
            page = order.table[at // size]
            assert page > 0, f"position {at} is visible, but its page is {page}"
            assert self.memory[page][at % size] == (at, state[at + 1]), f"page {page} does not hold position {at}"
        for at in range(order.start, order.start + order.count):
            page = order.table[at // size]
            assert page > 0, f"position {at} is written to page {page}"
            self.memory[page][at % size] = (at, state[at + 1])
        assert all(page == GIVEN_BACK or page > 0 for page in order.table)
        self.computed += order.count
        if not order.samples:
            return []
        assert order.start + order.count - len(order.drafts) == len(tokens), (
            "a sample that does not follow the last token"
        )
        new: list[int] = []
        for draft in [*order.drafts, None]:
            new.append(sample(state[len(tokens) + len(new)], sequence.key, self.vocab))
            if new[-1] != draft:
                break
        tokens += new
        return new
