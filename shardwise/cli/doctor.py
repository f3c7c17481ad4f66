"""`shardwise doctor`: checks what is installed and works here, what will fail, and how to fix it, for this machine or a run on
it."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.run import Problem, UserError, read_run

if TYPE_CHECKING:
    from shardwise.measure.doctor import Finding

HELP = """Check what runs need on this machine: packages, PyTorch, GPUs and their clocks, NCCL, limits, disk, clock. With a run,
also check whether that run can start here. Exit code 1 if something will fail."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("run", nargs="?", help="also check whether this run, a TOML file, can start here")
    parser.add_argument("--json", action="store_true", help="print JSON")


def execute(args: argparse.Namespace) -> int:
    """Run the checks and print the findings."""
    from shardwise import __version__
    from shardwise.cli.machinery.versions import package_versions, torch_built_for
    from shardwise.measure.doctor import as_json, examine

    versions = package_versions()
    findings = examine(versions, torch_built_for(), Path.cwd())
    if args.run or args.overrides:
        findings += _of_run(args, bool(versions["torch"]))
    found = as_json(findings, {"shardwise": __version__} | versions)
    if args.json:
        print(json.dumps(found))
    else:
        _print(findings)
    return 0 if found["good"] else 1


def _of_run(args: argparse.Namespace, has_torch: bool) -> list[Finding]:
    """Check whether a run is valid, fits in memory, and can start on this machine."""
    from shardwise.hardware.chips import unknown_chip
    from shardwise.measure.doctor import Finding
    from shardwise.plan.plan import plan
    from shardwise.plan.search import resolve

    found = []
    try:
        run = resolve(read_run(args.run, args.overrides, (unknown_chip,)))
        planned = plan(run)
        memory, capacity = planned.account.memory.peak / 2**30, planned.account.memory.capacity / 2**30
        state, mend = ("good", "") if planned.fits else ("bad", "`shardwise plan` shows which layouts fit")
        found.append(Finding("run", "memory", f"{memory:.1f} of {capacity:.1f} GiB", state, mend))
        missing = [path for path in (*run.data.sets, *run.data.validation) if not Path(path).exists()]
        found += [
            Finding("run", "data", path, "bad", "is not here: `shardwise data build` makes it") for path in missing
        ]
        if has_torch:
            from shardwise.train.processes import launch
            from shardwise.train.processes.environment import rank_environment

            launch.check_here(run, rank_environment(os.environ, own_agent=bool(run.cluster.rendezvous)))
            launch.check_gpus(run)
        found.append(Finding("run", "start", f"{run.layout.world} ranks can start"))
    except UserError as e:
        found += [
            Finding(
                "run", problem.key or "run", "cannot start", "bad", str(Problem(problem.message, "", problem.where))
            )
            for problem in e.problems
        ]
    return found


def _print(findings: list[Finding]) -> None:
    from rich.text import Text

    from shardwise.report import terminal

    signs = {"good": ("ok", "green"), "note": ("note", "yellow"), "bad": ("FAILS", "bold red")}
    console = terminal.Console()
    table = terminal.plain_table()
    for name in ("", "", "", ""):
        table.add_column(name, no_wrap=False)
    table.show_header = False
    topic = ""
    for each in findings:
        word, style = signs[each.state]
        value = f"{each.value}: {each.mend}" if each.mend else each.value
        table.add_row(
            Text(each.topic if each.topic != topic else "", style="dim"),
            Text(each.name),
            Text(word, style=style),
            Text(value),
        )
        topic = each.topic
    console.print(table)
