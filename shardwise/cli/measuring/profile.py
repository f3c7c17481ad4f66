"""`shardwise profile`: records a few steps of a run with the profiler, in a folder with everything that explains them."""

from __future__ import annotations

import argparse
import json
import os
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli.machinery.ranks import words_of
from shardwise.cli.machinery.terminal import print_parts
from shardwise.hardware.chips import unknown_chip
from shardwise.run import Problem, Run, UserError, counted, read_run

if TYPE_CHECKING:
    from shardwise.train.processes.environment import RankEnvironment

HELP = """Record a few steps of the real trainer on all ranks. The folder gets a trace of each rank, memory by owner, the run and
its plan; `shardwise trace` explains it. --modules also counts FLOPs, memory and time by module."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("run", help="the run, a TOML file; override it with --section.key=value")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the profile's folder (default: runs/NAME/profile)")
    parser.add_argument("--steps", type=int, default=3, help="steps to record (default 3)")
    parser.add_argument("--warmup", type=int, default=3, help="warm-up steps before them (default 3)")
    parser.add_argument("--ranks", metavar="0,3-5", help="ranks to record (default all); the others run unrecorded")
    parser.add_argument("--modules", action="store_true", help="also print and store the cost of each module")
    parser.add_argument("--json", action="store_true", help="print JSON")


def execute(args: argparse.Namespace) -> int:
    """Record, or start the ranks that record."""
    from shardwise.train.processes import launch
    from shardwise.train.processes.environment import rank_environment

    run = launch.resolve_layout(read_run(args.run, args.overrides, (unknown_chip,)), args.overrides)
    for key in ("steps", "warmup"):
        if getattr(args, key) < 1:
            raise UserError(Problem("at least one step is needed", f"--{key}", "command line"))
    ranks = chosen_ranks(args.ranks, run.layout.world)
    folder = args.out or Path("runs") / run.name / "profile"
    from shardwise.measure.profile import prepare_folder
    from shardwise.tune.source import source_of

    environment = rank_environment(os.environ)
    launch.check_here(run, environment)
    if environment is None:
        source_of(run)  # report errors in the data once, not on every rank
        prepare_folder(folder)
        # Also for a single rank, so that the profiler's own messages go to a log.
        return launch.start_local(words_of(args), run.layout.world, folder / "logs")
    return _as_rank(run, args, folder, environment, ranks)


def chosen_ranks(text: str | None, world: int) -> tuple[int, ...] | None:
    """The ranks of a list such as `0,3-5`."""
    if text is None:
        return None
    found: set[int] = set()
    for part in text.split(","):
        ends = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", part.strip())
        ranks = range(int(ends[1]), int(ends[2] or ends[1]) + 1) if ends else range(0)
        if not ranks:
            shown = text if len(text) <= 40 else f"{text[:40]}…"
            raise UserError(Problem(f'"{shown}" is not a list of ranks such as 0,3-5', "--ranks", "command line"))
        if ranks[-1] >= world:
            raise UserError(Problem(f"the run has ranks 0 to {world - 1}, not {ranks[-1]}", "--ranks", "command line"))
        found |= set(ranks)
    return tuple(sorted(found))


def _as_rank(
    run: Run, args: argparse.Namespace, folder: Path, environment: RankEnvironment, ranks: tuple[int, ...] | None
) -> int:
    from shardwise.measure.profile import Recording, prepare_folder, record
    from shardwise.train.processes import launch

    first = environment.rank == 0
    launch.join(environment, run)
    try:
        if first:
            prepare_folder(folder)
        log = partial(print, flush=True) if first and not args.json else lambda what: None
        record(run, folder, Recording(args.steps, args.warmup, ranks, args.modules), log)
    finally:
        launch.leave()
    return _show(folder, args) if first else 0


def _show(folder: Path, args: argparse.Namespace) -> int:
    manifest = json.loads((folder / "profile.json").read_text())
    modules = json.loads((folder / "modules.json").read_text()) if args.modules else None
    if args.json:
        print(json.dumps({"folder": str(folder), "profile": manifest} | ({"modules": modules} if modules else {})))
        return 0
    if modules:
        _show_modules(modules, manifest)
    else:
        _show_answers(folder)
    ranks, steps = counted(len(manifest["ranks"]), "rank"), counted(manifest["steps"], "step")
    here = f"{steps} of {ranks} {'is' if manifest['steps'] == 1 else 'are'} in {folder}"
    print(f"\n{here}; shardwise trace {folder} explains, --html makes a page")
    return 0


def _show_answers(folder: Path) -> None:
    """Print a short explanation, if the packages that read traces are installed."""
    from shardwise.cli.main import missing_part
    from shardwise.cli.trace.read import read_and_explain
    from shardwise.cli.trace.verb import add_arguments as trace_arguments
    from shardwise.ledger import as_dict
    from shardwise.report import terminal, terminal_trace, trace_view
    from shardwise.report.terminal import Console

    parser = argparse.ArgumentParser()
    trace_arguments(parser)
    try:
        explained = read_and_explain([folder / "ranks"], parser.parse_args([str(folder / "ranks")]))
    except ModuleNotFoundError as e:
        message = missing_part(e)
        if message is None:
            raise
        print(message.replace("this verb", "explaining what was recorded"))
        return
    answers = as_dict(explained.answers)
    figures = terminal.key_figures(trace_view.figures(answers))
    print_parts(Console(), (figures, terminal_trace.breakdown(answers), terminal_trace.findings(answers)))


def _show_modules(modules: dict[str, Any], manifest: dict[str, Any]) -> None:
    from shardwise.report import terminal, words
    from shardwise.report.terminal import Console
    from shardwise.report.terminal_modules import folded, merged, module_table

    places = modules["pipeline_ranks"]
    stages = [next((r for r in manifest["ranks"] if places[r] == place), None) for place in sorted(set(places))]
    chosen = [rank for rank in stages if rank is not None]
    console = Console()
    console = console if console.is_terminal else Console(width=max(console.width, 120))  # a table needs its columns
    table = module_table(folded(merged(modules["ranks"], chosen)), modules["peak_flops"])
    slowest = max(max(modules["step_nanoseconds"][rank]) for rank in manifest["ranks"]) / 1e9
    utilization = modules["model_flops"] / (slowest * modules["peak_flops"] * manifest["world"])
    ranks = f"rank {chosen[0]}" if len(chosen) == 1 else f"ranks {', '.join(map(str, chosen))}, one of each stage"
    notes = (
        f"{ranks}; FLOPs of a step ({modules['convention']}); saved: activations of one microbatch",
        f"time: kernels on a GPU, operators on a CPU, without communication; of peak: {modules['peak_source']}",
        f"the whole step: {words.percent(utilization)} MFU ({manifest['flops_convention']})",
    )
    print_parts(console, (table, terminal.notes(notes)))
