"""The verbs as functions. Each does what the command of its name does."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.api.run import Run, Source, as_run
from shardwise.run.problems import Problem, UserError, as_path, nearest

if TYPE_CHECKING:
    from shardwise.api.processes import Server, TrainResult
    from shardwise.api.results import LoadResult, PlanResult, SearchOutcome, TraceResult


def plan(run: Source | Run) -> PlanResult | LoadResult:
    """Predicts whether a run fits, how fast it is, where the time goes, and what it costs. With `layout="auto"`, this is the plan
    of the best layout; with `serve.rate` or `serve.concurrency`, the serving performance under that load."""
    from shardwise.api.results import LoadResult, PlanResult

    planned = as_run(run).planned()
    resolved = planned.run
    if resolved.serve.rate or resolved.serve.concurrency:
        from shardwise.plan.serving.plan import plan_serving, search_serving

        return LoadResult(search_serving(resolved)[0] if resolved.layout.auto else plan_serving(resolved))
    if resolved.layout.auto:
        return search(run).best
    from shardwise.plan.plan import plan as plan_run

    return PlanResult(plan_run(resolved), planned)


def search(
    run: Source | Run, *, devices: Sequence[int] | None = None, keep: int = 12, max_microbatch: int = 0
) -> SearchOutcome:
    """The best layouts of a run, best first, on its cluster or on each of several numbers of devices. A given layout is dropped;
    with `layout="auto"` the keys given beside it are kept."""
    from shardwise.api.results import SearchOutcome
    from shardwise.plan.search import search as search_layouts

    given = as_run(run)
    if given.serve.rate or given.serve.concurrency:
        raise UserError("this run serves a load: shardwise.plan gives the cheapest layout that holds it")
    planned = (given if given.layout.auto else given.free()).planned()
    found = search_layouts(planned.run, devices=devices, keep=keep, max_microbatch=max_microbatch)
    return SearchOutcome(found, planned)


def train(run: Source | Run, out: str | Path | None = None, *, quiet: bool = False) -> TrainResult:
    """Train a run into its folder (runs/NAME, or `out`), on as many ranks as its layout needs; call it again to resume. An
    interrupt saves a checkpoint and returns."""
    from shardwise.api.processes import train_run

    return train_run(as_run(run).trained(), None if out is None else as_path(out, "out"), quiet)


def trace(
    *paths: str | Path,
    steps: tuple[int, int] | None = None,
    all_events: bool = False,
    chip: str | None = None,
    dtype: str = "bfloat16",
    cache: bool = True,
) -> TraceResult:
    """Explain profiles: where each rank's time went, what it waited for, and what to change first. `paths` are files and folders,
    of any subset of a job's ranks; `steps` are the first and the last profiler step to analyze."""
    from shardwise.api.results import TraceResult
    from shardwise.cli.trace.read import read_and_explain

    if not paths:
        raise UserError("name profiles, or folders that hold them")
    _check_trace(steps, all_events, chip, dtype)
    first, last = (None, None) if steps is None else steps
    asked = Namespace(
        from_step=first, to_step=last, all_events=all_events, cache=None, no_cache=not cache, chip=chip, dtype=dtype
    )
    return TraceResult(read_and_explain([as_path(path, "paths") for path in paths], asked))


def _check_trace(steps: object, all_events: bool, chip: object, dtype: object) -> None:
    """Refuses arguments of `trace` that are wrong, all at once."""
    from shardwise.hardware.chips import ITEM_BYTES

    problems = []
    given = steps if isinstance(steps, tuple | list) else ()
    if steps is None:
        pass
    elif len(given) != 2 or not all(isinstance(step, Integral | None) for step in given):
        one = steps if isinstance(steps, Integral) else 3
        reason = f"is {steps!r}, but has to be the first and the last profiler step; ({one}, {one}) is step {one} alone"
        problems.append(Problem(reason, "steps"))
    elif None not in given and given[1] < given[0]:
        problems.append(Problem(f"the last step, {given[1]}, comes before the first, {given[0]}", "steps"))
    if steps is not None and all_events:
        problems.append(Problem("looks at the whole file; leave it out to choose steps", "all_events"))
    if not isinstance(chip, str | None):
        problems.append(Problem(f"{chip!r} is not the name of a chip", "chip"))
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        known = nearest(str(dtype), ITEM_BYTES) or f"; known: {', '.join(ITEM_BYTES)}"
        problems.append(Problem(f"there is no {dtype!r}{known}", "dtype"))
    if problems:
        raise UserError(*problems)


def serve(checkpoint: str | Path, **options: str | int | float | bool) -> Server:
    """Serve a checkpoint or a run folder over OpenAI's HTTP API, until it is stopped: in `with shardwise.serve("runs/demo") as
    server:` its address is `server.url`. Options are those of the command (`port=8000`, `api_key="…"`) and keys of the run
    (`**{"serve.weights": "int8"}`)."""
    from shardwise.api.processes import start_server

    return start_server(as_path(checkpoint, "checkpoint"), options)
