"""Matches a collective across ranks: by the process group's sequence number where the profile has it, else by order within a step.
By order only if all profiled ranks of the group have equally many in the step: a wrong match is worse than none.

Matches give clock offsets and wait times. All ranks leave a collective such as an all-reduce almost together, so the median
difference of its ends on two ranks is their clock offset. No data moves before the last rank has arrived, so a rank's time in the
collective up to then is waiting, and the rest is transfer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from shardwise.trace.answers import Clock
from shardwise.trace.comms.events import CollectiveEvents
from shardwise.trace.rank import Rank
from shardwise.trace.reading.integers import Integers
from shardwise.trace.spans.intervals import parts

SYNCHRONISING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Collectives that no rank leaves before every rank has arrived."""


@dataclass(frozen=True)
class Matches:
    """Every event that was matched on two or more ranks, sorted by collective, then rank."""

    collective: Integers
    """Index of the matched collective."""
    rank: Integers
    event: Integers
    """Into that rank's collective events."""
    dropped: int
    """Events that could not be matched."""

    def __len__(self) -> int:
        return len(self.rank)

    def first_of_each(self) -> Integers:
        """The first row of each collective."""
        return np.flatnonzero(np.append(True, np.diff(self.collective) != 0)[: len(self)])

    @cached_property
    def _rows(self) -> dict[int, Integers]:
        return dict(parts(self.rank))

    def rows_of(self, rank: int) -> Integers:
        """The rows of one rank."""
        return self._rows.get(rank, np.zeros(0, np.int64))

    def only(self, mask: NDArray[np.bool_]) -> Matches:
        """The masked rows; the others count as dropped."""
        dropped = self.dropped + int((~mask).sum())
        return Matches(self.collective[mask], self.rank[mask], self.event[mask], dropped)


def match(ranks: Mapping[int, Rank]) -> Matches:
    """Match collectives, and each send with its receive."""
    keys: dict[object, int] = {}
    columns: list[tuple[Integers, ...]] = [(np.zeros(0, np.int64),) * 5]
    for rank, r in ranks.items():
        comms, steps = r.comms, r.step_of(r.comms.start)
        # A group without a name is taken for that of all ranks.
        named = comms.column(
            lambda d: (
                _number(keys, d.group, "" if d.group else d.axis, d.collective) if d.collective in SYNCHRONISING else -1
            )
        )
        key = np.maximum(named.astype(np.int64), _pair_keys(rank, comms, keys))
        selected = np.flatnonzero((key >= 0) & (steps >= 0) & comms.first)
        group, step = key[selected], steps[selected]
        numbers = _numbers(group, step, comms.sequence[selected])
        columns.append((np.full(len(selected), rank), selected, group, step, numbers))
    return _joined(*(np.concatenate(column) for column in zip(*columns, strict=True)))


def _number(keys: dict[object, int], *key: object) -> int:
    return keys.setdefault(key, len(keys))


def _pair_keys(rank: int, comms: CollectiveEvents, keys: dict[object, int]) -> Integers:
    """The key of each send and receive: axis, source and destination; -1 for other events."""
    found = np.full(len(comms), -1, np.int64)
    rows = np.flatnonzero(comms.mask(lambda d: d.collective in ("send", "recv")))
    columns = (comms.which[rows], comms.source[rows], comms.destination[rows])
    for row, which, source, destination in zip(rows.tolist(), *(column.tolist() for column in columns), strict=True):
        one = comms.descriptions[which]
        pair = (rank, destination) if one.collective == "send" else (source, rank)
        if min(pair) >= 0:
            found[row] = _number(keys, one.axis, "pair", *pair)
    return found


def _numbers(group: Integers, step: Integers, sequence: Integers) -> Integers:
    """Sequence numbers; where there are none, the order among events of the same key and step, counted from -1 downwards so that
    the two never coincide."""
    order = np.lexsort((step, group))
    starts = np.flatnonzero(np.append(True, (np.diff(group[order]) != 0) | (np.diff(step[order]) != 0))[: len(order)])
    counted = np.empty(len(group), np.int64)
    sizes = np.diff(np.append(starts, len(order)))
    counted[order] = np.arange(len(order)) - np.repeat(starts, sizes)
    return np.where(sequence >= 0, sequence, -1 - counted)


def _joined(rank: Integers, event: Integers, group: Integers, step: Integers, number: Integers) -> Matches:
    if not len(rank):
        return Matches(rank, rank, rank, 0)
    counted = number < 0
    # Steps matter only for matches by order: sequence numbers continue over all steps.
    where = np.where(counted, step, -1)
    agree = _agreeing(rank, group, where, counted)
    rows = np.stack((group, where, number), 1)
    _, collective = np.unique(rows, axis=0, return_inverse=True)
    collective = collective.reshape(-1)
    # A sequence number counts on one rank: the library gave it to several kernels, so the match is ambiguous.
    counts = np.unique(np.stack((collective, rank), 1), axis=0, return_counts=True)
    ambiguous = np.isin(collective, counts[0][counts[1] > 1, 0])
    mask = agree & ~ambiguous
    dropped = int((~mask).sum())
    several = np.bincount(collective[mask], minlength=collective.max() + 1) > 1
    mask &= several[collective]
    order = np.lexsort((rank[mask], collective[mask]))
    return Matches(collective[mask][order], rank[mask][order], event[mask][order], dropped)


def _agreeing(rank: Integers, group: Integers, step: Integers, counted: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether all ranks have equally many events of a group in a step; always true for events with sequence numbers."""
    _, cell = np.unique(np.stack((group, step), 1), axis=0, return_inverse=True)
    pairs, count = np.unique(np.stack((cell.reshape(-1), rank), 1), axis=0, return_counts=True)
    most = np.zeros(cell.max() + 1, np.int64)
    least = np.full(cell.max() + 1, np.iinfo(np.int64).max)
    np.maximum.at(most, pairs[:, 0], count)
    np.minimum.at(least, pairs[:, 0], count)
    return ~counted | (most == least)[cell.reshape(-1)]


def drop_mismatched(ranks: Mapping[int, Rank], matches: Matches) -> Matches:
    """Drop matches between two ranks whose ends scatter by more than the collectives last: they are not the same collective."""
    if not len(matches):
        return matches
    ends = _times(ranks, matches, "end")
    length = ends - _times(ranks, matches, "start")
    synchronising = synchronising_rows(ranks, matches)
    heads = matches.first_of_each()
    anchor = np.repeat(matches.rank[heads], np.diff(np.append(heads, len(matches))))
    edges = _edges(matches, ends, synchronising)
    rows = np.flatnonzero(synchronising)
    key = anchor[rows] * (int(matches.rank.max()) + 1) + matches.rank[rows]
    wrong = []
    for _, at in parts(key):
        mine = rows[at]
        edge = edges.get((int(anchor[mine[0]]), int(matches.rank[mine[0]])))
        if edge is not None and edge[1] > _median(length[mine]):
            wrong.append(matches.collective[mine])
    return matches.only(~np.isin(matches.collective, np.concatenate(wrong))) if wrong else matches


def clocks(ranks: Mapping[int, Rank], matches: Matches) -> dict[int, Clock]:
    """Each rank's clock relative to the lowest rank that it is connected to by matches, directly or through other ranks."""
    edges = _edges(matches, _times(ranks, matches, "end"), synchronising_rows(ranks, matches))
    found = {rank: Clock(0, -1, 0) for rank in ranks}
    leading: dict[int, list[tuple[int, int, int, int]]] = {}
    for (a, b), edge in edges.items():
        leading.setdefault(a, []).append((b, *edge))
    for root in sorted(found):
        if found[root].uncertainty >= 0:
            continue
        reached: dict[int, Clock] = {}
        # The edge to a new rank with the least uncertainty comes next.
        steps = [(0, root, 0, 0)]
        while steps:
            uncertainty, rank, offset, count = heappop(steps)
            if rank in reached:
                continue
            reached[rank] = Clock(offset, uncertainty, count)
            for other, shift, deviation, number in leading.get(rank, ()):
                if other not in reached:
                    heappush(steps, (uncertainty + deviation, other, offset + shift, number))
        if len(reached) > 1:
            found |= {
                rank: Clock(c.offset if abs(c.offset) > c.uncertainty else 0, c.uncertainty, c.matched)
                for rank, c in reached.items()
            }
    return found


def _edges(
    matches: Matches, ends: Integers, synchronising: NDArray[np.bool_]
) -> dict[tuple[int, int], tuple[int, int, int]]:
    """For each two ranks with common collectives: offset of the second's clock, median deviation, number of collectives."""
    rows = np.flatnonzero(synchronising)
    collective, rank, end = matches.collective[rows], matches.rank[rows], ends[rows]
    if not len(rows):
        return {}
    starts = np.flatnonzero(np.append(True, np.diff(collective) != 0))
    anchor = np.repeat(starts, np.diff(np.append(starts, len(rows))))
    other = np.flatnonzero(np.arange(len(rows)) != anchor)
    pair = np.stack((rank[anchor[other]], rank[other]), 1)
    shift = end[anchor[other]] - end[other]
    distinct, which = np.unique(pair, axis=0, return_inverse=True)
    edges: dict[tuple[int, int], tuple[int, int, int]] = {}
    order = np.argsort(which.reshape(-1), kind="stable")
    for (a, b), values in zip(
        distinct.tolist(), np.split(shift[order], np.cumsum(np.bincount(which.reshape(-1)))[:-1]), strict=True
    ):
        middle = _median(values)
        deviation = int(np.sort(np.abs(values - middle))[len(values) // 2])
        edges[a, b] = (middle, deviation, len(values))
        edges[b, a] = (-middle, deviation, len(values))
    return edges


def _median(values: Integers) -> int:
    """The lower of the two middle values, so that it is an integer."""
    return int(np.sort(values)[(len(values) - 1) // 2])


def _times(
    ranks: Mapping[int, Rank], matches: Matches, which: str, offsets: Mapping[int, int] | None = None
) -> Integers:
    """Start or end of each matched event on one clock."""
    out = np.zeros(len(matches), np.int64)
    for rank, r in ranks.items():
        mine = matches.rows_of(rank)
        shift = r.profile.base + (offsets or {}).get(rank, 0)
        out[mine] = getattr(r.comms, which)[matches.event[mine]] + shift
    return out


def synchronising_rows(ranks: Mapping[int, Rank], matches: Matches) -> NDArray[np.bool_]:
    """Mask of the rows of synchronising collectives."""
    return _rows_of(ranks, matches, *SYNCHRONISING)


def _rows_of(ranks: Mapping[int, Rank], matches: Matches, *collectives: str) -> NDArray[np.bool_]:
    """Mask of the rows of these collectives."""
    out = np.zeros(len(matches), np.bool_)
    for rank, r in ranks.items():
        mine = matches.rows_of(rank)
        out[mine] = r.comms.mask(lambda d: d.collective in collectives)[matches.event[mine]]
    return out


def first_collective_rows(ranks: Mapping[int, Rank], matches: Matches) -> NDArray[np.bool_]:
    """Mask of the rows of a collective that is the first on any of its ranks: waits there only show when the ranks began."""
    start = _times(ranks, matches, "start")
    first = [mine[start[mine].argmin()] for rank in ranks if len(mine := matches.rows_of(rank))]
    return np.isin(matches.collective, matches.collective[first]) if first else np.zeros(len(matches), np.bool_)


@dataclass(frozen=True)
class Waiting:
    """For each row of `Matches`: how long its rank waited for the last rank to arrive, and the last rank."""

    wait: Integers
    last: Integers
    """The rank that arrived last, or the sender of a P2P message; its own wait is 0."""
    arrival: Integers
    """When the last rank arrived, on the reference clock."""
    lateness: Integers
    """How much later the last rank arrived than the one before it."""


def waiting(ranks: Mapping[int, Rank], matches: Matches, offsets: Mapping[int, int]) -> Waiting:
    """Split matched events into waiting and transfer, on aligned clocks."""
    start = _times(ranks, matches, "start", offsets)
    end = _times(ranks, matches, "end", offsets)
    if not len(matches):
        return Waiting(start, start, start, start)
    sender, receiver = _rows_of(ranks, matches, "send"), _rows_of(ranks, matches, "recv")
    starts = matches.first_of_each()
    sizes = np.diff(np.append(starts, len(matches)))
    # In a P2P message only the receiver waits.
    never = np.iinfo(np.int64).min
    came = np.where(receiver, never, start)
    arrival = np.repeat(np.maximum.reduceat(came, starts), sizes)
    at_last = np.flatnonzero(came == arrival)
    _, first_of = np.unique(np.repeat(np.arange(len(starts)), sizes)[at_last], return_index=True)
    last = np.repeat(matches.rank[at_last[first_of]], sizes)
    wait = np.where(sender, 0, np.clip(arrival - start, 0, end - start))
    before = np.where(matches.rank == last, never, start)
    second = np.repeat(np.maximum.reduceat(before, starts), sizes)
    return Waiting(wait, last, arrival, np.where(second > never, arrival - second, 0))
