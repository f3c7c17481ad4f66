"""Who held memory when: the allocator's history played again, each allocation with its owner.

A snapshot says where and when, not what for. The owner follows from the pass that made an allocation and from when it was freed:
what a forward pass made and the backward pass freed is an activation; what a backward pass made and the optimizer still found, a
gradient; what the optimizer made and kept, its state; what was there before and stays, parameters; anything that goes in the pass
it came in is temporary. The pass is what the program said (`marks`), or is read from the functions on the stack, of which
autograd's threads have none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np

from shardwise.trace.memory.snapshot import Event, Snapshot

OWNERS = ("parameters", "gradients", "optimizer", "activations", "temporary", "unknown")
ALIGNED = 512
"""Bytes that the allocator's blocks are multiples of."""
POINTS = 400
PLACES = 15
"""Points of a curve, and places named at the peak."""
FORWARD, BACKWARD, OPTIMIZER, OTHER = "forward", "backward", "optimizer", "other"


class Allocation(NamedTuple):
    """Memory from when it was taken until it was given back."""

    start: int
    """Number of the event; -1 where it was there before the history."""
    end: int
    """Number of the event; that of the last plus 1 where it stays."""
    size: int
    owner: str
    place: str
    """The module or the line of code that made it."""


@dataclass(frozen=True)
class MemoryHistory:
    """What a snapshot says of one device."""

    path: str
    rank: int
    device: int
    peak: int
    """Bytes in use at the most."""
    peak_at: int
    """Microseconds from the first event."""
    seconds: float
    reserved: int
    """Bytes that the allocator held at the peak: beyond those in use, what is fragmented or cached."""
    reserved_peak: int
    owners: dict[str, int]
    """Bytes at the peak by owner."""
    places: tuple[tuple[str, str, int, int], ...]
    """What is held at the peak: owner, place, bytes, allocations; the largest first."""
    layers: dict[str, int]
    """Activations at the peak by module, where the program named modules."""
    times: tuple[int, ...]
    curve: dict[str, tuple[int, ...]]
    """Bytes by owner at some times; between them the moment with most is shown, so that no peak is hidden."""
    reserved_curve: tuple[int, ...]
    allocations: int
    retries: int
    """Times that memory ran out, and the allocator gave back what it had cached."""

    @property
    def fragmentation(self) -> float:
        """The share of the reserved bytes that was not in use at the peak."""
        return 1 - self.peak / self.reserved if self.reserved else 0.0


def explain_snapshot(snapshot: Snapshot) -> MemoryHistory:
    """Peak, owners and curve of a snapshot."""
    events = snapshot.events
    found = _allocations(snapshot)
    changes = {name: np.zeros(len(events) + 3, np.int64) for name in OWNERS}
    for each in found:  # place n is the moment before event n, so what the event does is seen at the next
        changes[each.owner][each.start + 1] += each.size
        changes[each.owner][each.end + 1] -= each.size if each.end < len(events) else 0
    held = {name: np.cumsum(change)[: len(events) + 1] for name, change in changes.items()}
    total = sum(held.values(), np.zeros(len(events) + 1, np.int64))
    reserved = _reserved(snapshot)
    top = int(total.argmax())
    alive = [each for each in found if each.start + 1 <= top < each.end + 1]
    grouped: Counter[tuple[str, str]] = Counter()
    counts: Counter[tuple[str, str]] = Counter()
    for each in alive:
        grouped[each.owner, each.place] += each.size
        counts[each.owner, each.place] += 1
    activations = {place: size for (owner, place), size in grouped.items() if owner == "activations"}
    when = np.array([events[0].time if events else 0, *(event.time for event in events)], np.int64)
    when -= when[0]
    bounds = np.unique(np.linspace(0, len(total), min(POINTS, len(total)) + 1).astype(np.int64)).tolist()
    shown = np.array([low + int(total[low:high].argmax()) for low, high in pairwise(bounds)])
    return MemoryHistory(
        snapshot.path, snapshot.rank, snapshot.device, int(total[top]), int(when[top]), float(when[-1]) / 1e6,
        int(reserved[top]), int(reserved.max()), {name: int(line[top]) for name, line in held.items() if line[top]},
        tuple((owner, place, size, counts[owner, place]) for (owner, place), size in grouped.most_common(PLACES)),
        activations if snapshot.marks else {}, tuple(when[shown].tolist()),
        {name: tuple(line[shown].tolist()) for name, line in held.items()},
        tuple(reserved[shown].tolist()), len(found), sum(event.action == "oom" for event in events),
    )  # fmt: skip


def _reserved(snapshot: Snapshot) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Bytes of the segments before each event and after the last: the end is known, and what came before follows from it."""
    signs = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
    changes = np.array([0, *(signs.get(event.action, 0) * event.size for event in snapshot.events)], np.int64)
    grown = np.cumsum(changes)
    return grown + (snapshot.reserved - grown[-1])


class _Open(NamedTuple):
    start: int
    size: int
    frames: tuple[Any, ...]


def _allocations(snapshot: Snapshot) -> list[Allocation]:
    """Every allocation, from its beginning to its end."""
    events = snapshot.events
    passes = _Passes(snapshot)
    living: dict[int, _Open] = {}
    found: list[Allocation] = []
    requested: set[int] = set()
    for number, event in enumerate(events):
        if event.action == "alloc":
            living[event.address] = _Open(number, _aligned(event.size), event.frames)
            requested.discard(event.address)
        elif event.action == "free_requested" or (event.action == "free_completed" and event.address not in requested):
            known = living.pop(event.address, _Open(-1, _aligned(event.size), ()))
            requested.add(event.address)
            found.append(passes.owned(known, number, None))
        elif event.action == "free_completed":
            requested.discard(event.address)
    for block in snapshot.blocks:
        if block.address in requested:  # waits for a stream; its end is in the history already
            continue
        known = living.pop(block.address, _Open(-1, block.size, block.frames))
        found.append(passes.owned(known, len(events), snapshot.owners.get(block.address)))
    # What the history made and the end does not list was freed after the last event that was kept.
    found += [passes.owned(known, len(events), None) for known in living.values()]
    return found


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


class _Passes:
    """In which pass events lie, and who owns what was made in one and freed in another."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.events, self.marks = snapshot.events, snapshot.marks
        self.starts = [when for when, _, _ in snapshot.marks]
        self.known = bool(snapshot.marks) or any(event.frames for event in snapshot.events)
        self.of = [self._pass_of(event) for event in snapshot.events]
        self.backward = self._numbers(BACKWARD)
        self.updates = self._numbers(OPTIMIZER)
        self.forward = self._numbers(FORWARD)

    def _numbers(self, which: str) -> list[int]:
        """Of allocations in a pass."""
        return [n for n, event in enumerate(self.events) if event.action == "alloc" and self.of[n] == which]

    def _pass_of(self, event: Event) -> str:
        if self.marks:
            at = bisect_right(self.starts, event.time)
            return self.marks[at - 1][1] if at else OTHER
        return pass_of_frames(event.frames) if self.known else OTHER

    def owned(self, made: _Open, end: int, known: str | None) -> Allocation:
        """An allocation with its owner."""
        return Allocation(made.start, end, made.size, known or self._owner(made, end), self._place(made))

    def _owner(self, made: _Open, end: int) -> str:
        start, stays = made.start, end == len(self.events)
        if start < 0 and stays:
            function = pass_of_frames(made.frames) if made.frames else OTHER
            return "optimizer" if function == OPTIMIZER else "gradients" if function == BACKWARD else "parameters"
        if not self.known:
            return "unknown"
        which = self.of[start] if start >= 0 else OTHER
        if which == FORWARD:
            return "activations" if _between(self.backward, start, end) or stays else "temporary"
        if which == BACKWARD:
            outlives = stays or _between(self.updates, start, end) or _between(self.forward, start, end)
            return "gradients" if outlives else "temporary"
        if which == OPTIMIZER:
            return "optimizer" if stays or _between(self.forward, start, end) else "temporary"
        if start < 0:  # there before the history, and freed in it
            return "activations" if not _between(self.updates, start, end) else "gradients"
        return "parameters" if stays else "temporary"

    def _place(self, made: _Open) -> str:
        if self.marks:
            at = bisect_right(self.starts, self.events[made.start].time) if made.start >= 0 else 0
            return (self.marks[at - 1][2] or self.marks[at - 1][1]) if at else "before the history"
        line = place_of_frames(made.frames)
        return line or ("before the history" if made.start < 0 else "autograd" if self.known else "not recorded")


def _between(numbers: Sequence[int], start: int, end: int) -> bool:
    """Whether one of some ascending numbers lies after `start` and before `end`."""
    at = bisect_right(numbers, start)
    return at < len(numbers) and numbers[at] < end


def pass_of_frames(frames: Sequence[Any]) -> str:
    """The pass that functions on the stack belong to; autograd's own threads have no Python on theirs."""
    names = [(str(frame.get("filename", "")), str(frame.get("name", ""))) for frame in frames]
    python = [(file, name) for file, name in names if file.endswith(".py")]
    if not python:
        return BACKWARD
    if any("optim" in PurePath(file).parts or "/optim/" in file for file, _ in python):
        return OPTIMIZER
    if any(name in ("backward", "unpack_hook") or name.endswith("_backward") for _, name in python):
        return BACKWARD
    if any(name in ("forward", "_call_impl", "_wrapped_call_impl") for _, name in python):
        return FORWARD
    return OTHER


def place_of_frames(frames: Sequence[Any]) -> str:
    """The innermost line of the user's own code, or of any Python."""
    python = [frame for frame in frames if str(frame.get("filename", "")).endswith(".py")]
    own = [frame for frame in python if "/torch/" not in str(frame["filename"])]
    if not python:
        return ""
    frame = (own or python)[0]
    return f"{PurePath(str(frame['filename'])).name}:{frame.get('line', 0)} {frame.get('name', '')}"
