"""`shardwise plan`: predicts what a run needs and how fast it is, or searches for its best layouts."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from typing import TYPE_CHECKING, Any

from shardwise.cli.machinery.options import at_least, new_file, write_file
from shardwise.cli.machinery.terminal import print_parts
from shardwise.hardware.chips import unknown_chip
from shardwise.run import Problem, UserError, counted, read_planned, to_dict, to_toml

if TYPE_CHECKING:
    from shardwise.plan.plan import Plan
    from shardwise.plan.search import SearchResult
    from shardwise.plan.serving.rollouts import RolloutPlan
    from shardwise.run import Run

HELP = """Predict a run: does it fit, how fast is it, where does the time go, what does it cost. With layout = "auto" in the run,
search for the best layouts. With serve.rate or serve.concurrency, predict the latency and throughput of a serving engine under
that load."""

SHOWN_MICROBATCHES = 24
"""Most microbatches of a step in a chart; `--trace` writes all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("run", nargs="?", help="the run, a TOML file")
    parser.add_argument(
        "--as",
        dest="program",
        metavar="PROGRAM[:key=value,…]",
        help="plan it as another program runs it: megatron-lm, nemo, torchtitan, deepspeed, … (docs/planning.md)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", type=new_file, metavar="FILE", help="also write a page with charts; it works offline")
    parser.add_argument(
        "--trace", type=new_file, metavar="FILE", help="also write the predicted timeline of a step, for Perfetto"
    )
    parser.add_argument(
        "--devices", metavar="N,N,…", help="search: compare the best layouts for these numbers of devices"
    )
    parser.add_argument("--keep", type=int, default=12, help="search: layouts to show (default 12)")
    parser.add_argument(
        "--pick", type=at_least(1), metavar="N", help="search: print row N of the ranking as a run, to plan or to train"
    )
    parser.add_argument("--out", type=new_file, metavar="FILE", help="--pick: write the run to this file instead")
    parser.add_argument(
        "--max-microbatch",
        type=int,
        default=0,
        help="search: largest microbatch to consider when train.microbatch = 0 (default 0: any)",
    )


def execute(args: argparse.Namespace) -> int:
    """Plan or search, and print the result. Exit code 1 if the given layout does not fit."""
    # A plan makes hundreds of thousands of small records without cycles: looking for cycles takes a sixth of a search.
    gc.disable()
    try:
        return _execute(args)
    finally:
        gc.enable()


def _execute(args: argparse.Namespace) -> int:
    if args.run is None and not args.overrides:
        raise UserError("name a run (a TOML file), or give keys such as --model.preset=llama3-8b")
    planned = read_planned(args.run, args.overrides, (unknown_chip,))
    run, left_open = planned.run, planned.sentence()
    if run.serve.rate or run.serve.concurrency:
        from shardwise.cli.planning.serving import plan_serving

        return plan_serving(args, run)
    devices = _devices(args.devices)
    if args.out and args.pick is None:
        raise UserError(Problem("is the file of --pick N; without it no run is written", "--out", "command line"))
    if run.layout.auto:
        if args.program:
            what = "plans the layout that is given; a search is for this project's trainer: --pick one of it first"
            raise UserError(Problem(what, "--as", "command line"))
        from shardwise.plan.search import search

        found = search(run, devices=devices, keep=args.keep, max_microbatch=args.max_microbatch)
        best = found.best if args.pick is None else _row(found, args.pick)
    elif devices or args.max_microbatch or args.pick:
        options = {"--devices": devices, "--max-microbatch": args.max_microbatch, "--pick": args.pick}
        what = 'is for a search: set layout = "auto"'
        raise UserError(*(Problem(what, option, "command line") for option, given in options.items() if given))
    elif args.program:
        from shardwise.plan.as_program import plan_as, read_program

        found, best = None, plan_as(run, read_program(args.program))
    else:
        from shardwise.plan.plan import plan

        found, best = None, plan(run)
    if args.trace:
        from shardwise.plan.time.timeline import timeline
        from shardwise.report.perfetto import write_chrome_trace

        write_chrome_trace({"plan: pipeline rank": timeline(best.job)}, args.trace)
    if args.html:
        write_file(args.html, plan_page(best, found, left_open).encode())
    if args.pick:
        _write_run(best, args)
    elif args.json:
        print(json.dumps(plan_json(best, found, planned.left_open)))
    else:
        _print(best, found, left_open)
    if not args.json:
        for path in filter(None, (args.html, args.trace, args.out)):
            print(f"wrote {path}", file=sys.stderr)
    return 0 if best.fits else 1


def plan_json(best: Plan, found: SearchResult | None, not_set: dict[str, Any]) -> dict[str, Any]:
    """The output of `--json`; names are stable."""
    fits = {} if best.fits else {"next_change": _makes_it_fit(best)}
    rollouts = _rollouts(best)
    added = {} if rollouts is None else {"rollouts": rollouts.as_dict()}
    return (found or best).as_dict() | fits | added | {"not_set": not_set}


def _row(found: SearchResult, number: int) -> Plan:
    if number > len(found.ranking):
        what = f"there is no row {number}: the ranking has {len(found.ranking)}; --keep asks for more"
        raise UserError(Problem(what, "--pick", "command line"))
    return found.ranking[number - 1]


def _write_run(best: Plan, args: argparse.Namespace) -> None:
    """Write the run with one layout of the ranking to the file of `--out`, or to stdout."""
    from shardwise.report import words

    memory, step = words.size(best.account.memory.peak), words.seconds(best.account.step_seconds)
    said = f"# row {args.pick} of the layouts for {args.run or 'these keys'}: {step} a step, {memory} on the fullest rank\n"
    text = json.dumps(to_dict(best.run), indent=1) + "\n" if args.json else said + to_toml(best.run)
    if args.out:
        write_file(args.out, text.encode())
    else:
        print(text, end="")


def _devices(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise UserError(Problem(f'"{text}" is not a list of numbers such as 256,512', "--devices", "command line"))
    return numbers


def all_figures(best: Plan, found: SearchResult | None) -> list[tuple[str, str, str]]:
    """The figures of a plan, and its next change: the one that would gain most for the best layout of a search, or that makes a
    given layout fit."""
    if found is not None:
        change = found.next_changes[next((n for n, plan in enumerate(found.ranking) if plan is best), 0)]
    else:
        change = "" if best.fits else _makes_it_fit(best)
    from shardwise.plan.figures import figures

    what, _, brings = change.partition(": ")
    rows = figures(best)
    rollouts = _rollouts(best)
    if rollouts is not None:
        rows += rollout_figures(best.run, rollouts)
    return rows + ([("next change", what, brings)] if change else [])


def _rollouts(best: Plan) -> RolloutPlan | None:
    """The plan of a GRPO run's rollouts; None for other runs."""
    if best.run.objective.kind != "grpo":
        return None
    from shardwise.plan.serving.rollouts import plan_rollouts

    return plan_rollouts(best.run, best.account.step_seconds)


def _makes_it_fit(best: Plan) -> str:
    from shardwise.plan.search.advice import change_that_fits

    if found := change_that_fits(best.run):
        return found
    if not best.run.cluster.chip:  # a search needs to know the chip
        return "of the cluster: this machine is too small; name another: --cluster.chip=h100 --cluster.nodes=8 --layout=auto"
    return "of several keys: no single one makes it fit; --layout=auto finds layouts that do"


def _print(best: Plan, found: SearchResult | None, left_open: str) -> None:
    from shardwise.plan.figures import LETTERS, ranking_columns, ranking_rows
    from shardwise.plan.time.timeline import timeline
    from shardwise.report import terminal
    from shardwise.report.terminal import Console

    console = Console()
    if left_open:
        console.print(terminal.safe(left_open, "yellow"), end="\n\n")
    if found is not None:
        console.print(f"{counted(found.searched, 'layout')} considered, {found.simulated:,} simulated\n", style="dim")
        columns = ranking_columns(found)
        console.print(terminal.ranking_table(ranking_rows(found.ranking, found.next_changes), columns))
        for reason in found.without.values():
            console.print(f"\n{reason}", style="yellow")
        console.print(f"\n{LETTERS}; the best one in detail:\n", style="dim")
    parts = [
        terminal.key_figures(all_figures(best, found)),
        terminal.memory_bars(best.account.memory),
        terminal.breakdown_bar(best.account),
        terminal.traffic_table(best.account.traffic),
        terminal.timeline(timeline(best.job, SHOWN_MICROBATCHES)),
    ]
    print_parts(console, [*parts, terminal.notes(best.notes)] if best.notes else parts)


def plan_page(best: Plan, found: SearchResult | None, left_open: str) -> str:
    from shardwise.plan.figures import columns_of, ranking_columns, ranking_rows
    from shardwise.plan.time.timeline import timeline
    from shardwise.report import html

    sections = [html.key_figures(all_figures(best, found))]
    if found is not None:
        rows = ranking_rows(found.ranking, found.next_changes)
        columns = ranking_columns(found)
        sections.append(html.ranking_table(rows, columns, "Layouts"))
        if found.without:
            sections.append(html.notes(list(found.without.values())))
        points = ranking_rows(found.pareto)
        by = {column.key: column for column in columns_of(several=True)}
        places = {plan.run: place for place, plan in enumerate(found.ranking, 1)}
        numbers = [places.get(plan.run) for plan in found.pareto]
        shown = (by["memory"], by["step_seconds"], by["devices"], by["layout"])
        sections.append(html.scatter(points, *shown, numbers=numbers))
    sections += [
        html.memory_bars(best.account.memory),
        html.breakdown_bar(best.account),
        html.traffic_table(best.account.traffic),
        html.timeline(timeline(best.job, 4 * SHOWN_MICROBATCHES)),
    ]
    if best.notes or left_open:
        sections.append(html.notes([*[left_open] * bool(left_open), *best.notes]))
    return html.page(f"Plan of {best.run.name}", sections, f"{best.run.layout.world} × {best.job.cluster.chip.name}")


def rollout_figures(run: Run, plan: RolloutPlan) -> list[tuple[str, str, str]]:
    """Rows on rollouts for a GRPO run, beside those of the training step."""
    from shardwise.report import words

    memory, asked = plan.memory, run.objective
    steps = asked.minibatches * asked.iterations
    engine = f"keys and values {words.size(memory.cache)}, weights besides the trainer's {words.size(memory.weights)}"
    scoring = (
        f"; old and reference log-probabilities take {words.seconds(plan.logprob_seconds)} more" if plan.passes else ""
    )
    age = ", while the round before is learned from" if asked.asynchronous else ""
    lengths = (
        f"{asked.group} to each prompt of {plan.prompt_tokens} tokens, {asked.completion_tokens} tokens long at most"
    )
    cut = [f"{axis} {size}" for axis in ("tensor", "pipeline", "expert") if (size := getattr(plan.layout, axis)) > 1]
    if cut:
        engine = f"a rank of {counted(plan.layout.replicate, 'engine')} of {' x '.join(cut)}: {engine}"
    sent = (
        f"; {words.seconds(plan.weight_sync_seconds)} of it sending weights to the engines"
        if plan.weight_sync_seconds
        else ""
    )
    speed = words.rate(plan.tokens_per_s, "tokens")
    share = f"with its share of a round; {words.seconds(plan.train_seconds)} of it training"
    return [
        ("answers", f"{plan.answers:,} a round", f"{lengths}; for {counted(steps, 'step')}"),
        ("engine", words.size(memory.total), f"with training at its peak: {engine}: " + ("fits" if plan.fits else "DOES NOT FIT")),
        ("rollouts", words.seconds(plan.rollout_seconds), f"a round, {speed}{sent}{age}{scoring}"),
        ("whole step", words.seconds(plan.step_seconds), share),
    ]  # fmt: skip
