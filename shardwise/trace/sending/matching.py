"""The same collective on several ranks: matched by the group's own numbering where a profile has it, else by order within a
step. Only where every rank seen of a group counts as many of them in a step; a wrong match would be worse than none.

From the matches follow the clocks and the waiting. The ranks of a collective that all wait for each other leave it almost
together, so the median difference of its ends is the difference of two clocks. And no byte moves before the last rank has
come, so what a rank spends in it before that is waiting, and the rest is transfer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwise.trace.answers import Clock
from shardwise.trace.reading.events import Integers
from shardwise.trace.sending.axes import POINT_TO_POINT
from shardwise.trace.sending.sent import Sent

TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Collectives that no rank leaves before every rank has come."""


@dataclass(frozen=True)
class Part:
    """One rank's messages for matching."""

    rank: int
    sent: Sent
    base: int
    """What its times count from, on its machine's clock."""
    step: Integers
    """The step each message belongs to, -1 for those outside of all that is looked at."""


@dataclass(frozen=True)
class Matches:
    """Every message that was found on two ranks or more: its collective, its rank and its place among that rank's messages.
    Sorted by collective, then rank."""

    collective: Integers
    rank: Integers
    message: Integers
    dropped: int
    """Messages that could not be matched, since ranks of their group disagree on how many there are."""

    def __len__(self) -> int:
        return len(self.rank)


def match(parts: Sequence[Part]) -> Matches:
    """Match collectives and, for messages between two ranks, each send with its receive."""
    keys: dict[object, int] = {}
    rank, message, group, step, number = [], [], [], [], []
    for part in parts:
        named = np.array([keys.setdefault(key, len(keys)) for key in map(_key, part.sent.described)] or [-1], np.int64)
        ours = named[part.sent.what] if len(part.sent) else np.zeros(0, np.int64)
        ours = _pairs(part, ours, keys)
        kept = np.flatnonzero((ours >= 0) & (part.step >= 0) & part.sent.first)
        rank.append(np.full(len(kept), part.rank))
        message.append(kept)
        group.append(ours[kept])
        step.append(part.step[kept])
        number.append(_numbers(ours[kept], part.step[kept], part.sent.sequence[kept]))
    columns = [
        np.concatenate(column) if column else np.zeros(0, np.int64) for column in (rank, message, group, step, number)
    ]
    return _joined(*columns)


def _key(described: object) -> object:
    """What ranks must agree on; None for what is not matched. A group without a name is that of all ranks."""
    collective = described.collective  # type: ignore[attr-defined]
    if collective not in TOGETHER:
        return None
    return described.group, described.axis, collective  # type: ignore[attr-defined]


def _pairs(part: Part, ours: Integers, keys: dict[object, int]) -> Integers:
    """The keys of sends and receives: who sends to whom, in which group."""
    none = keys.get(None, -2)
    ours = np.where(ours == none, -1, ours)
    for at, one in enumerate(part.sent.described):
        if one.collective not in POINT_TO_POINT:
            continue
        for row in np.flatnonzero(part.sent.what == at):
            source, destination = int(part.sent.source[row]), int(part.sent.destination[row])
            pair = (part.rank, destination) if one.collective == "send" else (source, part.rank)
            if min(pair) >= 0 and one.collective != "send_recv":
                ours[row] = keys.setdefault((one.axis, "pair", *pair), len(keys))
    return ours


def _numbers(group: Integers, step: Integers, sequence: Integers) -> Integers:
    """The group's own number, or how many of this group, collective and step came before, counted from -1 downwards so
    that the two never meet."""
    order = np.lexsort((step, group))
    starts = np.flatnonzero(np.append(True, (np.diff(group[order]) != 0) | (np.diff(step[order]) != 0))[: len(order)])
    counted = np.empty(len(group), np.int64)
    sizes = np.diff(np.append(starts, len(order)))
    counted[order] = np.arange(len(order)) - np.repeat(starts, sizes)
    return np.where(sequence >= 0, sequence, -1 - counted)


def _joined(rank: Integers, message: Integers, group: Integers, step: Integers, number: Integers) -> Matches:
    if not len(rank):
        return Matches(rank, rank, rank, 0)
    counted = number < 0
    # Steps matter only where order does: a group's numbers go through all steps.
    where = np.where(counted, step, -1)
    agree = _agreeing(rank, group, where, counted)
    rows = np.stack((group, where, number), 1)
    _, collective = np.unique(rows, axis=0, return_inverse=True)
    collective = collective.reshape(-1)
    # Twice on one rank under one number: numbers that a library gave more than one kernel; order decides nothing there.
    twice = np.unique(np.stack((collective, rank), 1), axis=0, return_counts=True)
    bad = np.isin(collective, twice[0][twice[1] > 1, 0])
    kept = agree & ~bad
    several = np.bincount(collective[kept], minlength=collective.max() + 1) > 1
    kept &= several[collective]
    order = np.lexsort((rank[kept], collective[kept]))
    return Matches(
        collective[kept][order], rank[kept][order], message[kept][order], int((~agree).sum() + (agree & bad).sum())
    )


def _agreeing(rank: Integers, group: Integers, step: Integers, counted: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether all ranks that have messages of a group in a step have as many; where they are numbered it does not matter."""
    _, cell = np.unique(np.stack((group, step), 1), axis=0, return_inverse=True)
    pairs, count = np.unique(np.stack((cell.reshape(-1), rank), 1), axis=0, return_counts=True)
    most = np.zeros(cell.max() + 1, np.int64)
    least = np.full(cell.max() + 1, np.iinfo(np.int64).max)
    np.maximum.at(most, pairs[:, 0], count)
    np.minimum.at(least, pairs[:, 0], count)
    return ~counted | (most == least)[cell.reshape(-1)]


def trusted(parts: Sequence[Part], matches: Matches) -> Matches:
    """The matches without those of ranks whose ends stray from each other by more than the collectives last: what was
    matched there by order is not the same collective."""
    if not len(matches):
        return matches
    ends = _times(parts, matches, "end")
    length = ends - _times(parts, matches, "start")
    together = left_together(parts, matches)
    edges = _edges(matches, ends, together)
    heads = np.flatnonzero(np.append(True, np.diff(matches.collective) != 0))
    anchor = np.repeat(matches.rank[heads], np.diff(np.append(heads, len(matches))))
    bad = np.zeros(len(matches), np.bool_)
    for (first, second), (_, stray, _) in edges.items():
        mine = together & (anchor == first) & (matches.rank == second)
        if mine.any() and stray > _median(length[mine]):
            bad |= np.isin(matches.collective, matches.collective[mine])
    kept = ~bad
    return Matches(
        matches.collective[kept], matches.rank[kept], matches.message[kept], matches.dropped + int(bad.sum())
    )


def clocks(parts: Sequence[Part], matches: Matches) -> dict[int, Clock]:
    """How each rank's clock stands to that of the lowest rank it can be compared with, over any number of others."""
    ends = _times(parts, matches, "end")
    together = left_together(parts, matches)
    edges = _edges(matches, ends, together)
    found = {part.rank: Clock(0, -1, 0) for part in parts}
    for root in sorted(found):
        if found[root].uncertainty >= 0:
            continue
        reached = {root: Clock(0, 0, 0)}
        while True:
            # The surest comparison that reaches one more rank.
            steps = [
                (reached[a].uncertainty + u, b, reached[a].offset + shift, n)
                for (a, b), (shift, u, n) in edges.items()
                if a in reached and b not in reached
            ]
            if not steps:
                break
            uncertainty, rank, offset, count = min(steps)
            reached[rank] = Clock(offset, uncertainty, count)
        if len(reached) > 1:
            found |= {
                rank: Clock(c.offset if abs(c.offset) > c.uncertainty else 0, c.uncertainty, c.matched)
                for rank, c in reached.items()
            }
    return found


def _edges(
    matches: Matches, ends: Integers, together: NDArray[np.bool_]
) -> dict[tuple[int, int], tuple[int, int, int]]:
    """For ranks that share collectives: what to add to the second's times, how far half of them stray, how many."""
    kept = np.flatnonzero(together)
    collective, rank, end = matches.collective[kept], matches.rank[kept], ends[kept]
    if not len(kept):
        return {}
    starts = np.flatnonzero(np.append(True, np.diff(collective) != 0))
    anchor = np.repeat(starts, np.diff(np.append(starts, len(kept))))
    other = np.flatnonzero(np.arange(len(kept)) != anchor)
    pair = np.stack((rank[anchor[other]], rank[other]), 1)
    shift = end[anchor[other]] - end[other]
    distinct, which = np.unique(pair, axis=0, return_inverse=True)
    edges: dict[tuple[int, int], tuple[int, int, int]] = {}
    order = np.argsort(which.reshape(-1), kind="stable")
    for (a, b), values in zip(
        distinct.tolist(), np.split(shift[order], np.cumsum(np.bincount(which.reshape(-1)))[:-1]), strict=True
    ):
        middle = _median(values)
        stray = int(np.sort(np.abs(values - middle))[len(values) // 2])
        edges[a, b] = (middle, stray, len(values))
        edges[b, a] = (-middle, stray, len(values))
    return edges


def _median(values: Integers) -> int:
    """The lower of the two middle ones, so that it is a whole number."""
    return int(np.sort(values)[(len(values) - 1) // 2])


def _times(parts: Sequence[Part], matches: Matches, which: str, offsets: Mapping[int, int] | None = None) -> Integers:
    """Start or end of each matched message on one clock."""
    out = np.zeros(len(matches), np.int64)
    for part in parts:
        mine = matches.rank == part.rank
        shift = part.base + (offsets or {}).get(part.rank, 0)
        out[mine] = getattr(part.sent, which)[matches.message[mine]] + shift
    return out


def left_together(parts: Sequence[Part], matches: Matches) -> NDArray[np.bool_]:
    """Which rows are of collectives that no rank leaves before every rank has come."""
    out = np.zeros(len(matches), np.bool_)
    for part in parts:
        mine = matches.rank == part.rank
        out[mine] = part.sent.those(lambda d: d.collective in TOGETHER)[matches.message[mine]]
    return out


def first_ones(parts: Sequence[Part], matches: Matches) -> NDArray[np.bool_]:
    """Which rows belong to a collective that is the first of any of its ranks: it takes up how the ranks began."""
    start = _times(parts, matches, "start")
    first = [mine[start[mine].argmin()] for part in parts if len(mine := np.flatnonzero(matches.rank == part.rank))]
    return np.isin(matches.collective, matches.collective[first]) if first else np.zeros(len(matches), np.bool_)


@dataclass(frozen=True)
class Waiting:
    """Of each matched message: how long its rank waited in it for the last one, and who that was. Rows as in `Matches`."""

    wait: Integers
    last: Integers
    """The rank that came last (or sent); its own messages have wait 0."""
    arrival: Integers
    """When it came, on the reference clock."""
    lateness: Integers
    """How much later than the rank before it the last one came."""


def waiting(parts: Sequence[Part], matches: Matches, offsets: Mapping[int, int]) -> Waiting:
    """Waiting apart from transfer, on aligned clocks."""
    start = _times(parts, matches, "start", offsets)
    end = _times(parts, matches, "end", offsets)
    if not len(matches):
        return Waiting(start, start, start, start)
    sender = np.zeros(len(matches), np.bool_)
    receiver = np.zeros(len(matches), np.bool_)
    for part in parts:
        mine = matches.rank == part.rank
        sender[mine] = part.sent.those(lambda d: d.collective == "send")[matches.message[mine]]
        receiver[mine] = part.sent.those(lambda d: d.collective == "recv")[matches.message[mine]]
    starts = np.flatnonzero(np.append(True, np.diff(matches.collective) != 0))
    sizes = np.diff(np.append(starts, len(matches)))
    pair = sender | receiver
    # Of a send and its receive, only the receiver waits: sends go out by themselves.
    came = np.where(receiver, np.iinfo(np.int64).min, start)
    arrival = np.repeat(np.maximum.reduceat(came, starts), sizes)
    at_last = np.flatnonzero(came == arrival)
    _, first_of = np.unique(np.repeat(np.arange(len(starts)), sizes)[at_last], return_index=True)
    last = np.repeat(matches.rank[at_last[first_of]], sizes)
    wait = np.clip(arrival - start, 0, end - start)
    wait = np.where(pair & ~receiver, 0, wait)
    before = np.where(matches.rank == last, np.iinfo(np.int64).min, start)
    second = np.repeat(np.maximum.reduceat(before, starts), sizes)
    return Waiting(wait, last, arrival, np.where(second > np.iinfo(np.int64).min, arrival - second, 0))
