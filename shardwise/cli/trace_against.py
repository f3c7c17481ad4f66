"""`shardwise trace --against`: a profile beside its plan, or beside another profile; and the gate for continuous integration.

What stands behind `--against` decides which: the word `plan` is the run that `shardwise profile` kept beside the traces; a run
(TOML) or what `shardwise plan --json` printed is a plan; anything else is another profile, recorded before.
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
    from shardwise.trace.compare import KernelChange

SHOWN = 12
"""Kernels whose change is printed."""


@dataclass(frozen=True)
class Beside:
    """A profile and what it is compared with."""

    names: tuple[str, str]
    differences: tuple[Difference, ...]
    before: float
    """Seconds of a step there."""
    after: float
    """… and here."""
    kernels: tuple[KernelChange, ...] = ()
    timeline: Timeline | None = None
    """What was predicted, where a run says how."""

    @property
    def slower(self) -> float:
        """By how many percent the profile's step is slower; negative when it is faster."""
        return (self.after / self.before - 1) * 100 if self.before else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {
            "names": list(self.names),
            "step_before": self.before,
            "step_after": self.after,
            "slower_percent": self.slower,
            "differences": as_dict(self.differences),
            "kernels": [as_dict(one) | {"change": one.change} for one in self.kernels],
        }


def beside(args: argparse.Namespace, answers: Explanation) -> Beside:
    """What `--against` asks for."""
    if args.against == "plan":
        return _plan_of_run(_run_beside(args.paths), answers)
    path = Path(args.against)
    if not path.exists():
        raise UserError(Problem(f"{path} is not there; give a plan, a run or a profile, or the word plan", "--against"))
    if path.suffix == ".toml":
        return _plan_of_run(read_run(path, []), answers)
    planned = _read_plan(path)
    if planned is not None:
        return _plan(planned, answers)
    return _other_run(args, path, answers)


def _run_beside(paths: list[Path]) -> Run:
    """The run that was kept with the profiles."""
    for path in paths:
        for folder in (path, *path.parents[:2]):
            if (folder / "run.toml").is_file():
                return read_run(folder / "run.toml", [])
    raise UserError(Problem("no run.toml lies beside these profiles; name the run or its plan", "--against plan"))


def timeline_beside(paths: list[Path]) -> Timeline | None:
    """The predicted timeline of the run that was kept with the profiles; None where none was."""
    from shardwise.plan.plan import plan
    from shardwise.plan.time.timeline import timeline

    try:
        return timeline(plan(_run_beside(paths)).job)
    except UserError:
        return None


def _plan_of_run(run: Run, answers: Explanation) -> Beside:
    from shardwise.plan.plan import plan
    from shardwise.plan.time.timeline import timeline
    from shardwise.plan.trainer.traffic import traffic

    found = plan(run)
    rank = _slowest(answers)
    account = replace(found.account, traffic=traffic(run, rank if rank < run.layout.world else None))
    return replace(_plan(account, answers, run.batch_tokens), timeline=timeline(found.job))


def _slowest(answers: Explanation) -> int:
    return max(answers.ranks, key=lambda rank: answers.ranks[rank]["span"], default=0)


def _read_plan(path: Path) -> Account | None:
    """What `shardwise plan --json` printed, or None for any other file."""
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


def _plan(planned: Account, answers: Explanation, tokens: float = 0.0) -> Beside:
    from shardwise.trace.account import account

    measured = account(answers, tokens=tokens or planned.tokens)
    if not planned.traffic.messages:
        measured = replace(measured, traffic=replace(measured.traffic, messages={}))
    found = [d for d in compare(planned, measured) if d.first or d.second]
    return Beside(("plan", "trace"), tuple(found), planned.step_seconds, measured.step_seconds)


def _other_run(args: argparse.Namespace, path: Path, answers: Explanation) -> Beside:
    from shardwise.cli.trace_read import explained
    from shardwise.trace.compare import compare_runs

    change = compare_runs(explained([path], args).answers, answers)
    return Beside(
        ("before", "after"), change.differences, change.step_before / 1e9, change.step_after / 1e9, change.kernels
    )


def show(found: Beside, passed: bool, args: argparse.Namespace) -> None:
    """Print it for a person; what is further apart than `--within` is marked."""
    from rich.console import Console
    from rich.table import Table

    from shardwise.report import terminal, words

    console = Console()
    console.print()
    console.print(terminal.comparison_table(list(found.differences), args.within / 100, found.names))
    if found.kernels:
        table = Table(box=None, padding=(0, 1), header_style="dim")
        for name in ("kernel", "module", "calls", "", "time a step", "", "change"):
            said = name in ("kernel", "module")
            table.add_column(
                name,
                justify="left" if said else "right",
                no_wrap=True,
                overflow="ellipsis",
                max_width=28 if said else None,
            )
        for one in found.kernels[:SHOWN]:
            name = (one.after or one.before)[0]
            table.add_row(
                name, one.module, f"{one.calls_before:.1f}", f"{one.calls_after:.1f}",
                words.seconds(one.time_before / 1e9), words.seconds(one.time_after / 1e9),
                f"{'+' if one.change > 0 else '-'}{words.seconds(abs(one.change) / 1e9)}",
            )  # fmt: skip
        console.print(table)
    than = f"{abs(found.slower):.1f} % {'slower' if found.slower > 0 else 'faster'} than {found.names[0]}"
    console.print(f"The step takes {words.seconds(found.after)}: {than}.", highlight=False)
    if not passed:
        console.print(f"That is more than the {args.fail_above:g} % allowed.", highlight=False)
