"""The critical path: the chain of work and waiting across ranks that ends with the last event. Shortening anything else does not
shorten the step.

It is walked backwards. A row started because something else ended: the previous row on its stream, the call that launched it, a
row of another stream that ended later than both, or, for a collective, the wait for the last rank, on aligned clocks. A launch
leads back along the host to its last synchronisation with the device. Each step back is a few binary searches, so the cost is
proportional to the length of the path.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from shardwise.trace.answers import CriticalPath
from shardwise.trace.comms.matching import Matches, Waiting
from shardwise.trace.comms.overlap import row_axes, start_after_waits
from shardwise.trace.rank import Rank
from shardwise.trace.reading.integers import Integers
from shardwise.trace.spans.activity import CLASSES, Activity, blocking_calls, previous_on_track
from shardwise.trace.spans.intervals import distinct

SEGMENTS = 2000
"""Longest segments of the path, for drawing."""
NAMES = 20
STALLED = 20
"""A launch call this many times longer than the median was blocked by a full queue."""


@dataclass
class Chain:
    """One rank's rows, prepared for the walk; times on the reference clock."""

    rank: int
    start: Integers
    end: Integers
    category: list[str]
    name: Integers
    names: tuple[str, ...]
    before: Integers
    """The previous row on the same track, -1 for none."""
    launch: Integers
    """Start of the call that launched it; the smallest integer if unknown."""
    by_end: Integers
    """Rows sorted by end."""
    ends: Integers
    """Their ends, in that order."""
    position: Integers
    """Position of each row in that order."""
    sync_start: Integers
    sync_end: Integers
    on_host: bool
    jump: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """For rows of collectives that waited: the last rank, its row, and when it arrived."""


def chain(rank: Rank, shift: int) -> Chain:
    """A rank's rows, prepared for the walk; `shift` converts its times to the reference clock."""
    activity = rank.activity
    events = rank.profile.events
    start, end = start_after_waits(activity, rank.comms) + shift, activity.end + shift
    category = [CLASSES[kind] for kind in activity.kind.tolist()]
    axis, words = row_axes(activity, rank.comms)
    for row in np.flatnonzero(axis >= 0).tolist():
        category[row] = f"communication {words[axis[row]]}"
    never = np.iinfo(np.int64).min
    launch = np.where(activity.launch >= 0, events.start[activity.launch] + shift, never)
    by_end = np.lexsort((start, end))
    position = np.empty(len(start), np.int64)
    position[by_end] = np.arange(len(start))
    syncs = np.concatenate((blocking_calls(events), _stalled_launches(activity)))
    syncs = syncs[np.argsort(events.end[syncs], kind="stable")]
    return Chain(
        rank.profile.rank, start, end, category, activity.name.astype(np.int64), events.names,
        previous_on_track(activity.track, start), launch, by_end, end[by_end], position, events.start[syncs] + shift,
        events.end[syncs] + shift, activity.on_host,
    )  # fmt: skip


def _stalled_launches(activity: Activity) -> Integers:
    """Launch calls far longer than others: the queue was full, and the host blocked until the device took a kernel."""
    calls = distinct(activity.launch[activity.launch >= 0])
    length = activity.profile.events.duration[calls]
    return calls[length > STALLED * np.median(length)] if len(calls) else calls


def _connect(chains: Mapping[int, Chain], ranks: Mapping[int, Rank], matches: Matches, waiting: Waiting) -> None:
    """Link each collective event that waited to the last rank's event."""
    bounds = np.append(matches.first_of_each(), len(matches))
    for low, high in pairwise(bounds.tolist()):
        members = enumerate(matches.rank[low:high].tolist(), low)
        rows = {rank: int(ranks[rank].comms.row[matches.event[at]]) for at, rank in members}
        last = int(waiting.last[low])
        for at in range(low, high):
            rank = int(matches.rank[at])
            if rank != last and waiting.wait[at] > 0 and rows[rank] >= 0 and rows[last] >= 0:
                chains[rank].jump[rows[rank]] = (last, rows[last], int(waiting.arrival[at]))


class _Walk:
    """The path so far. Times count from its beginning."""

    def __init__(self, chains: Mapping[int, Chain]) -> None:
        self.chains = chains
        self.segments: list[tuple[int, str, str, int, int]] = []

    def add(self, rank: int, category: str, name: str, start: int, end: int) -> int:
        """Add a segment of the path. Returns its start."""
        start = max(start, 0)
        if end > start:
            self.segments.append((rank, category, name, start, end))
        return min(start, end)

    def walk(self, rank: int, row: int) -> None:
        """Walk back from the end of a row."""
        now = int(self.chains[rank].end[row])
        for _ in range(sum(len(chain.start) for chain in self.chains.values()) * 2 + 1):
            here = self.chains[rank]
            name = here.names[here.name[row]]
            if row in here.jump and here.jump[row][2] < now:
                last, other, came = here.jump[row]
                now = self.add(rank, here.category[row], name, came, now)
                rank, row = last, other
                here = self.chains[rank]
            else:
                now = self.add(rank, here.category[row], name, int(here.start[row]), now)
            if now <= 0:
                return
            found = self._before(here, row, now)
            if found is None:
                return
            row, now = found

    def _before(self, here: Chain, row: int, now: int) -> tuple[int, int] | None:
        """The next row of the path and the time to continue from; None at the start."""
        previous = int(here.before[row])
        ended = int(here.end[previous]) if previous >= 0 and here.end[previous] <= now else 0
        launched = int(here.launch[row])
        latest = self._latest(here, row, now)
        other = int(here.end[latest]) if latest >= 0 else 0
        gap = "host" if here.on_host else "idle"
        if latest >= 0 and other > max(ended, launched):
            return latest, self.add(here.rank, gap, "", other, now)
        if launched > ended and launched <= now:
            now = self.add(here.rank, "host", "launch", launched, now)
            return self._along_host(here, row, now)
        if previous >= 0 and here.end[previous] <= now:
            return previous, self.add(here.rank, gap, "", ended, now)
        self.add(here.rank, "host", "", 0, now)
        return None

    @staticmethod
    def _latest(here: Chain, row: int, now: int) -> int:
        """The row that ended last up to a time, among those before this row in the order of ends."""
        at = min(int(here.ends.searchsorted(now, "right")), int(here.position[row])) - 1
        return int(here.by_end[at]) if at >= 0 else -1

    def _along_host(self, here: Chain, row: int, now: int) -> tuple[int, int] | None:
        """Back along the host to its last synchronisation with the device, and to the row it waited for."""
        at = int(here.sync_end.searchsorted(now, "right")) - 1
        while at >= 0 and here.sync_end[at] > 0:
            latest = self._latest(here, row, int(here.sync_end[at]))
            if latest >= 0 and here.end[latest] >= here.sync_start[at]:
                now = self.add(here.rank, "host", "", int(here.sync_end[at]), now)
                now = self.add(here.rank, "host", "synchronise", int(here.end[latest]), now)
                return latest, now
            at -= 1
        self.add(here.rank, "host", "", 0, now)
        return None


def critical_path(
    ranks: Mapping[int, Rank], shifts: Mapping[int, int], matches: Matches, waiting: Waiting
) -> CriticalPath | None:
    """From the start of the first window, from which shifted times and the arrivals of `waiting` count, to the end of the last
    event that began in the windows."""
    chains = {rank: chain(r, shifts[rank]) for rank, r in ranks.items()}
    _connect(chains, ranks, matches, waiting)
    end = max((r.steps[-1][2] + shifts[rank] for rank, r in ranks.items()), default=0)
    last = [
        (int(chain.end[rows].max()), rank, int(rows[chain.end[rows].argmax()]))
        for rank, chain in chains.items()
        if len(rows := np.flatnonzero((chain.start >= 0) & (chain.start < end)))
    ]
    if not last:
        return None
    walk = _Walk(chains)
    finish, rank, row = max(last)
    walk.walk(rank, row)
    categories: dict[str, int] = defaultdict(int)
    by_rank: dict[int, int] = defaultdict(int)
    kernels: dict[str, int] = defaultdict(int)
    for rank, category, name, started, ended in walk.segments:
        categories[category] += ended - started
        by_rank[rank] += ended - started
        if category not in ("host", "idle"):
            kernels[name] += ended - started
    longest = sorted(walk.segments, key=lambda s: s[3] - s[4])[:SEGMENTS]
    most = sorted(kernels.items(), key=lambda item: -item[1])[:NAMES]
    return CriticalPath(
        finish, dict(sorted(categories.items(), key=lambda item: -item[1])), dict(sorted(by_rank.items())), dict(most),
        tuple(sorted(longest, key=lambda s: s[3])),
    )  # fmt: skip
