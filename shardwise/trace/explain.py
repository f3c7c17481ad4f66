"""All answers about the profiled ranks of a job: each rank by itself, then across ranks (clocks, waiting, pipeline, critical path),
then what to change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np

from shardwise.trace.advice import findings, not_recorded
from shardwise.trace.answers import CommTime, Explanation, spread
from shardwise.trace.comms.matching import (
    Matches,
    Waiting,
    clocks,
    drop_mismatched,
    first_collective_rows,
    match,
    synchronising_rows,
    waiting,
)
from shardwise.trace.comms.overlap import axis_times, comm_times
from shardwise.trace.critical_path import critical_path
from shardwise.trace.idle import categories, idle_causes, launch_queue
from shardwise.trace.kernels import call_times, flops_of_ranks, kernel_times, module_times
from shardwise.trace.pipeline import pipelines
from shardwise.trace.rank import Rank
from shardwise.trace.reading.profile import Profile
from shardwise.trace.spans.activity import COMMUNICATION, COMPUTE, COPY
from shardwise.trace.spans.intervals import difference, intersect, total
from shardwise.trace.spans.steps import break_down
from shardwise.trace.stragglers import stragglers
from shardwise.trace.timeline import memory, timeline

UNNAMED_DEVICE = "a GPU that the profile does not name"


def explain(given: Sequence[Rank], peak_flops: float = 0.0) -> Explanation:
    """Explain the profiled ranks of one job; those without a window are left out. `peak_flops` is FLOP/s of one device."""
    ranks = {r.profile.rank: r for r in sorted(given, key=lambda r: r.profile.rank) if len(r.windows.start)}
    matches = drop_mismatched(ranks, match(ranks))
    clock = clocks(ranks, matches)
    waited = waiting(ranks, matches, {rank: one.offset for rank, one in clock.items()})
    first = first_collective_rows(ranks, matches)
    counted = synchronising_rows(ranks, matches) & ~first
    absolute = {rank: r.profile.base + clock[rank].offset for rank, r in ranks.items()}
    origin = min((r.steps[0][1] + absolute[rank] for rank, r in ranks.items()), default=0)
    shifts = {rank: base - origin for rank, base in absolute.items()}
    flops, flops_by_module = flops_of_ranks(ranks, peak_flops)
    breakdowns = {rank: asdict(break_down(r.activity, r.windows)) for rank, r in ranks.items()}
    step_counts = {rank: max(len(r.selection.steps), 1) for rank, r in ranks.items()}
    step_time = max((b["span"] // step_counts[rank] for rank, b in breakdowns.items()), default=0)
    queues = {rank: launch_queue(r) for rank, r in ranks.items()}
    answers = Explanation(
        world=max([len(ranks), *(r.profile.world for r in given)]),
        seen=tuple(ranks),
        devices={rank: _device(r.profile) for rank, r in ranks.items()},
        steps=tuple(sorted({number for r in ranks.values() for number in r.selection.numbers})),
        step_time=step_time,
        ranks=breakdowns,
        spreads={
            name: spread({rank: b[name] for rank, b in breakdowns.items()})
            for name in next(iter(breakdowns.values()), {})
        },
        clocks=clock,
        axes=axis_times(
            {rank: _comm_times(r, matches, waited) for rank, r in ranks.items()},
            {rank: r.comms for rank, r in ranks.items()},
        ),
        categories={rank: categories(r) for rank, r in ranks.items()},
        idle={rank: idle_causes(r) for rank, r in ranks.items()},
        exposed_copy={rank: _exposed_copy(r) for rank, r in ranks.items()},
        kernels=kernel_times(ranks),
        calls=call_times(ranks),
        modules=module_times(ranks, flops_by_module),
        launches={rank: queue for rank, queue in queues.items() if queue is not None},
        pipelines=pipelines(ranks, shifts),
        stragglers=stragglers(ranks, step_time, matches, waited, first, clock),
        critical_path=critical_path(ranks, shifts, matches, replace(waited, arrival=waited.arrival - origin)),
        memory={rank: memory(r.profile, r.steps[0][1], r.steps[-1][2]) for rank, r in ranks.items()},
        flops=flops,
        findings=(),
        # Waiting for another stage is pipeline bubble, not counted here.
        waits={
            rank: int(waited.wait[rows][counted[rows]].sum()) for rank in ranks for rows in (matches.rows_of(rank),)
        },
        timeline=timeline(ranks, clock),
        step_counts=step_counts,
    )
    lost = {rank: int(r.on_host(r.activity.lost_launches).sum()) for rank, r in ranks.items()}
    return replace(answers, findings=findings(answers), unseen=not_recorded(answers, matches.dropped, lost))


def _comm_times(rank: Rank, matches: Matches, waited: Waiting) -> dict[tuple[str, str], CommTime]:
    """Collective events of one rank by axis and collective."""
    comms = rank.comms
    mine = matches.rows_of(rank.profile.rank)
    wait, matched = np.zeros(len(comms), np.int64), np.zeros(len(comms), np.bool_)
    wait[matches.event[mine]] = waited.wait[mine]
    matched[matches.event[mine]] = True
    return comm_times(comms, rank.step_of(comms.start) >= 0, wait, matched, rank.windows, rank.computing)


def _exposed_copy(rank: Rank) -> int:
    copies, others = rank.activity.intervals(COPY), rank.activity.intervals(COMPUTE, COMMUNICATION)
    return total(intersect(difference(copies, others), rank.windows))


def _device(profile: Profile) -> str:
    """Name of the device that ran a rank's kernels, "" if it has none: kernels decide, since not every file names its devices."""
    return "" if not profile.used_devices else next((d.name for d in profile.used_devices if d.name), UNNAMED_DEVICE)
