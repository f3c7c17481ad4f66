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

from shardwise.trace.activity import Activity, activity, lost_launches, spans_of
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
from shardwise.trace.axes import UNKNOWN
from shardwise.trace.breakdown import break_down
from shardwise.trace.categories import categories
from shardwise.trace.classes import COMMUNICATION, COMPUTE, COPY, Classified, classify
from shardwise.trace.critical import chain, connect, critical_path
from shardwise.trace.events import Integers, Profile
from shardwise.trace.findings import findings
from shardwise.trace.flops import CONVENTION, event_flops
from shardwise.trace.idle import idle_causes
from shardwise.trace.intervals import Intervals, difference, intersect, join, total, window
from shardwise.trace.kernels import kernels, modules
from shardwise.trace.launches import launch_queue
from shardwise.trace.matching import Matches, Part, Waiting, clocks, first_ones, match, trusted, waiting
from shardwise.trace.memory import memory
from shardwise.trace.pipeline import Executed, executed, pipelines
from shardwise.trace.places import Finder, Places
from shardwise.trace.sent import Sent, sent
from shardwise.trace.steps import Chosen
from shardwise.trace.stragglers import stragglers
from shardwise.trace.timeline import timeline
from shardwise.trace.traffic import axis_times, moved


@dataclass(frozen=True)
class Rank:
    """One rank, and what is worked out of it once."""

    profile: Profile
    chosen: Chosen
    classified: Classified

    @cached_property
    def activity(self) -> Activity:
        """What kept it busy."""
        return activity(self.profile, self.classified)

    @cached_property
    def sent(self) -> Sent:
        """Its messages."""
        return sent(self.activity)

    @cached_property
    def finder(self) -> Finder:
        """Where its work belongs."""
        return Finder(self.profile)

    @cached_property
    def steps(self) -> tuple[tuple[int, int, int], ...]:
        """Number, start and end of each step; the window as step 0 when there are none."""
        if self.chosen.steps:
            return tuple((step.number, step.start, step.end) for step in self.chosen.steps)
        return tuple((0, int(start), int(end)) for start, end in zip(*self.chosen.windows, strict=True))

    def step_of(self, time: Integers) -> Integers:
        """The step each moment lies in, -1 for none."""
        out = np.full(len(time), -1, np.int64)
        for number, start, end in self.steps:
            out[(time >= start) & (time < end)] = number
        return out

    def on_host(self, event: Integers) -> NDArray[np.bool_]:
        """Which of these events on the host are looked at: those in the steps, or all where there are none, since the window is
        then that of the device."""
        if not self.chosen.steps:
            return np.ones(len(event), np.bool_)
        return self.step_of(self.profile.events.start[event]) >= 0

    @cached_property
    def rows(self) -> NDArray[np.bool_]:
        """Rows of the activity that begin in the windows."""
        return self.step_of(self.activity.start) >= 0

    @cached_property
    def computing(self) -> Intervals:
        """When it computed, within the windows."""
        return intersect(self.classified.intervals(COMPUTE), self.chosen.windows)

    @cached_property
    def idle(self) -> Intervals:
        """When it did nothing, within the windows."""
        return difference(self.chosen.windows, self.classified.intervals())

    @cached_property
    def places(self) -> Places:
        """Module and pass of each row of the activity, by its launch."""
        events, rows = self.profile.events, self.activity
        if rows.on_host:
            # What a backend's thread does belongs where it was asked for.
            carried = (self.sent.carrier >= 0) & (events.lane[self.sent.carrier] != events.lane[self.sent.call])
            call = np.full(len(events) + 1, -1, np.int64)
            call[self.sent.carrier[carried]] = self.sent.call[carried]
            asked = np.zeros(len(events), np.bool_)
            asked[self.sent.carrier[carried]] = True
            by = call[spans_of(events, asked).innermost(rows.lane, rows.start)]
            lane, time = np.where(by >= 0, events.lane[by], rows.lane), np.where(by >= 0, events.start[by], rows.start)
            return self.finder.find(lane, time)
        known = rows.launch >= 0
        lane = np.where(known, events.lane[rows.launch], -1)
        return self.finder.find(lane, np.where(known, events.start[rows.launch], 0))


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
    together = _Together(ranks, clock, matches, waited, first_ones(parts, matches))
    say("modules")
    flops, by_module = _flops(ranks, peak_flops)
    breakdowns = {rank: asdict(break_down(r.classified, r.chosen.windows)) for rank, r in ranks.items()}
    say("critical path")
    answers = Explanation(
        world=max((p.world for p in profiles), default=0) if profiles else 0,
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
        """What each rank waited in collectives, but for the first."""
        return {rank: int(self.waited.wait[~self.first & (self.matches.rank == rank)].sum()) for rank in self.ranks}

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


def unseen(answers: Explanation, dropped: int, lost: Mapping[int, int]) -> tuple[str, ...]:
    """What these profiles do not show, in sentences."""
    said = []
    missing = answers.world - len(answers.seen)
    if missing > 0:
        said.append(f"{missing} of {answers.world} ranks were not given: waiting for them counts as transfer")
    gone = sum(lost[rank] for rank in answers.launches)
    if gone:
        said.append(
            f"{gone} launches (of CUDA graphs, or lost) have no kernels in the profile: what they did looks idle, cause unknown"
        )
    if any(row.axis == UNKNOWN for row in answers.axes):
        said.append(
            "some messages name no process group, so their axis is unknown and collectives are matched as if of one group"
        )
    unsized = sum(row.total.messages - row.total.sized for row in answers.axes)
    if unsized:
        said.append(
            f"the size of {unsized} messages is not in the profile, so their bytes and bandwidth are not counted"
        )
    if dropped:
        said.append(
            f"{dropped} messages could not be matched: ranks do not have as many of them, or they do not end together"
        )
    if len(answers.seen) > 1 and any(clock.uncertainty < 0 for clock in answers.clocks.values()):
        said.append("clocks of some ranks could not be compared, since they share no matched collective")
    if answers.modules.rows and not any(answers.modules.in_modules.values()):
        said.append("no modules: record with labels, with_modules or with_stack to see kernels by module")
    if not answers.flops.ranks:
        said.append("no operations: record_shapes=True would tell them")
    if not any(answers.memory.values()):
        said.append("no memory over time: profile_memory=True would tell it")
    if not any(answers.devices.values()) and not answers.launches:
        said.append("no device: times are those of operators on the host's threads")
    return tuple(said)
