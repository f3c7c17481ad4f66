"""`shardwise verify`: runs a few steps, or a dry one, and compares every account with the plan."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.cli.machinery.options import at_least, new_file
from shardwise.cli.machinery.ranks import start_here, words_of
from shardwise.cli.machinery.terminal import progress_line, show_comparison
from shardwise.hardware.chips import unknown_chip
from shardwise.run import Run, UserError, counted, read_planned, read_run

if TYPE_CHECKING:
    from shardwise.measure.verify import Verdict

HELP = """Run a few steps of the real trainer and compare them with the plan: FLOPs, bytes on every axis, memory by owner, the
schedule, time. --dry runs one rank of a job of any size here, without data. --rehearse runs one rank with its real kernels on
this machine's GPU and stand-ins for its collectives. A run with serve.rate or serve.concurrency runs its load on an engine here;
--load compares the measurements of a server instead. Exit code 1 if plan and run differ."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("run", help="the run, a TOML file")
    parser.add_argument(
        "--dry", action="store_true", help="run one rank without data: tensors have shapes only, and nothing is sent"
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="run one rank with real kernels and memory, and stand-ins for collectives",
    )
    parser.add_argument("--hold", action="store_true", help="rehearse: each collective takes its planned time")
    parser.add_argument("--tune", action="store_true", help="rehearse: find the fastest GEMMs first, as training does")
    parser.add_argument(
        "--trace", type=new_file, metavar="FILE", help="rehearse: write the profile of a step to this file"
    )
    parser.add_argument("--load", metavar="FILE", help="for a run with [serve]: the output of `shardwise load --json`")
    parser.add_argument("--rank", type=at_least(0), help="dry or rehearse: which rank (default 0)")
    parser.add_argument("--steps", type=at_least(1), default=3, help="steps to time (default 3)")
    parser.add_argument(
        "--time",
        type=at_least(0, float),
        metavar="SHARE",
        help="also fail when the step time differs by more than this share",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", type=new_file, metavar="FILE", help="also write a page")


def execute(args: argparse.Namespace) -> int:
    """Count and compare with the plan."""
    alone = args.dry or args.rehearse
    if args.dry and args.rehearse:
        raise UserError("--dry has no data and --rehearse real kernels; choose one")
    if args.rank is not None and not alone:
        raise UserError("--rank is the rank of --dry or --rehearse; without them all ranks run")
    if not args.rehearse and (args.hold or args.tune or args.trace):
        raise UserError("--hold, --tune and --trace belong to --rehearse")
    # A dry run uses the job that `plan` plans; real steps use the one that `train` trains.
    planned = read_planned(args.run, args.overrides, (unknown_chip,)) if alone else None
    run = planned.run if planned else read_run(args.run, args.overrides, (unknown_chip,))
    if run.serve.rate or run.serve.concurrency:
        from shardwise.cli.planning.serving import verify_serving

        return verify_serving(args, run)
    if args.load:
        raise UserError("--load is for a run that serves: set serve.rate or serve.concurrency")
    args.left_open = planned.sentence() if planned else ""
    if args.time is not None and (args.dry or not (run.cluster.chip or run.cluster.profile)):
        reason = "a dry run is not timed" if args.dry else "set cluster.chip or cluster.profile to plan one"
        raise UserError(f"--time: there is no time to compare; {reason}")
    if run.layout.auto:
        from shardwise.plan.search import resolve

        run = resolve(run)
    if args.rehearse:
        return _rehearse(run, args)
    if args.dry:
        from shardwise.measure.verify import verify_dry

        with progress_line() as say:
            verdict = verify_dry(run, args.rank or 0, say)
        return _show([verdict], args)
    from shardwise.train.processes import launch
    from shardwise.train.processes.environment import rank_environment

    environment = rank_environment(os.environ)
    launch.check_here(run, environment)
    if environment is None and run.layout.world > 1:
        code = start_here(words_of(args), run.layout.world)
        return 1 if code == launch.ANSWER else code
    return _as_rank(run, args, environment)


def _rehearse(run: Run, args: argparse.Namespace) -> int:
    """Rehearse a rank, and print plan and rehearsal side by side."""
    from shardwise.measure.rehearse import rehearse
    from shardwise.train.processes.launch import answer

    with progress_line() as say:
        trace = Path(args.trace) if args.trace else None
        found = rehearse(run, args.rank or 0, hold=args.hold, tune=args.tune, steps=args.steps, trace=trace, say=say)
    notes = [
        f"rank {found.rank} of {run.layout.world} was rehearsed with random tokens and even routing, its collectives as stand-ins",
        f"{found.microbatches} of the step's {found.of} microbatches were run, and the plan is that of a step of as many",
    ]
    if not found.gpu:
        notes.append(
            "without a GPU, kernels and the peak of memory are not measured: parameters and optimizer are judged"
        )
    notes += [args.left_open] * bool(args.left_open)
    shown = {f"{d.account}: {d.name}": found.tolerance.get(d.name, float("inf")) for d in found.quantities}
    show_comparison("rehearsal", found.quantities, shown, notes, found.as_dict() if args.json else None, args.html)
    return answer(found.agrees)


def _as_rank(run: Run, args: argparse.Namespace, environment: object) -> int:
    import torch.distributed as dist

    from shardwise.measure.verify import verify_rank
    from shardwise.train.processes import launch

    if environment is None:
        return _show([verify_rank(run, args.steps)], args)
    launch.join(environment, run)  # type: ignore[arg-type]
    try:
        verdict = verify_rank(run, args.steps)
        every: list[Verdict | None] = [None] * run.layout.world
        dist.all_gather_object(every, verdict)
        verdicts = [v for v in every if v is not None]
        first = verdict.rank == 0
        code = _show(verdicts, args) if first else 0
    finally:
        launch.leave()
    return code


def _show(verdicts: list[Verdict], args: argparse.Namespace) -> int:
    """Print the first rank that differs, or rank 0 if none does; exit code 1 if one differs."""
    from shardwise.measure.verify import TOLERANCE, as_dict
    from shardwise.train.processes.launch import answer

    tolerance = TOLERANCE | ({"time": args.time} if args.time is not None else {})
    agrees = all(v.agrees(tolerance) for v in verdicts)
    worst = next((v for v in verdicts if not v.agrees(tolerance)), verdicts[0])
    shown = {"time": float("inf")} | tolerance
    notes = _sentences(verdicts, worst, args.left_open)
    found = as_dict(verdicts, tolerance) if args.json else None
    show_comparison("run", worst.differences(), shown, notes, found, args.html)
    return answer(agrees)


def _sentences(verdicts: list[Verdict], worst: Verdict, left_open: str) -> list[str]:
    same = sum(v.schedule for v in verdicts)
    ranks = counted(len(verdicts), "rank") if len(verdicts) > 1 else f"rank {worst.rank}"
    found = [f"{ranks} compared, rank {worst.rank} shown; with even routing and random tokens"]
    if same == len(verdicts):
        found.append(f"the pipeline executed its {counted(worst.actions, 'action')} in the order of the schedule")
        if worst.microbatches:
            found.append(
                f"{worst.microbatches} microbatches were run; the others of the step repeat those in its middle"
            )
    else:
        found.append(f"{counted(len(verdicts) - same, 'rank')} did not execute the schedule in its order")
    return found + [left_open] * bool(left_open)
