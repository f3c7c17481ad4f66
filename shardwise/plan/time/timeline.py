"""The predicted timeline of a step: what each pipeline rank computes and sends, and when.

Compute spans are the schedule's own actions; the traffic of an axis lies on its own stream, under the action it belongs to.
Of a step of very many microbatches some can be left out, since they repeat those before.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.ledger import Span, Timeline
from shardwise.plan.cost.constants import constants_of
from shardwise.plan.cost.job import Job
from shardwise.plan.cost.passes import passes
from shardwise.plan.time.step import Prepared, Step, prepare, step_time
from shardwise.schedules import Cost, cached_schedule, time

NAMES = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}
TRAFFIC = ("tensor", "context", "expert", "shard")


def timeline(job: Job, most_microbatches: int = 0) -> Timeline:
    """One step; at most so many microbatches of it (0: all)."""
    prepared = prepare(job)
    step = step_time(prepared)
    whole = max(1, round(float(job.accumulation)))
    count = min(whole, most_microbatches or whole)
    spans = list(_actions(prepared, step, count))
    end = max(span.start + span.seconds for span in spans)
    for rank in range(job.layout.pipeline):
        start = end
        for name, category, seconds in (
            ("gradients", "shard" if float(job.zero_ranks) > 1 else "replicate", step.tail),
            ("optimizer", "optimizer", step.optimizer),
            ("other", "other", step.breakdown["other"]),
        ):
            if seconds > 0:
                stream = category if name == "gradients" else "compute"
                spans.append(Span(rank, stream, name, category, start, seconds))
                start += seconds
    return Timeline(tuple(spans), max(span.start + span.seconds for span in spans), whole - count)


def _actions(prepared: Prepared, step: Step, count: int) -> Iterator[Span]:
    """Compute spans of the schedule, and beside each the traffic that it exposes."""
    job = prepared.job
    lay = job.layout
    schedule = cached_schedule(lay.schedule if lay.pipeline > 1 else "1f1b", lay.pipeline, count, lay.stages_per_rank)
    cost = step.cost if lay.pipeline > 1 else _one_stage(step.cost)
    wire = 0.0 if job.stack.pipeline_blocks else step.hop
    timing = time(schedule, cost, wire)
    shares = _shares(prepared)
    for rank, actions in enumerate(schedule.ranks):
        for action, start, end in zip(actions, timing.start[rank], timing.end[rank], strict=True):
            category = "matmul" if action.kind == "F" else "attention"
            yield Span(
                rank, "compute", NAMES[action.kind], category, start, end - start, action.microbatch, action.stage
            )
            for axis, share in shares[action.stage].items():
                seconds = share * (end - start)
                yield Span(rank, axis, f"{axis} traffic", axis, start, seconds, action.microbatch, action.stage)
            if lay.pipeline > 1 and step.hop and action.kind != "W":
                goes = action.stage + 1 if action.kind == "F" else action.stage - 1
                if 0 <= goes < schedule.stages and schedule.placement[goes] != rank:
                    yield Span(
                        rank, "pipeline", f"to stage {goes}", "pipeline", end, step.hop, action.microbatch, action.stage
                    )


def _one_stage(cost: Cost) -> Cost:
    """All stages of one rank as one."""
    return Cost([sum(cost.forward)], [sum(cost.backward_input)], [sum(cost.backward_weight)])


def _shares(prepared: Prepared) -> list[dict[str, float]]:
    """Share of a stage's passes that each axis' exposed traffic takes."""
    job = prepared.job
    constants = constants_of(job)
    kinds = []
    for piece in prepared.pieces:
        own = passes(job, piece, constants)
        whole = float(own.forward + own.backward_input + own.backward_weight)
        kinds.append(
            {axis: float(own.parts[axis]) / whole for axis in TRAFFIC if own.parts.get(axis, 0.0) > 0.002 * whole}
        )
    return [kinds[k] for k in prepared.kinds]
