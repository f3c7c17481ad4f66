"""`shardwise validate`: predicts published measurements and prints the errors."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shardwise.cli.machinery.options import at_least, read_json
from shardwise.run import Problem, UserError

if TYPE_CHECKING:
    from shardwise.plan.published.validate import Prediction

HELP = """Predict published measurements and print the errors, by source and overall. Without ROWS, those that come with the
package. Each source is predicted with constants fitted without it."""

KINDS = ("training", "layer", "inference")
NEEDED = ("id", "group", "kind", "hardware", "model", "measured")
"""Keys that every row has."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("rows", nargs="*", help="JSON files, each a list of rows (see docs/validation.md)")
    parser.add_argument("--json", action="store_true", help="print JSON: every row and the summaries")
    parser.add_argument(
        "--seen", action="store_true", help="use the constants fitted to all sources, including the row's own"
    )
    parser.add_argument(
        "--without",
        choices=("source", "framework"),
        default="source",
        help="what to leave out of the fit that predicts a row: its source (default), or all rows of its program",
    )
    parser.add_argument(
        "--worst", type=at_least(0), default=10, help="rows with the largest errors to list (default 10)"
    )


def execute(args: argparse.Namespace) -> int:
    """Predict every row and show the errors."""
    from shardwise.plan.published.rows import published
    from shardwise.plan.published.validate import validate

    rows = [row for path in args.rows for row in _read(path)]
    if not args.rows:
        rows = [row for kind in (*KINDS, "own") for row in published(kind)]
    program = args.without == "framework"
    if args.seen and program:
        raise UserError(
            Problem("leaves rows out, and --seen uses all of them: choose one", "--without", "command line")
        )
    predictions = validate(rows, leave_out=not args.seen, program=program)
    if args.json:
        print(json.dumps(_as_json(predictions)))
    else:
        _print(predictions, args.worst, _how(args))
    return 0


def _read(path: str) -> list[dict[str, Any]]:
    """The rows of a file, checked."""
    rows = read_json(path, "a list of rows")
    if not isinstance(rows, list):
        raise UserError(Problem("is not a list of rows", where=path))
    problems = []
    for n, row in enumerate(rows):
        missing = [key for key in NEEDED if not isinstance(row, dict) or key not in row]
        if missing:
            problems.append(Problem(f"row {n} has no {', '.join(missing)}", where=path))
    if problems:
        raise UserError(*problems[:20])
    return rows


def _as_json(predictions: list[Prediction]) -> dict[str, Any]:
    from shardwise.plan.published.validate import summary

    groups = _by_group(predictions)
    return {
        "rows": [{k: v for k, v in asdict(p).items() if v not in (None, "", {}, ())} for p in predictions],
        "groups": {name: summary(members) for name, members in groups.items()},
        "overall": summaries(predictions),
    }


def summaries(predictions: list[Prediction]) -> dict[str, Any]:
    """Errors over all rows, over the complete ones, and for each kind of row."""
    from shardwise.plan.published.validate import summary

    complete = [p for p in predictions if p.complete]
    result = summary(predictions) | {"complete": summary(complete)}
    for name in sorted({p.classes for p in predictions if p.classes}):
        result[f"class: {name}"] = summary([p for p in predictions if p.classes == name])
    for kind in KINDS:
        members = [p for p in complete if p.kind == kind]
        if members:
            result[kind] = summary(members)
    return result


def _by_group(predictions: list[Prediction]) -> dict[str, list[Prediction]]:
    return {name: [p for p in predictions if p.group == name] for name in sorted({p.group for p in predictions})}


def _how(args: argparse.Namespace) -> str:
    if args.seen:
        return "constants fitted to all sources"
    what = "program" if args.without == "framework" else "source"
    return f"each {what} predicted with constants fitted without it"


def _print(predictions: list[Prediction], worst: int, how: str) -> None:
    from rich.table import Table

    from shardwise.plan.published.validate import summary
    from shardwise.report import words
    from shardwise.report.terminal import Console

    console = Console()
    table = Table(box=None, padding=(0, 1), header_style="dim")
    table.add_column("source", no_wrap=True)
    for name in ("rows", "predicted", "median", "mean", "in 80%", "memory", "median"):
        table.add_column(name, justify="right")

    def add(name: str, members: list[Prediction], **style: Any) -> None:
        s = summary(members)
        share = [words.percent(s[k]) if s[k] is not None else "" for k in ("median_error", "mean_error", "coverage")]
        memory = words.percent(s["memory_median_error"]) if s["memory_rows"] else ""
        table.add_row(name, str(s["rows"]), str(s["supported"]), *share, str(s["memory_rows"] or ""), memory, **style)

    for name, members in _by_group(predictions).items():
        add(name, members)
    table.add_section()
    for kind in KINDS:
        members = [p for p in predictions if p.kind == kind]
        if members:
            add(f"{kind}, complete rows", [p for p in members if p.complete], style="bold")
            add(f"{kind}, all rows", members)
    classes = sorted({p.classes for p in predictions if p.classes})
    table.add_section()
    for name in classes:
        add(name, [p for p in predictions if p.classes == name])
    console.print(table)
    console.print(
        f"\nErrors are relative, without sign; {how}.\nin 80%: measurements inside the 80% interval.\n", style="dim"
    )
    far = sorted((p for p in predictions if p.error is not None), key=lambda p: -abs(p.error or 0))[:worst]
    for p in far:
        console.print(f"  {words.change(p.error or 0):>8}  {p.id}  ({p.group})", highlight=False)
    for reason, count in Counter(p.reason for p in predictions if not p.supported).most_common():
        console.print(f"  {count} not predicted: {reason}", style="dim", highlight=False)
