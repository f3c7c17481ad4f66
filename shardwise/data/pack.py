"""Packs documents into rows: best fit, longest first, so that no document that fits is cut and rows have little padding.

Best-fit-decreasing puts each document into the row where it leaves least room (Ding et al. 2024 pack pretraining data this way).
Lengths are small integers, so documents of one length and rows with the same room are handled together: a million documents take a
second or two, and the result stores one number per document. The last token of a document is only ever a target, so n tokens take
n - 1 positions.

A document longer than a row loses its end. If a pair does not fit, the longer document is cut first, and each keeps at least half
a row. Documents that then have no token left to learn are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwise.data.shards import TokenSet

Ints = NDArray[np.int64]


def best_fit(sizes: Ints, length: int) -> tuple[Ints, Ints]:
    """Pack items of sizes 1 to `length` into rows of that length. Returns the items in the order of their rows, and where each row
    ends in that order. Rows are sorted by their first item."""
    rows = np.empty(len(sizes), dtype=np.int64)
    order = np.argsort(-sizes, kind="stable")
    with_room: list[list[Ints]] = [[] for _ in range(length + 1)]  # rows by their free positions
    open_rooms = np.zeros(length + 1, dtype=bool)
    made = 0
    groups, starts = np.unique(-sizes[order], return_index=True)
    for size, start, stop in zip((-groups).tolist(), starts.tolist(), [*starts.tolist(), len(order)][1:], strict=True):
        at = start
        while at < stop:
            ahead = open_rooms[size:]
            room = size + int(ahead.argmax())
            if open_rooms[room]:
                free = np.concatenate(with_room[room])
                with_room[room], open_rooms[room] = [], False
            else:
                room = length
                count = -(-(stop - at) // (length // size))
                free, made = np.arange(made, made + count), made + count
            each = room // size  # a row takes as many items as fit before the next row is used
            used = free[: -(-(stop - at) // each)]
            if len(used) < len(free):
                with_room[room].append(free[len(used) :])
                open_rooms[room] = True
            own = order[at : at + each * len(used)][: stop - at]
            rows[own] = np.repeat(used, each)[: len(own)]
            at += len(own)
            full = len(own) // each
            for some, left in (
                (used[:full], room - each * size),
                (used[full:], room - (len(own) - full * each) * size),
            ):
                if len(some) and left:
                    with_room[left].append(some)
                    open_rooms[left] = True
    # Sort rows by their first item, so that their order does not depend on lengths.
    first = np.full(made, len(sizes), dtype=np.int64)
    np.minimum.at(first, rows, np.arange(len(sizes)))
    rank = np.empty(made, dtype=np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(made)
    items = np.argsort(rank[rows], kind="stable")
    return items, np.cumsum(np.bincount(rank[rows], minlength=made))


@dataclass(frozen=True)
class Packs:
    """Rows of packed documents of a set. Row n holds the first `kept` tokens of each of `documents[ends[n - 1] : ends[n]]`."""

    tokens: TokenSet
    documents: Ints
    kept: Ints
    """Tokens kept of each document in `documents`."""
    ends: Ints
    whole: bool = False
    """Whether the last token of a document has a position too. It is then the only one with a target: itself."""

    @property
    def count(self) -> int:
        return len(self.ends)

    def row(self, number: int) -> Iterator[tuple[int, int, int]]:
        """Each document of a row, with its first token and the tokens kept of it."""
        span = slice(int(self.ends[number - 1]) if number else 0, int(self.ends[number]))
        for document, kept in zip(self.documents[span].tolist(), self.kept[span].tolist(), strict=True):
            yield document, self.tokens.start(document), kept


def pack(tokens: TokenSet, length: int, first: int = 0, stop: int | None = None, whole: bool = False) -> Packs:
    """Pack the documents `first` to `stop` of a set into rows of `length`, both of a pair into one row. `whole` includes their
    last token."""
    stop = tokens.documents if stop is None else stop
    ends = tokens.ends[first:stop].astype(np.int64)
    begins = np.concatenate([[tokens.start(first)], ends[:-1]]) if len(ends) else ends
    more = 0 if whole else 1  # tokens per document without a position
    sizes = ends - begins - more
    group = 2 if tokens.index.paired else 1
    kept = _fitting(sizes.reshape(-1, group), length)
    if tokens.index.marked:
        prompts = tokens.prompt_lengths[first:stop].astype(np.int64).reshape(-1, group)
        usable = (kept + more > prompts).all(axis=1)
    else:
        usable = np.ones(len(kept), dtype=bool)
    usable &= (kept > 0).all(axis=1)
    which = np.flatnonzero(usable)
    order, row_ends = best_fit(kept[which].sum(axis=1), length)
    chosen = which[order]
    documents = (first + chosen[:, None] * group + np.arange(group)).ravel()
    return Packs(tokens, documents, kept[chosen].ravel() + more, row_ends * group, whole)


def _fitting(sizes: Ints, length: int) -> Ints:
    """The positions that each document keeps, for groups of one or two documents [groups, documents] that share a row."""
    if sizes.shape[1] == 1:
        return np.minimum(sizes, length)
    half = length // 2
    others = sizes[:, ::-1]
    longer = sizes > others
    longer[:, 0] |= sizes[:, 0] == sizes[:, 1]  # only one of two equal documents gets the odd position
    room = np.maximum(length - others, np.where(longer, length - half, half))
    return np.minimum(sizes, room)
