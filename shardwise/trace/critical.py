"""The critical path: the chain of work and waiting, over all ranks, that ends with the last thing done. Shortening anything else
shortens nothing.

It is walked backwards. What began when it did because something else had ended, follows that: the work before it on its
stream, the call that launched it, work of another stream that ended later than both, and for a collective the rank that came
last to it, on aligned clocks. A launch leads along the host to the last time the host waited for its device. Each step back is
a few binary searches, so the walk is as long as the path.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from shardwise.trace.answers import CriticalPath
from shardwise.trace.reading.events import Events, Integers
from shardwise.trace.sending.matching import Matches, Waiting
from shardwise.trace.sending.sent import Sent
from shardwise.trace.spans.activity import Activity
from shardwise.trace.spans.classes import CLASSES
from shardwise.trace.spans.nesting import distinct
from shardwise.trace.spans.working import resumed, row_axes

SEGMENTS = 2000
"""Kept of the path to be drawn, the longest."""
NAMES = 20
HELD_UP = 20
"""Times the usual length of a launch call from which on it is taken to have waited."""
BLOCKING = ("Synchronize", "cudaMemcpy", "hipMemcpyWithStream")
"""Parts of the names of calls during which a host waits for its device."""


@dataclass
class Chain:
    """One rank as the walk needs it; times on the reference clock."""

    rank: int
    start: Integers
    end: Integers
    label: list[str]
    """Category of each row."""
    name: Integers
    names: tuple[str, ...]
    before: Integers
    """The row before on the same lane, -1 for none."""
    launch: Integers
    """When the call that launched it began; the smallest number where it is not known."""
    by_end: Integers
    """Rows by end."""
    ends: Integers
    """Their ends, in that order."""
    place: Integers
    """Where each row stands in that order."""
    sync_start: Integers
    sync_end: Integers
    on_host: bool
    jump: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """Rows of messages that waited: the rank waited for, its row, and when it came."""


def chain(activity: Activity, sent: Sent, shift: int) -> Chain:
    """A rank's rows, ready to be walked."""
    events = activity.profile.events
    start, end = resumed(activity, sent) + shift, activity.end + shift
    label = [CLASSES[kind] for kind in activity.kind.tolist()]
    axis, words = row_axes(activity, sent)
    for row in np.flatnonzero(axis >= 0).tolist():
        label[row] = f"communication {words[axis[row]]}"
    order = np.lexsort((start, activity.lane))
    before = np.full(len(start), -1, np.int64)
    same = activity.lane[order[1:]] == activity.lane[order[:-1]]
    before[order[1:]] = np.where(same, order[:-1], -1)
    never = np.iinfo(np.int64).min
    launch = np.where(activity.launch >= 0, events.start[activity.launch] + shift, never)
    by_end = np.lexsort((start, end))
    place = np.empty(len(start), np.int64)
    place[by_end] = np.arange(len(start))
    syncs = np.concatenate((blocking_calls(events), _held_up(activity)))
    syncs = syncs[np.argsort(events.end[syncs], kind="stable")]
    return Chain(
        activity.profile.rank, start, end, label, activity.name.astype(np.int64), events.names, before, launch, by_end, end[by_end],
        place, events.start[syncs] + shift, events.end[syncs] + shift, activity.on_host,
    )  # fmt: skip


def blocking_calls(events: Events) -> Integers:
    """Calls during which the host waits for its device."""
    blocks = [any(word in name for word in BLOCKING) and "Async" not in name for name in events.names] or [False]
    return np.flatnonzero(events.named(np.array(blocks)) & events.of_kind("runtime"))


def _held_up(activity: Activity) -> Integers:
    """Launches that took far longer than others: a full queue lets the host go on only when the device has taken something."""
    calls = distinct(activity.launch[activity.launch >= 0])
    length = activity.profile.events.duration[calls]
    return calls[length > HELD_UP * np.median(length)] if len(calls) else calls


def connect(chains: Mapping[int, Chain], sents: Mapping[int, Sent], matches: Matches, waiting: Waiting) -> None:
    """Let each message that waited lead to the rank it waited for."""
    if not len(matches):
        return
    bounds = np.append(np.flatnonzero(np.append(True, np.diff(matches.collective) != 0)), len(matches))
    for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        rows = {
            int(matches.rank[at]): int(sents[int(matches.rank[at])].row[matches.message[at]]) for at in range(low, high)
        }
        last = int(waiting.last[low])
        for at in range(low, high):
            rank = int(matches.rank[at])
            if rank != last and waiting.wait[at] > 0 and rows[rank] >= 0 and rows[last] >= 0:
                chains[rank].jump[rows[rank]] = (last, rows[last], int(waiting.arrival[at]))


class _Walk:
    def __init__(self, chains: Mapping[int, Chain], begin: int) -> None:
        self.chains, self.begin = chains, begin
        self.segments: list[tuple[int, str, str, int, int]] = []

    def add(self, rank: int, category: str, name: str, start: int, end: int) -> int:
        """A piece of the path; gives the time it begins at."""
        start = max(start, self.begin)
        if end > start:
            self.segments.append((rank, category, name, start, end))
        return min(start, end)

    def walk(self, rank: int, row: int) -> None:
        """From the end of a row back to the beginning."""
        now = int(self.chains[rank].end[row])
        for _ in range(sum(len(chain.start) for chain in self.chains.values()) * 2 + 1):
            here = self.chains[rank]
            name = here.names[here.name[row]]
            if row in here.jump and here.jump[row][2] < now:
                last, other, came = here.jump[row]
                now = self.add(rank, here.label[row], name, came, now)
                rank, row = last, other
                here = self.chains[rank]
            else:
                now = self.add(rank, here.label[row], name, int(here.start[row]), now)
            if now <= self.begin:
                return
            found = self._before(here, row, now)
            if found is None:
                return
            row, now = found

    def _before(self, here: Chain, row: int, now: int) -> tuple[int, int] | None:
        """The row that the path goes on with, and from which time; None at the beginning."""
        previous = int(here.before[row])
        ended = int(here.end[previous]) if previous >= 0 and here.end[previous] <= now else self.begin
        launched = int(here.launch[row])
        latest = self._latest(here, row, now)
        other = int(here.end[latest]) if latest >= 0 else self.begin
        gap = "host" if here.on_host else "idle"
        if latest >= 0 and other > max(ended, launched):
            return latest, self.add(here.rank, gap, "", other, now)
        if launched > ended and launched <= now:
            now = self.add(here.rank, "host", "launch", launched, now)
            return self._along_host(here, row, now)
        if previous >= 0 and here.end[previous] <= now:
            return previous, self.add(here.rank, gap, "", ended, now)
        self.add(here.rank, "host", "", self.begin, now)
        return None

    @staticmethod
    def _latest(here: Chain, row: int, now: int) -> int:
        """The row that ended last up to a time, other than this one and what ends with it."""
        at = min(int(here.ends.searchsorted(now, "right")), int(here.place[row])) - 1
        return int(here.by_end[at]) if at >= 0 else -1

    def _along_host(self, here: Chain, row: int, now: int) -> tuple[int, int] | None:
        """Back over the host to the last call that waited for the device, and to what it waited for."""
        at = int(here.sync_end.searchsorted(now, "right")) - 1
        while at >= 0 and here.sync_end[at] > self.begin:
            latest = self._latest(here, row, int(here.sync_end[at]))
            if latest >= 0 and here.end[latest] >= here.sync_start[at]:
                now = self.add(here.rank, "host", "", int(here.sync_end[at]), now)
                now = self.add(here.rank, "host", "synchronise", int(here.end[latest]), now)
                return latest, now
            at -= 1
        self.add(here.rank, "host", "", self.begin, now)
        return None


def critical_path(chains: Mapping[int, Chain], begin: int, end: int) -> CriticalPath | None:
    """The path that ends with the last row that begins before `end`, back to `begin`; what lies between that row and `end` is
    not part of it."""
    last = [
        (int(chain.end[rows].max()), rank, int(rows[chain.end[rows].argmax()]))
        for rank, chain in chains.items()
        if len(rows := np.flatnonzero((chain.start >= begin) & (chain.start < end)))
    ]
    if not last:
        return None
    walk = _Walk(chains, begin)
    finish, rank, row = max(last)
    walk.walk(rank, row)
    categories: dict[str, int] = defaultdict(int)
    ranks: dict[int, int] = defaultdict(int)
    kernels: dict[str, int] = defaultdict(int)
    for where, category, name, started, ended in walk.segments:
        categories[category] += ended - started
        ranks[where] += ended - started
        if category not in ("host", "idle"):
            kernels[name] += ended - started
    longest = sorted(walk.segments, key=lambda s: s[3] - s[4])[:SEGMENTS]
    most = sorted(kernels.items(), key=lambda item: -item[1])[:NAMES]
    return CriticalPath(
        finish - begin, dict(sorted(categories.items(), key=lambda item: -item[1])), dict(sorted(ranks.items())), dict(most),
        tuple(sorted(longest, key=lambda s: s[3])),
    )  # fmt: skip
