"""Kernels by name, and device time by module, over the ranks: how often, how long, what share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from shardwise.trace.answers import PASSES, KernelTime, Modules, ModuleTime
from shardwise.trace.places import NO_LAUNCH, NO_PLACE, Places
from shardwise.trace.reading.events import Integers
from shardwise.trace.spans.activity import Activity
from shardwise.trace.spans.classes import CLASSES
from shardwise.trace.spans.nesting import distinct


def kernels(
    activities: Mapping[int, Activity], chosen: Mapping[int, NDArray[np.bool_]], places: Mapping[int, Places]
) -> tuple[KernelTime, ...]:
    """Names by total time; `chosen` says which rows of each rank are looked at. A name that stands for computing on one rank
    does so on all."""
    count: dict[tuple[str, int], int] = defaultdict(int)
    longest: dict[tuple[str, int], int] = defaultdict(int)
    ranks: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)
    modules: dict[tuple[str, int], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for rank, activity in activities.items():
        rows = np.flatnonzero(chosen[rank])
        if not len(rows):
            continue
        length = (activity.end - activity.start)[rows]
        key = activity.name[rows].astype(np.int64) * len(CLASSES) + activity.kind[rows]
        keys, which = np.unique(key, return_inverse=True)
        total, most = np.zeros(len(keys), np.int64), np.zeros(len(keys), np.int64)
        np.add.at(total, which, length)
        np.maximum.at(most, which, length)
        # A piece of an operator's own time is not a call of it: calls are counted by their events.
        most_events = len(activity.profile.events)
        calls = distinct(which * most_events + activity.event[rows]) // most_events if activity.on_host else which
        times = np.bincount(calls, minlength=len(keys))
        width = len(places[rank].names)
        pairs, pair = np.unique(which * width + places[rank].place[rows], return_inverse=True)
        shares = np.zeros(len(pairs), np.int64)
        np.add.at(shares, pair, length)
        for at, place, share in zip((pairs // width).tolist(), (pairs % width).tolist(), shares.tolist(), strict=True):
            one = int(keys[at])
            name = (activity.profile.events.names[one // len(CLASSES)], one % len(CLASSES))
            modules[name][places[rank].names[place]] += share
        for at, one in enumerate(keys.tolist()):
            name = (activity.profile.events.names[one // len(CLASSES)], one % len(CLASSES))
            count[name] += int(times[at])
            longest[name] = max(longest[name], int(most[at]))
            ranks[name][rank] = int(total[at])
    everything = sum(sum(of.values()) for of in ranks.values())
    rows_found = [
        KernelTime(
            name, CLASSES[kind], count[name, kind], sum(of.values()), longest[name, kind],
            sum(of.values()) / everything if everything else 0.0, of, max(modules[name, kind].items(), key=lambda m: m[1])[0],
        )
        for (name, kind), of in ranks.items()
    ]  # fmt: skip
    return tuple(sorted(rows_found, key=lambda row: (-row.total, row.name)))


def modules(
    activities: Mapping[int, Activity],
    chosen: Mapping[int, NDArray[np.bool_]],
    places: Mapping[int, Places],
    flops: Mapping[int, Mapping[str, float]],
) -> Modules:
    """Device time by module and pass, by total time; `places` has one place for each row of the activity."""
    passes: dict[str, Integers] = defaultdict(lambda: np.zeros(len(PASSES), np.int64))
    kernel: dict[str, int] = defaultdict(int)
    ranks: dict[str, dict[int, int]] = defaultdict(dict)
    attributed: dict[int, float] = {}
    inside: dict[int, float] = {}
    for rank, activity in activities.items():
        rows = np.flatnonzero(chosen[rank])
        place = places[rank]
        length = (activity.end - activity.start)[rows]
        table = np.zeros((len(place.names), len(PASSES)), np.int64)
        np.add.at(table, (place.place[rows], place.passes[rows]), length)
        counted = np.bincount(place.place[rows], minlength=len(place.names))
        everything = int(length.sum())
        for at, name in enumerate(place.names):
            if counted[at]:
                passes[name] += table[at]
                kernel[name] += int(counted[at])
                ranks[name][rank] = int(table[at].sum())
        told = [name not in (NO_PLACE, NO_LAUNCH) for name in place.names]
        attributed[rank] = int(table[told].sum()) / everything if everything else 0.0
        inside[rank] = int(table[place.module].sum()) / everything if everything else 0.0
    by_module: dict[str, float] = defaultdict(float)
    for of_rank in flops.values():
        for name, operations in of_rank.items():
            by_module[name] += operations
    rows_found = [
        ModuleTime(
            name,
            dict(zip(PASSES, passes[name].tolist(), strict=True)),
            kernel[name],
            by_module.get(name, 0.0),
            ranks[name],
        )
        for name in passes
    ]
    return Modules(tuple(sorted(rows_found, key=lambda row: (-row.total, row.module))), attributed, inside)
