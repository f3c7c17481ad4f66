"""Memory that a layout leaves free, spent on saved activations: only as many layers are recomputed as must be.

The search compares layouts with all layers recomputed or none. For the best of them this finds the largest budget of saved
activations that still fits (`recompute = "budget"`), since a layer whose activations are saved is not computed twice.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.plan.cost.job import GIB, job_of
from shardwise.plan.plan import Plan, plan_job
from shardwise.plan.trainer.memory import memory_of
from shardwise.run import Run

STEPS = 7
"""Halvings of the budget's range: then it is known to a hundredth."""


def keeping(plan: Plan) -> tuple[Plan, str] | None:
    """The plan with as few layers recomputed as its memory allows, and what memory for all would bring; None where that is not
    faster, or where not all layers were recomputed."""
    if plan.run.layout.recompute != "full" or plan.run.layout.recompute_every != 1:
        return None
    none = _with(plan.run, "none")
    everything = memory_of(none, job_of(none))
    if everything.fits:  # the search, which estimates memory, had ruled it out
        return plan_job(none, job_of(none)), ""
    unlimited = _with(plan.run, "budget", 1e6)
    kept = memory_of(unlimited, job_of(unlimited))
    low, high = 0.0, max(rank["activations"] for rank in kept.ranks) / GIB
    for _ in range(STEPS):
        middle = (low + high) / 2
        run = _with(plan.run, "budget", middle)
        low, high = (middle, high) if memory_of(run, job_of(run)).fits else (low, middle)
    if low == 0.0:
        return None
    run = _with(plan.run, "budget", low)
    found = plan_job(run, job_of(run))
    if not found.fits or found.account.step_seconds >= plan.account.step_seconds:
        return None
    gain = found.account.step_seconds / plan_job(none, job_of(none), precise=False).account.step_seconds - 1
    missing = (everything.peak - everything.capacity) / GIB
    return (
        found,
        f"recompute budget → none: {100 * gain:+.1f} %, needs {everything.peak / GIB:.1f} GiB, {missing:.1f} too many",
    )


def _with(run: Run, recompute: str, budget: float = 0.0) -> Run:
    layout = replace(run.layout, recompute=recompute, recompute_budget=round(budget, 2))  # type: ignore[arg-type]
    return replace(run, layout=layout)
