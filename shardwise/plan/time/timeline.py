"""The predicted timeline of a step: what each pipeline rank computes and sends, and when.

Compute spans are the schedule's own actions. The traffic of an axis is on a stream of its own, at the time of its action. In a step
of very many microbatches some can be left out, since they repeat earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.ledger import Span, Timeline
from shardwise.plan.cost.constants import constants_of
from shardwise.plan.cost.job import Job
from shardwise.plan.time.step import Prepared, Step, prepare, stage_passes, step_time
from shardwise.schedules import Cost, cached_schedule, time

NAMES = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight", "E": "evict", "L": "load"}
TRAFFIC = ("tensor", "context", "expert", "shard")


def timeline(job: Job, most_microbatches: int = 0, known: tuple[Prepared, Step] | None = None) -> Timeline:
    """The timeline of one step, of at most this many microbatches (0: all). `known`: the job, if already prepared and timed."""
    prepared = known[0] if known else prepare(job)
    step = known[1] if known else step_time(prepared)
    count = min(job.microbatches, most_microbatches or job.microbatches)
    spans = list(_actions(prepared, step, count))
    end = max(span.start + span.seconds for span in spans)
    axis = "shard" if float(job.zero_ranks) > 1 else "replicate"
    for rank in range(job.layout.pipeline):
        start = end
        for name, category, stream, seconds in (
            ("gradients", axis, axis, step.tail),
            ("optimizer", "optimizer", "compute", step.optimizer),
            ("other", "other", "compute", step.breakdown["other"]),
        ):
            if seconds > 0:
                spans.append(Span(rank, stream, name, category, start, seconds))
                start += seconds
    return Timeline(tuple(spans), max(span.start + span.seconds for span in spans), job.microbatches - count)


def _actions(prepared: Prepared, step: Step, count: int) -> Iterator[Span]:
    """The compute spans of the schedule, and beside each its exposed traffic."""
    job, cost = prepared.job, step.cost
    lay = job.layout
    if lay.pipeline == 1:  # all stages of the rank as one
        cost = Cost([sum(cost.forward)], [sum(cost.backward_input)], [sum(cost.backward_weight)])
    name, chunks = (lay.schedule, lay.stages_per_rank) if lay.pipeline > 1 else ("1f1b", 1)
    schedule = cached_schedule(name, lay.pipeline, count, chunks)
    timing = time(schedule, cost, 0.0 if job.framework.pipeline_blocks else step.hop, step.handing)
    shares = _traffic_shares(prepared)
    for rank, actions in enumerate(schedule.ranks):
        for action, start, end in zip(actions, timing.start[rank], timing.end[rank], strict=True):
            of = (action.microbatch, action.stage)
            if action.kind == "U":  # the optimizer comes at the end, as in other schedules
                continue
            if action.kind in ("E", "L"):
                if schedule.placement[action.stage] == rank and step.handing:
                    yield Span(rank, "pipeline", NAMES[action.kind], "pipeline", start, step.handing, *of)
                continue
            category = "matmul" if action.kind == "F" else "attention"
            yield Span(rank, "compute", NAMES[action.kind], category, start, end - start, *of)
            for axis, share in shares[action.stage].items():
                yield Span(rank, axis, f"{axis} traffic", axis, start, share * (end - start), *of)
            if lay.pipeline > 1 and step.hop and action.kind != "W":
                goes = action.stage + 1 if action.kind == "F" else action.stage - 1
                if 0 <= goes < schedule.stages and schedule.placement[goes] != rank:
                    yield Span(rank, "pipeline", f"to stage {goes}", "pipeline", end, step.hop, *of)


def _traffic_shares(prepared: Prepared) -> list[dict[str, float]]:
    """For each stage, the share of its passes that the exposed traffic of each axis takes."""
    constants, kinds = constants_of(prepared.job), []
    for stage, data in zip(prepared.stages, prepared.data, strict=True):
        own = stage_passes(prepared.job, stage, data, constants)
        whole = float(own.forward + own.backward_input + own.backward_weight)
        shares = {axis: float(own.parts.get(axis, 0.0)) / whole for axis in TRAFFIC}
        kinds.append({axis: share for axis, share in shares.items() if share > 0.002})
    return [kinds[k] for k in prepared.kinds]
