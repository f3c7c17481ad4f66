"""The changes that would make a run faster, or make it fit: every change of one choice, each planned as if made on the page. And
how accurate predicted memory is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, get_args

import numpy as np

from shardwise.ledger import Memory
from shardwise.plan.cost.job import GIB, job_of
from shardwise.plan.figures import short_layout
from shardwise.plan.plan import Plan
from shardwise.plan.published.rows import published
from shardwise.plan.published.validate import predict
from shardwise.plan.search import search
from shardwise.plan.search.advice import LEAST_GAIN
from shardwise.plan.time.step import prepare, step_time
from shardwise.plan.trainer.memory import memory_of
from shardwise.run import RANK_AXES, Run, UserError, to_dict
from shardwise.run.config import SECTIONS, all_keys
from shardwise.run.sections.declare import declared
from shardwise.workbench.question import Base, Keys, text_of

SHOWN = 6
"""Changes that fit and are shown; two that do not fit come after them, to show what more memory would gain."""
KEPT = 8
"""Layouts in a ranking."""


def faster_changes(base: Base, changes: Mapping[str, str]) -> list[dict[str, Any]]:
    """The changes that gain most, best first; for a run that does not fit, those that make it fit."""
    run = base.planned(changes).run
    if run.layout.auto:  # the search finds the best layout
        return []
    seconds, fits = _seconds(run), memory_of(run, job_of(run)).fits
    found = []
    for what, keys in neighbours(run):
        try:
            other = base.planned({**changes, **keys}).run
            taken = _seconds(other)
        except (UserError, ArithmeticError, LookupError, ValueError):  # not legal, or the planner has no answer
            continue
        if fits and seconds / taken - 1 < LEAST_GAIN:
            continue
        memory = memory_of(other, job_of(other))
        found.append((not memory.fits, taken, _told(what, keys, seconds / taken, memory)))
    found.sort(key=lambda one: one[:2])
    fitting = [told for over, _, told in found if not over][:SHOWN]
    return fitting + [told for over, _, told in found if over][: 2 if fits else 0]


def _seconds(run: Run) -> float:
    return step_time(prepare(job_of(run))).seconds


def _told(what: str, keys: Keys, gain: float, memory: Memory) -> dict[str, Any]:
    return {"what": what, "keys": keys, "gain": gain - 1, "memory_gib": memory.peak / GIB, "fits": memory.fits}


def neighbours(run: Run) -> Iterator[tuple[str, Keys]]:
    """Runs that differ in one choice, as keys, each with its description. The number of devices stays the same: one axis grows at
    the expense of another, by a small factor or by all of it."""
    lay, micro = run.layout, run.train.microbatch
    for grows in RANK_AXES:
        for shrinks in RANK_AXES:
            size, spare = getattr(lay, grows), getattr(lay, shrinks)
            least = next((n for n in (2, 3, 5, 7) if spare % n == 0), 0)
            for by in sorted({least, spare} - {0, 1}) if grows != shrinks else ():
                keys = {f"layout.{grows}": str(size * by), f"layout.{shrinks}": str(spare // by)}
                yield f"{grows} {size} → {size * by}, {shrinks} {spare} → {spare // by}", keys
    options = {key.name: get_args(key.type) for key in declared(SECTIONS["layout"])}
    wanted = {"zero": lay.shard * lay.context > 1, "schedule": lay.pipeline > 1, "context_method": lay.context > 1}
    for name, useful in wanted.items():
        for value in options[name] if useful else ():
            if value != getattr(lay, name):
                yield f"{name.replace('_', ' ')} {getattr(lay, name)} → {value}", {f"layout.{name}": text_of(value)}
    for value in ("none", "attention", "full"):
        if value != lay.recompute:
            yield f"recompute {lay.recompute} → {value}", {"layout.recompute": value, "layout.recompute_budget": "0.0"}
    if run.memory.swaps:
        for value in ("none", "full"):
            other = "" if value == lay.recompute else f", recompute {lay.recompute} → {value}"
            keys = {"layout.recompute": value, "layout.recompute_budget": "0.0", "memory.activations": "device"}
            yield f"activations {run.memory.activations} → device{other}", keys
    if lay.stages_per_rank > 1 and lay.schedule in ("interleaved", "breadth-first"):
        for count in {max(1, lay.chunks // 2), lay.chunks * 2, lay.chunks + 1} - {lay.chunks}:
            yield f"chunks {lay.chunks} → {count}", {"layout.chunks": str(count)}
    if lay.tensor > 1:
        word = "false" if lay.async_tensor else "true"
        yield f"async tensor {text_of(lay.async_tensor)} → {word}", {"layout.async_tensor": word}
    for size in {2 * lay.expert, lay.expert // 2} - {0} if run.model.experts else ():
        yield f"expert {lay.expert} → {size}", {"layout.expert": str(size)}
    for size in {2 * micro, micro // 2} - {0}:
        yield f"microbatch {micro} → {size}", {"train.microbatch": str(size)}
    if run.train.fp8 == "none" and run.train.dtype in ("bfloat16", "float16"):
        yield "fp8 none → rowwise", {"train.fp8": "rowwise"}


def ranking(base: Base, changes: Mapping[str, str], keep: int = KEPT) -> dict[str, Any]:
    """The best layouts of the run on its devices, each with the keys that select it."""
    found = search(base.free(changes).run, keep=keep)
    rows = [_row(base, plan, change) for plan, change in zip(found.ranking, found.next_changes, strict=True)]
    return {"rows": rows, "searched": found.searched, "simulated": found.simulated}


def with_layout(base: Base) -> Base:
    """The run to start with; if its layout is "auto", with the best layout."""
    run = base.planned({}).run
    return Base({**base.given, **keys_of(base, search(run, keep=1).best.run)}) if run.layout.auto else base


def _row(base: Base, plan: Plan, change: str) -> dict[str, Any]:
    account = plan.account
    return {
        "layout": short_layout(plan),
        "keys": keys_of(base, plan.run),
        "step_seconds": account.step_seconds,
        "mfu": plan.mfu,
        "memory": account.memory.peak,
        "usd": plan.cost.usd,
        "binds": plan.binds.partition(":")[0],
        "next_change": change,
    }


def keys_of(base: Base, run: Run) -> Keys:
    """The keys to change so that the run has this layout: all layout keys that the base sets or that differ from their
    defaults."""
    layout, defaults = to_dict(run)["layout"], all_keys()
    found = {"layout.auto": "false"} if "layout.auto" in base.given else {}
    for name, value in layout.items():
        key, several = f"layout.{name}", isinstance(value, list)
        usual = (tuple(value) if several else value) == defaults[key].default
        if name not in ("auto", "fixed") and (key in base.given or not usual):
            found[key] = ",".join(map(text_of, value)) if several else text_of(value)
    return found | {"train.microbatch": str(run.train.microbatch), "train.compile": text_of(run.train.compile)}


@cache
def memory_error() -> float:
    """The relative error within which 8 of 10 predicted peaks lie, of the runs of this trainer whose peaks were measured on a
    GPU."""
    rows = [row for row in published("own") if row["measured"].get("memory_gib")]
    errors = [abs(found) for row in rows if (found := predict(row).memory_error) is not None]
    return float(np.quantile(errors, 0.8))
