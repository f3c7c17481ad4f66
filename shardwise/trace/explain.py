"""All answers about some ranks of a job, gathered: each rank by itself first, then what only several ranks together tell (clocks,
waiting, the pipeline, the critical path), then what to change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwise.trace.advice.findings import findings
from shardwise.trace.answers import (
    CallTime,
    Clock,
    CriticalPath,
    Explanation,
    Flops,
    Modules,
    PipelineStep,
    Straggler,
    spread,
)
from shardwise.trace.categories import categories
from shardwise.trace.critical import chain, connect, critical_path
from shardwise.trace.flops import CONVENTION, event_flops
from shardwise.trace.idle import idle_causes
from shardwise.trace.kernels import kernels, modules
from shardwise.trace.launches import launch_queue
from shardwise.trace.memory import memory
from shardwise.trace.pipeline import Executed, executed, pipelines
from shardwise.trace.ranks import Rank
from shardwise.trace.reading.events import Profile
from shardwise.trace.sending.matching import (
    Matches,
    Part,
    Waiting,
    clocks,
    first_ones,
    left_together,
    match,
    trusted,
    waiting,
)
from shardwise.trace.sending.traffic import axis_times, moved
from shardwise.trace.spans.activity import lost_launches
from shardwise.trace.spans.breakdown import break_down
from shardwise.trace.spans.classes import COMMUNICATION, COMPUTE, COPY, Classified, classify
from shardwise.trace.spans.intervals import difference, intersect, join, total, window
from shardwise.trace.spans.steps import Chosen
from shardwise.trace.stragglers import stragglers
from shardwise.trace.timeline import timeline
from shardwise.trace.unseen import unseen


def explain(
    profiles: Sequence[Profile],
    chosen: Mapping[int, Chosen],
    *,
    classified: Mapping[int, Classified] | None = None,
    peak_flops: float = 0.0,
    progress: Callable[[str], None] | None = None,
) -> Explanation:
    """Explain some ranks of one job. `chosen` says what is looked at of each rank, `peak_flops` what its device could do a
    second; `progress` is told what is being worked out."""
    say = progress or (lambda _: None)
    known = classified or {}
    ranks = {
        p.rank: Rank(p, chosen[p.rank], known.get(p.rank) or classify(p))
        for p in sorted(profiles, key=lambda p: p.rank)
        if len(chosen[p.rank].windows.start)
    }
    say("messages")
    parts = [Part(rank, r.sent, r.profile.base, r.step_of(r.sent.start)) for rank, r in ranks.items()]
    matches = trusted(parts, match(parts))
    clock = clocks(parts, matches)
    offsets = {rank: one.offset for rank, one in clock.items()}
    waited = waiting(parts, matches, offsets)
    together = _Together(ranks, clock, matches, waited, first_ones(parts, matches), left_together(parts, matches))
    say("modules")
    flops, by_module = _flops(ranks, peak_flops)
    breakdowns = {rank: asdict(break_down(r.classified, r.chosen.windows)) for rank, r in ranks.items()}
    say("critical path")
    answers = Explanation(
        world=max([len(ranks), *(p.world for p in profiles)]),
        seen=tuple(ranks),
        devices={rank: _device(r.profile) for rank, r in ranks.items()},
        steps=tuple(sorted({number for r in ranks.values() for number in r.chosen.numbers})),
        step_time=max(
            (b["span"] // max(len(ranks[rank].chosen.steps), 1) for rank, b in breakdowns.items()), default=0
        ),
        ranks=breakdowns,
        spreads={
            name: spread({rank: b[name] for rank, b in breakdowns.items()})
            for name in next(iter(breakdowns.values()), {})
        },
        clocks=clock,
        axes=axis_times(together.moved(), {rank: r.sent for rank, r in ranks.items()}),
        categories={rank: categories(r.activity, r.sent, r.places, r.chosen.windows) for rank, r in ranks.items()},
        idle={rank: idle_causes(r.activity, r.idle) for rank, r in ranks.items()},
        exposed_copy={rank: _exposed_copy(r) for rank, r in ranks.items()},
        kernels=kernels(
            {rank: r.activity for rank, r in ranks.items()},
            {rank: r.rows for rank, r in ranks.items()},
            {rank: r.places for rank, r in ranks.items()},
        ),
        calls=_calls(ranks),
        modules=_modules(ranks, by_module),
        launches={
            rank: queue
            for rank, r in ranks.items()
            if (queue := launch_queue(r.activity, r.rows, total(r.chosen.windows))) is not None
        },
        pipelines=together.pipelines(),
        stragglers=(),
        critical_path=together.critical_path(),
        memory={rank: memory(r.profile, r.steps[0][1], r.steps[-1][2]) for rank, r in ranks.items()},
        flops=flops,
        findings=(),
        waits=together.waits(),
        timeline=timeline({rank: (r.activity, r.sent, r.chosen.windows) for rank, r in ranks.items()}, together.shifts),
        unseen=(),
    )
    say("findings")
    answers = replace(answers, stragglers=together.stragglers(answers.step_time))
    return replace(
        answers,
        findings=findings(answers),
        unseen=unseen(answers, matches.dropped, {rank: _lost(r) for rank, r in ranks.items()}),
    )


@dataclass(frozen=True)
class _Together:
    """What several ranks tell together."""

    ranks: Mapping[int, Rank]
    clocks: Mapping[int, Clock]
    matches: Matches
    waited: Waiting
    first: NDArray[np.bool_]
    """Which rows of the matches are of a collective that came first."""
    together: NDArray[np.bool_]
    """Which are of collectives that all ranks leave together."""

    @cached_property
    def origin(self) -> int:
        """The first moment looked at, on the reference clock."""
        begins = [r.steps[0][1] + r.profile.base + self.clocks[rank].offset for rank, r in self.ranks.items()]
        return min(begins, default=0)

    @cached_property
    def shifts(self) -> dict[int, int]:
        """What takes each profile's times to nanoseconds after the origin."""
        return {rank: r.profile.base + self.clocks[rank].offset - self.origin for rank, r in self.ranks.items()}

    def moved(self) -> dict[int, dict]:
        """Messages by axis and collective on each rank."""
        found = {}
        for rank, r in self.ranks.items():
            mine = self.matches.rank == rank
            wait, matched = np.zeros(len(r.sent), np.int64), np.zeros(len(r.sent), np.bool_)
            wait[self.matches.message[mine]] = self.waited.wait[mine]
            matched[self.matches.message[mine]] = True
            looked_at = r.step_of(r.sent.start) >= 0
            found[rank] = moved(r.sent, looked_at, wait, matched, r.chosen.windows, r.computing)
        return found

    def waits(self) -> dict[int, int]:
        """What each rank waited in collectives, but for the first; waiting for another stage is the pipeline's."""
        counted = self.together & ~self.first
        return {rank: int(self.waited.wait[counted & (self.matches.rank == rank)].sum()) for rank in self.ranks}

    def pipelines(self) -> tuple[PipelineStep, ...]:
        """Pipelines as they were executed."""
        steps: dict[int, dict[int, Executed]] = defaultdict(dict)
        for rank, r in self.ranks.items():
            for number, start, end in r.steps:
                one = executed(r.activity, r.sent, self.shifts[rank], start, end)
                if one is not None:
                    steps[number][rank] = one
        return pipelines({rank: r.profile for rank, r in self.ranks.items()}, steps)

    def stragglers(self, step_time: int) -> tuple[Straggler, ...]:
        """Ranks that others wait for."""
        compute = {
            rank: [total(intersect(r.computing, window(start, end))) for _, start, end in r.steps]
            for rank, r in self.ranks.items()
        }
        steps = max((len(r.steps) for r in self.ranks.values()), default=1)
        profiles = {rank: r.profile for rank, r in self.ranks.items()}
        return stragglers(profiles, compute, step_time, self.matches, self.waited, self.first, self.clocks, steps)

    def critical_path(self) -> CriticalPath | None:
        """From the first moment looked at to the end of the last thing that began in the windows."""
        chains = {rank: chain(r.activity, r.sent, self.shifts[rank]) for rank, r in self.ranks.items()}
        shifted = replace(self.waited, arrival=self.waited.arrival - self.origin)
        connect(chains, {rank: r.sent for rank, r in self.ranks.items()}, self.matches, shifted)
        end = max((r.steps[-1][2] + self.shifts[rank] for rank, r in self.ranks.items()), default=0)
        return critical_path(chains, 0, end)


def _lost(rank: Rank) -> int:
    """Launches in the windows whose work is not in the profile."""
    calls = lost_launches(rank.activity)
    return int(rank.on_host(calls).sum())


def _exposed_copy(rank: Rank) -> int:
    busy = join(rank.classified.intervals(COMPUTE), rank.classified.intervals(COMMUNICATION))
    return total(intersect(difference(rank.classified.intervals(COPY), busy), rank.chosen.windows))


def _device(profile: Profile) -> str:
    """The name of the device that a rank's kernels ran on."""
    used = {lane.device for lane in profile.events.lanes if lane.stream >= 0}
    return next((device.name for device in profile.devices if device.number in used), "")


def _calls(ranks: Mapping[int, Rank]) -> tuple[CallTime, ...]:
    count: dict[str, int] = defaultdict(int)
    time: dict[str, dict[int, int]] = defaultdict(dict)
    for rank, r in ranks.items():
        events = r.profile.events
        rows = np.flatnonzero(events.of_kind("runtime"))
        rows = rows[r.on_host(rows)]
        counts = np.bincount(events.name[rows], minlength=len(events.names))
        totals = np.zeros(len(events.names), np.int64)
        np.add.at(totals, events.name[rows], events.duration[rows])
        for at in np.flatnonzero(counts).tolist():
            count[events.names[at]] += int(counts[at])
            time[events.names[at]][rank] = int(totals[at])
    rows_found = [CallTime(name, count[name], sum(of.values()), of) for name, of in time.items()]
    return tuple(sorted(rows_found, key=lambda row: (-row.total, row.name)))


def _modules(ranks: Mapping[int, Rank], by_module: Mapping[int, Mapping[str, float]]) -> Modules:
    activities = {rank: r.activity for rank, r in ranks.items()}
    return modules(
        activities,
        {rank: r.rows for rank, r in ranks.items()},
        {rank: r.places for rank, r in ranks.items()},
        by_module,
    )


def _flops(ranks: Mapping[int, Rank], peak: float) -> tuple[Flops, dict[int, dict[str, float]]]:
    """Operations of each rank, and of its modules."""
    by_module: dict[int, dict[str, float]] = {}
    for rank, r in ranks.items():
        event, operations = event_flops(r.profile)
        events = r.profile.events
        inside = r.on_host(event)
        event, operations = event[inside], operations[inside]
        places = r.finder.find(events.lane[event], events.start[event])
        sums = np.bincount(places.place, operations, minlength=len(places.names))
        by_module[rank] = {places.names[at]: float(sums[at]) for at in np.flatnonzero(sums)}
    each = {rank: sum(of.values()) for rank, of in by_module.items() if of}
    used = {
        rank: operations / (peak * total(ranks[rank].chosen.windows) / 1e9)
        for rank, operations in each.items()
        if peak and total(ranks[rank].chosen.windows)
    }
    return Flops(CONVENTION, each, peak, used), by_module
