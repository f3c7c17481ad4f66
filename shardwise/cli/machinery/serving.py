"""What `shardwise plan` prints of a run that serves."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from shardwise.cli.machinery.options import write_file
from shardwise.run import AXES, Problem, Run, UserError

if TYPE_CHECKING:
    from shardwise.plan.serving.plan import ServingPlan


def plan_serving(args: argparse.Namespace, run: Run) -> int:
    """Play the load on the run's layout, or on all of its devices'. Exit code 1 when the load is not held."""
    from shardwise.plan.serving.plan import plan_serving, search_serving

    wrong = {"--trace": args.trace, "--devices": args.devices, "--pick": args.pick, "--out": args.out}
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
    load = f"{serve.rate:g} requests/s" if serve.rate else f"{serve.concurrency} clients"
    held = "is held" if best.holds else "IS NOT HELD"
    parts = f"weights {words.size(memory.weights)}, keys and values {words.size(memory.cache)}"
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
        ("cost", words.price(cost["usd_per_million_output_tokens"]), f"for a million tokens of answers; {price}"),
    ]
    print_load(console, found, figures)
    if len(ranking) < 2:
        return
    table = plain_table()
    for name in ("devices: layout", "held", "tokens/s", "ttft 50%", "tpot 50%", "a million"):
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
