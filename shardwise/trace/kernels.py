"""Device time by kernel and by module, runtime calls by name, and FLOPs by module, over the profiled ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from shardwise.trace.answers import PASSES, CallTime, Flops, KernelTime, Modules, ModuleTime
from shardwise.trace.attribution import NO_LAUNCH, UNATTRIBUTED
from shardwise.trace.flops import CONVENTION, event_flops
from shardwise.trace.kernel_names import CATEGORIES_BY_NAME
from shardwise.trace.rank import Rank
from shardwise.trace.reading.integers import Integers
from shardwise.trace.spans.activity import CLASSES, COMPUTE, spans_of
from shardwise.trace.spans.intervals import distinct, sums, total

MOST_KERNELS = MOST_MODULES = 2000
"""Names that have a row each; the rest, which took least, is summed in one row."""


def kernel_times(ranks: Mapping[int, Rank]) -> tuple[KernelTime, ...]:
    """Kernels sorted by total time, one entry for each name and class."""
    count: dict[tuple[str, int], int] = defaultdict(int)
    longest: dict[tuple[str, int], int] = defaultdict(int)
    times: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)
    modules: dict[tuple[str, int], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for rank, r in ranks.items():
        activity, attribution, names = r.activity, r.attribution, r.profile.events.names
        rows = np.flatnonzero(r.rows)
        length = (activity.end - activity.start)[rows]
        key = activity.name[rows].astype(np.int64) * len(CLASSES) + activity.kind[rows]
        keys, which = np.unique(key, return_inverse=True)
        named = [(names[one // len(CLASSES)], one % len(CLASSES)) for one in keys.tolist()]
        most = np.zeros(len(keys), np.int64)
        np.maximum.at(most, which, length)
        # Several segments of an operator's self time are one call: calls are counted by event.
        events = len(r.profile.events)
        calls = distinct(which * events + activity.event[rows]) // events if activity.on_host else which
        width = len(attribution.names)
        pairs, pair = np.unique(which * width + attribution.owner[rows], return_inverse=True)
        for one, share in zip(pairs.tolist(), sums(pair, length, len(pairs)).tolist(), strict=True):
            modules[named[one // width]][attribution.names[one % width]] += share
        columns = (np.bincount(calls, minlength=len(keys)), most, sums(which, length, len(keys)))
        for name, number, high, time in zip(named, *(column.tolist() for column in columns), strict=True):
            count[name] += number
            longest[name] = max(longest[name], high)
            times[name][rank] = time
    totals = {key: sum(of.values()) for key, of in times.items()}
    everything = sum(totals.values())
    order = sorted(times, key=lambda key: (-totals[key], key[0]))
    found = [(name, kind, [(name, kind)]) for name, kind in order[:MOST_KERNELS]]
    for kind in range(len(CLASSES)):
        rest = [key for key in order[MOST_KERNELS:] if key[1] == kind]
        found += [(f"({len(rest)} other kernels)", kind, rest)] if rest else []
    return tuple(
        KernelTime(
            name, CLASSES[kind], sum(count[key] for key in of), total := sum(totals[key] for key in of),
            max(longest[key] for key in of), total / everything if everything else 0.0, _summed(times[key] for key in of),
            max(modules[name, kind].items(), key=lambda m: m[1], default=("", 0))[0],
        )
        for name, kind, of in found
    )  # fmt: skip


def _summed(times: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """Sums by rank."""
    found: dict[int, int] = defaultdict(int)
    for of in times:
        for rank, time in of.items():
            found[rank] += time
    return dict(sorted(found.items()))


def module_times(ranks: Mapping[int, Rank], flops: Mapping[int, Mapping[str, float]]) -> Modules:
    """Device time by module and pass, sorted by total time. `flops` are by rank and module."""
    passes: dict[str, Integers] = defaultdict(lambda: np.zeros(len(PASSES), np.int64))
    kernels: dict[str, int] = defaultdict(int)
    times: dict[str, dict[int, int]] = defaultdict(dict)
    attributed: dict[int, float] = {}
    inside: dict[int, float] = {}
    for rank, r in ranks.items():
        activity, attribution = r.activity, r.attribution
        rows = np.flatnonzero(r.rows)
        owner = attribution.owner[rows]
        length = (activity.end - activity.start)[rows]
        table = np.zeros((len(attribution.names), len(PASSES)), np.int64)
        np.add.at(table, (owner, attribution.passes[rows]), length)
        counted = np.bincount(owner, minlength=len(attribution.names))
        for at in np.flatnonzero(counted).tolist():
            name = attribution.names[at]
            passes[name] += table[at]
            kernels[name] += int(counted[at])
            times[name][rank] = int(table[at].sum())
        known = [name not in (UNATTRIBUTED, NO_LAUNCH) for name in attribution.names]
        everything = int(length.sum())
        attributed[rank] = int(table[known].sum()) / everything if everything else 0.0
        inside[rank] = int(table[attribution.is_module].sum()) / everything if everything else 0.0
    totals = {name: int(of.sum()) for name, of in passes.items()}
    order = sorted(passes, key=lambda name: (-totals[name], name))
    rest = order[MOST_MODULES:]
    named = [(name, [name]) for name in order[:MOST_MODULES]]
    named += [(f"({len(rest)} other modules)", rest)] if rest else []
    found = [
        ModuleTime(
            name,
            dict(zip(PASSES, np.sum([passes[one] for one in of], axis=0).tolist(), strict=True)),
            sum(kernels[one] for one in of),
            sum(of_rank.get(one, 0.0) for of_rank in flops.values() for one in of),
            _summed(times[one] for one in of),
        )
        for name, of in named
    ]
    return Modules(tuple(found), attributed, inside)


def call_times(ranks: Mapping[int, Rank]) -> tuple[CallTime, ...]:
    """Driver and runtime calls, sorted by total time."""
    count: dict[str, int] = defaultdict(int)
    time: dict[str, dict[int, int]] = defaultdict(dict)
    for rank, r in ranks.items():
        events = r.profile.events
        rows = np.flatnonzero(events.of_kind("runtime"))
        rows = rows[r.on_host(rows)]
        counts = np.bincount(events.name[rows], minlength=len(events.names))
        totals = sums(events.name[rows], events.duration[rows], len(events.names))
        for at in np.flatnonzero(counts).tolist():
            count[events.names[at]] += int(counts[at])
            time[events.names[at]][rank] = int(totals[at])
    found = [CallTime(name, count[name], sum(of.values()), of) for name, of in time.items()]
    return tuple(sorted(found, key=lambda row: (-row.total, row.name)))


def flops_of_ranks(ranks: Mapping[int, Rank], peak: float) -> tuple[Flops, dict[int, dict[str, float]]]:
    """FLOPs of each rank, and of its modules; `peak` is FLOP/s of one device, 0 if unknown."""
    by_module: dict[int, dict[str, float]] = {}
    known: dict[int, float] = {}
    for rank, r in ranks.items():
        event, flops = event_flops(r.profile)
        known[rank] = _known_share(r, event)
        inside = r.on_host(event)
        event, flops = event[inside], flops[inside]
        found = r.finder.find(r.profile.events.track[event], r.profile.events.start[event])
        sums = np.bincount(found.owner, flops, minlength=len(found.names))
        by_module[rank] = {found.names[at]: float(sums[at]) for at in np.flatnonzero(sums)}
    each = {rank: sum(of.values()) for rank, of in by_module.items() if of}
    span = {rank: total(ranks[rank].windows) for rank in each}
    used = {rank: each[rank] / (peak * span[rank] / 1e9) for rank in each if peak and span[rank]}
    return Flops(CONVENTION, each, peak, used, {rank: known[rank] for rank in each}), by_module


def _known_share(rank: Rank, counted: Integers) -> float:
    """Share of the time of GEMM and attention kernels that counted operators launched."""
    activity, events = rank.activity, rank.profile.events
    rows = np.flatnonzero(
        rank.rows & (activity.kind == COMPUTE) & (activity.category != CATEGORIES_BY_NAME.index("memory"))
    )
    length = (activity.end - activity.start)[rows]
    if not int(length.sum()):
        return 1.0
    mask = np.zeros(len(events), np.bool_)
    mask[counted] = True
    track, time = activity.issued
    inside = spans_of(events, mask).innermost(track[rows], time[rows]) >= 0
    return int(length[inside].sum()) / int(length.sum())
