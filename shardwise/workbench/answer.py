"""The answer to a question of the page: the plan as `shardwise plan --json` prints it, and its charts as `--html` draws them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.plan.cost.job import job_of
from shardwise.plan.figures import figures, short_layout
from shardwise.plan.plan import Plan, plan_job
from shardwise.plan.serving.rollouts import plan_rollouts
from shardwise.plan.time.step import Prepared, Step, prepare, step_time
from shardwise.plan.time.timeline import timeline
from shardwise.report import html, words
from shardwise.report.html import Quantity, Section
from shardwise.run import PlannedRun, UserError
from shardwise.workbench.anatomy import blocks, mesh
from shardwise.workbench.question import Base

SHOWN_MICROBATCHES = 24
"""Microbatches of a step that the timeline shows."""
PATHS = {
    "model": "run.model.preset",
    "devices": "devices",
    "memory": "memory.peak",
    "step": "step_seconds",
    "speed": "tokens_per_s",
    "MFU": "mfu",
    "limit": "binds",
    "job": "cost.days",
    "cost": "cost.usd",
}
"""The path of each key figure's number in `plan --json`."""


@dataclass(frozen=True)
class Planned:
    """A plan and its drawings."""

    best: Plan
    content: dict[str, Any]
    sections: dict[str, Section]
    anatomy: dict[str, Any]
    """The model's blocks and the mesh of ranks, for pictures of them."""
    known: tuple[Prepared, Step]
    """The data that a timeline is drawn from."""

    def timeline(self) -> Section:
        """The timeline of one step. It takes as long to draw as all numbers together, so the page requests it after them."""
        return html.timeline(timeline(self.best.job, SHOWN_MICROBATCHES, self.known))

    def whole(self) -> dict[str, Any]:
        """The answer with its timeline, for a page without a server."""
        content, section = self.as_dict(), self.timeline()
        content["parts"]["timeline"] = {"remark": section.remark, "body": section.body}
        return content

    def as_dict(self) -> dict[str, Any]:
        """The answer without its timeline, for the page."""
        parts = {name: {"remark": each.remark, "body": each.body} for name, each in self.sections.items()}
        return {"plan": self.content, "parts": parts, "layout": short_layout(self.best), "anatomy": self.anatomy}


def answer(base: Base, changes: Mapping[str, str]) -> Planned:
    """The plan of the run with these changes; raises every mistake in it. Errors of the planner must not end the page."""
    planned = base.planned(changes)
    try:
        return _answer(planned)
    except (ArithmeticError, LookupError, ValueError) as e:
        raise UserError(f"the planner has no answer to this: {e}") from e


def _answer(planned: PlannedRun) -> Planned:
    run = planned.run
    if run.serve.rate or run.serve.concurrency:
        raise UserError("the workbench plans training; `shardwise plan` says what a load sees of a server")
    if run.layout.auto:
        raise UserError('layout is "auto": the layouts that a search finds are below; choose one')
    job = job_of(run)
    known = prepare(job)
    step = step_time(known)
    best = plan_job(run, job, step)
    rollouts = (
        {"rollouts": plan_rollouts(run, best.account.step_seconds).as_dict()} if run.objective.kind == "grpo" else {}
    )
    content = best.as_dict() | rollouts | {"not_set": planned.left_open}
    sections = {
        "figures": html.key_figures(_with_errors(best), _quantities(content)),
        "memory": html.memory_bars(best.account.memory),
        "time": html.breakdown_bar(best.account),
        "traffic": html.traffic_table(best.account.traffic),
        "notes": html.notes([*filter(None, [planned.sentence()]), *best.notes]),
    }
    anatomy = {"model": blocks(run), "mesh": mesh(run, step.placement, job.cluster.per_node)}
    return Planned(best, content, sections, anatomy, (known, step))


def _with_errors(best: Plan) -> list[tuple[str, str, str]]:
    """The key figures; those that depend on a predicted time include its interval."""
    account, cost = best.account, best.cost
    low, high = best.low / account.step_seconds, best.high / account.step_seconds
    rate, days = account.tokens_per_second, cost.days * 86400
    between = {
        "speed": f"{words.count(rate / high)} to {words.rate(rate / low, 'tokens')}",
        "MFU": f"{words.percent(best.mfu / high)} to {words.percent(best.mfu / low)}",
        "job": f"{words.seconds(days * low)} to {words.seconds(days * high)}",
        "cost": f"{words.price(cost.usd * low)} to {words.price(cost.usd * high)}" if cost.usd else "",
    }
    found = []
    for label, value, note in figures(best):
        inside = f"80% interval: {between[label]}; {note}" if between.get(label) else note
        found.append((label, value, inside))
    return found


def _quantities(content: Mapping[str, Any]) -> dict[str, Quantity]:
    found = {}
    for label, path in PATHS.items():
        value: Any = content
        for name in path.split("."):
            value = value[name]
        found[label] = Quantity(path, value)
    return found
