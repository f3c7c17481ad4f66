"""Output of `shardwise plan` and `shardwise verify` for a run that serves."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from shardwise.cli.machinery.options import read_json, write_file
from shardwise.cli.machinery.terminal import show_comparison
from shardwise.run import AXES, Problem, Run, UserError
from shardwise.run.problems import counted

if TYPE_CHECKING:
    from shardwise.plan.serving.plan import ServingPlan
    from shardwise.plan.serving.served import ServedLoad
    from shardwise.plan.serving.verdict import LoadVerdict


def plan_serving(args: argparse.Namespace, run: Run) -> int:
    """Simulate the load on the run's layout, or search all layouts of its devices. Exit code 1 if the load cannot be sustained."""
    from shardwise.plan.serving.plan import plan_serving, search_serving

    wrong = {
        "--trace": args.trace, "--devices": args.devices, "--pick": args.pick, "--out": args.out, "--as": args.program,
        "--max-microbatch": args.max_microbatch,
    }  # fmt: skip
    problems = [Problem("is for runs that train", name, "command line") for name, given in wrong.items() if given]
    if problems:
        raise UserError(*problems)
    ranking = search_serving(run) if run.layout.auto else [plan_serving(run)]
    best = ranking[0]
    if args.html:
        from shardwise.report.load_view import load_page

        write_file(args.html, load_page(f"Plan of {run.name}: {_layout(best)}", best.figures).encode())
    if args.json:
        others = {"ranking": [plan.as_dict() for plan in ranking[: args.keep]]} if run.layout.auto else {}
        print(json.dumps(best.as_dict() | others))
    else:
        _print(best, ranking[: args.keep])
        if args.html:
            print(f"wrote {args.html}", file=sys.stderr)
    return 0 if best.holds else 1


def _layout(plan: ServingPlan) -> str:
    layout = plan.run.layout
    sizes = [f"{axis} {getattr(layout, axis)}" for axis in AXES if getattr(layout, axis) > 1]
    return " × ".join(sizes) or "one device"


def _print(best: ServingPlan, ranking: list[ServingPlan]) -> None:
    from shardwise.report import words
    from shardwise.report.terminal import Console, plain_table
    from shardwise.report.terminal_load import print_load

    console = Console(highlight=False)
    run, memory, found = best.run, best.memory, best.as_dict()
    serve, cost = run.serve, found["cost"]
    load = f"{serve.rate:g} requests/s" if serve.rate else counted(serve.concurrency, "client")
    held = "is served" if best.holds else "IS NOT SERVED"
    parts = f"weights {words.size(memory.weights)}, keys and values {words.size(memory.cache)}"
    if memory.draft:
        parts += f", draft model {words.size(memory.draft)}"
    tokens = memory.pages * serve.page_tokens
    price = (
        f"{words.money(cost['usd_per_hour'])} an hour" if cost["usd_per_hour"] else "no price known: set cluster.price"
    )
    engine = found["engine"]
    asked = f"{run.train.dtype}, answers of {serve.output_tokens} to prompts of {serve.input_tokens} tokens"
    figures: list[tuple[str, str, str]] = [
        ("model", run.model.preset or "custom", asked),
        ("devices", f"{best.devices} {run.cluster.chip or 'cpu'}", _layout(best)),
        ("load", load, held),
        ("memory", words.size(memory.total), f"of a device: {parts}, for {words.count(tokens)} tokens"),
        ("engine", f"{engine['running']} at once", f"{engine['steps']:,} steps, {engine['preemptions']} preempted"),
        ("times", f"± {best.facts.error:.0%}", f"simulated step by step with times {best.facts.origin}"),
        ("cost", words.price(cost["usd_per_million_output_tokens"]), f"for a million tokens of answers; {price}"),
    ]
    if guess := found["speculation"]:
        source = "looked up" if guess["by"] == "ngram" else "of a draft model"
        what = f"{guess['draft_tokens']} {source}, right in {guess['acceptance']:.0%}"
        figures.insert(
            5, ("guesses", f"{guess['tokens_a_step']:.2f} tokens", f"of a sequence in a step: {what}, as assumed")
        )
    print_load(console, found, figures)
    if len(ranking) < 2:
        return
    table = plain_table()
    for name in ("devices: layout", "served", "tokens/s", "ttft 50%", "tpot 50%", "a million"):
        table.add_column(name, justify="left" if "layout" in name else "right", no_wrap=True)
    for plan in ranking:
        values: dict[str, Any] = plan.as_dict()
        times = [values[name]["p50"] for name in ("ttft_ms", "tpot_ms")]
        table.add_row(
            f"{plan.devices}: {_layout(plan)}",
            "yes" if plan.holds else "no",
            words.count(values["output_tokens_per_s"]),
            *(words.DASH if each is None else words.seconds(each / 1e3) for each in times),
            words.price(values["cost"]["usd_per_million_output_tokens"]),
        )
    console.print()
    console.print(table)


def verify_serving(args: argparse.Namespace, run: Run) -> int:
    """Run the load on an engine with random weights on this machine, or read what was measured over HTTP, and compare it with the
    plan. Exit code 1 if they differ."""
    wrong = {
        "--dry": args.dry, "--rehearse": args.rehearse, "--hold": args.hold, "--tune": args.tune, "--trace": args.trace,
        "--rank": args.rank is not None,
    }  # fmt: skip
    problems = [Problem("is for runs that train", name, "command line") for name, given in wrong.items() if given]
    if problems:
        raise UserError(*problems)
    if run.layout.auto:
        raise UserError(Problem("a layout has to be given: a load is measured on one", "layout", "command line"))
    if args.load:
        from shardwise.plan.serving.verdict import load_from_json

        measured = load_from_json(read_json(args.load, "a load", "--load"), args.load)
        return show_verdict(verdict_of(run, measured), args.json, args.time, args.html)
    if run.layout.world > 1:
        reason = "the engine of one device is measured here; a server of more is by `shardwise load URL --plan RUN`"
        raise UserError(Problem(reason, "layout"))
    from shardwise.cli.machinery.terminal import progress_line
    from shardwise.measure.serve_load import verify_load

    with progress_line() as say:
        verdict = verify_load(run, say)
    return show_verdict(verdict, args.json, args.time, args.html)


def verdict_of(run: Run, measured: ServedLoad) -> LoadVerdict:
    """The plan of a run over HTTP compared with a client's measurement."""
    from shardwise.plan.serving.plan import plan_serving
    from shardwise.plan.serving.verdict import LoadVerdict

    return LoadVerdict(plan_serving(run), measured)


def show_verdict(verdict: LoadVerdict, as_json: bool, time: float | None = None, page: str | None = None) -> int:
    """Show plan and measured load side by side. Exit code 1 if they differ."""
    found = verdict.as_dict(time) if as_json else None
    show_comparison("load", verdict.differences, verdict.tolerance(time), verdict.notes(), found, page)
    return 0 if verdict.agrees(time) else 1
