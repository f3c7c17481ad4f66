"""`shardwise trace --against`: compares a profile with its plan or another profile, and is the gate for continuous integration.

The word `plan` means the run that `shardwise profile` stored with the traces; a run (TOML) or the output of `shardwise plan
--json` is a plan; anything else is another profile, recorded earlier.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.ledger import Account, Difference, Memory, Timeline, Traffic, as_dict, compare
from shardwise.run import Problem, Run, UserError, read_run

if TYPE_CHECKING:
    from shardwise.trace.answers import Explanation
    from shardwise.trace.export import KernelChange

SHOWN = 12
"""Most kernels whose change is printed."""


@dataclass(frozen=True)
class Comparison:
    """A profile compared with a plan or another profile."""

    names: tuple[str, str]
    differences: tuple[Difference, ...]
    before: float
    """Seconds of a step in the plan or the other profile."""
    after: float
    """Seconds of a step in the profile."""
    kernels: tuple[KernelChange, ...] = ()
    timeline: Timeline | None = None
    """The predicted timeline, if compared with a run."""

    @property
    def slower(self) -> float:
        """By how many percent the profile's step is slower; negative if it is faster."""
        return (self.after / self.before - 1) * 100 if self.before else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The comparison as JSON data."""
        return {
            "names": list(self.names),
            "step_before": self.before,
            "step_after": self.after,
            "slower_percent": self.slower,
            "differences": as_dict(self.differences),
            "kernels": [as_dict(one) | {"change": one.change} for one in self.kernels],
        }


def compare_with(args: argparse.Namespace, answers: Explanation) -> Comparison:
    """The comparison requested by `--against`."""
    if args.against == "plan":
        return _with_run(_on_device(run_beside(args.paths), answers), answers)
    path = Path(args.against)
    if not path.exists():
        raise UserError(Problem(f"{path} does not exist; give a plan, a run, a profile, or the word plan", "--against"))
    if path.suffix == ".toml":
        return _with_run(read_run(path, []), answers)
    planned = _read_plan(path)
    return _with_plan(planned, answers) if planned is not None else _with_profile(args, path, answers)


def run_beside(paths: list[Path]) -> Run:
    """The run stored with the profiles."""
    for path in paths:
        for folder in (path, *path.parents[:2]):
            if (folder / "run.toml").is_file():
                return read_run(folder / "run.toml", [])
    raise UserError(Problem("no run.toml lies beside these profiles; name the run or its plan", "--against plan"))


def _on_device(run: Run, answers: Explanation) -> Run:
    """A recorded run; if it names no chip, with the chip it was recorded on, so that the plan is for that one."""
    from shardwise.cli.trace.read import chip_of

    chip = chip_of(answers.devices.values())
    if run.cluster.chip or run.cluster.profile or chip is None:
        return run
    return replace(run, cluster=replace(run.cluster, chip=chip.name))


def planned_timeline(paths: list[Path], answers: Explanation) -> Timeline | None:
    """The predicted timeline of the run stored with the profiles; None if there is none."""
    from shardwise.plan.plan import plan
    from shardwise.plan.time.timeline import timeline

    try:
        return timeline(plan(_on_device(run_beside(paths), answers)).job)
    except UserError:
        return None


def _with_run(run: Run, answers: Explanation) -> Comparison:
    from shardwise.plan.plan import plan
    from shardwise.plan.time.timeline import timeline
    from shardwise.plan.trainer.traffic import traffic

    found = plan(run)
    rank = answers.slowest
    account = replace(found.account, traffic=traffic(run, rank if rank < run.layout.world else None))
    return replace(_with_plan(account, answers, run.batch_tokens), timeline=timeline(found.job))


def _read_plan(path: Path) -> Account | None:
    """The output of `shardwise plan --json`, or None for any other file."""
    if path.is_dir() or path.suffix != ".json" or path.stat().st_size > 16 * 2**20:
        return None
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(given, dict) or not {"step_seconds", "breakdown", "traffic"} <= given.keys():
        return None
    try:
        return Account(
            "plan",
            float(given["step_seconds"]),
            float(given.get("tokens_per_s", 0)) * float(given["step_seconds"]),
            {str(name): float(value) for name, value in given["breakdown"].items()},
            memory=Memory(),
            traffic=Traffic(
                {axis: {k: float(v) for k, v in kinds.items()} for axis, kinds in given["traffic"].items()}
            ),
        )
    except (AttributeError, TypeError, ValueError):
        raise UserError(Problem(f"{path} looks like a plan, but its numbers cannot be read", "--against")) from None


def _with_plan(planned: Account, answers: Explanation, tokens: float = 0.0) -> Comparison:
    from shardwise.trace.export import account

    measured = account(answers, tokens=tokens or planned.tokens)
    if not planned.traffic.messages:
        measured = replace(measured, traffic=replace(measured.traffic, messages={}))
    found = [d for d in compare(planned, measured) if d.first or d.second]
    return Comparison(("plan", "trace"), tuple(found), planned.step_seconds, measured.step_seconds)


def _with_profile(args: argparse.Namespace, path: Path, after: Explanation) -> Comparison:
    from shardwise.cli.trace.read import read_and_explain
    from shardwise.trace.export import differences, kernel_changes

    before = read_and_explain([path], args).answers
    found, kernels = differences(before, after), kernel_changes(before, after)
    return Comparison(("before", "after"), found, before.step_time / 1e9, after.step_time / 1e9, kernels)


def show(comparison: Comparison, passed: bool, args: argparse.Namespace) -> None:
    """Print the comparison; differences above `--within` are marked."""
    from rich.console import Console
    from rich.table import Table

    from shardwise.report import terminal, trace_view, words

    console = Console()
    console.print()
    console.print(terminal.comparison_table(list(comparison.differences), args.within / 100, comparison.names))
    if comparison.kernels:
        table = Table(box=None, padding=(0, 1), header_style="dim")
        for name in ("kernel", "module", "calls", "", "time a step", "", "change"):
            text = name in ("kernel", "module")
            table.add_column(
                name, justify="left" if text else "right", no_wrap=not text, max_width=44 if text else None
            )
        shown = comparison.kernels[:SHOWN]
        names = trace_view.short_kernels([(one.after or one.before)[0] for one in shown], 44)
        for one, name in zip(shown, names, strict=True):
            table.add_row(
                terminal.Name(terminal.safe(name)), terminal.Name(terminal.safe(one.module)),
                f"{one.calls_before:.1f}", f"{one.calls_after:.1f}",
                words.seconds(one.time_before / 1e9), words.seconds(one.time_after / 1e9),
                f"{'+' if one.change > 0 else '-'}{words.seconds(abs(one.change) / 1e9)}",
            )  # fmt: skip
        console.print(table)
    share = comparison.slower / 100
    than = f"{words.slower(share)} {'as' if share >= 1 else 'than'} {comparison.names[0]}"
    console.print(f"The step takes {words.seconds(comparison.after)}: {than}.", highlight=False)
    if not passed:
        console.print(f"That is more than the {args.fail_above:g}% allowed.", highlight=False)
