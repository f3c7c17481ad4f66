"""`shardwise checkpoints`: lists the checkpoints of a run folder, and verifies each."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from shardwise.run.axes import AXES
from shardwise.run.problems import Problem, UserError

HELP = """List the checkpoints of a run folder, or one checkpoint: step, date, size, the layout that wrote it, and whether all
checksums match. Exit code 1 if one is damaged."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("folder", metavar="DIR", type=Path, help="a run folder, or a checkpoint")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def execute(args: argparse.Namespace) -> int:
    """List and verify."""
    # A run that is still training may remove a checkpoint meanwhile.
    found = [each for folder in _folders(args.folder) if (each := _describe(folder)) and folder.exists()]
    if args.json:
        print(json.dumps(dict(folder=str(args.folder), checkpoints=found)))
    else:
        _print(found)
    return 0 if all(each["verifies"] for each in found) else 1


def _folders(folder: Path) -> list[Path]:
    from shardwise.checkpoint.folder import complete
    from shardwise.checkpoint.format import MANIFEST

    if not folder.is_dir():
        raise UserError(Problem("there is no such folder", where=str(folder)))
    if (folder / MANIFEST).exists():
        return [folder]
    found = complete(folder)
    if not found:
        known = (folder / "run.toml").exists()
        reason = "has no checkpoint yet" if known else "is neither a run folder nor a checkpoint"
        raise UserError(Problem(reason, where=str(folder)))
    return found


def _describe(folder: Path) -> dict[str, Any]:
    """A checkpoint as one record; fields that cannot be read are left out."""
    from shardwise.checkpoint.folder import step_of
    from shardwise.checkpoint.format import damage, read_manifest

    try:
        manifest = read_manifest(folder)
        problems = [str(problem) for problem in damage(folder)]
    except UserError as e:
        return dict(folder=str(folder), step=step_of(folder), verifies=False, problems=[str(p) for p in e.problems])
    layout = {axis: manifest.layout[axis] for axis in AXES if manifest.layout.get(axis, 1) > 1}
    if layout.get("shard", 1) * manifest.layout.get("context", 1) > 1:
        layout["zero"] = manifest.layout.get("zero")
    return dict(
        folder=str(folder),
        step=manifest.step,
        saved=manifest.saved,
        bytes=manifest.bytes,
        layout=layout,
        verifies=not problems,
        problems=problems,
    )


def _print(found: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from shardwise.report import words

    table = Table(box=box.SIMPLE)
    for column in ("step", "saved", "size", "layout", "verifies"):
        table.add_column(column, justify="right" if column in ("step", "size") else "left")
    for each in found:
        layout = ", ".join(f"{axis} {size}" for axis, size in each.get("layout", {}).items()) or "1 rank"
        table.add_row(
            str(each["step"]),
            each.get("saved", "?").replace("T", " ").removesuffix("+00:00"),
            words.size(each["bytes"]) if "bytes" in each else "?",
            layout if "layout" in each else "?",
            "yes" if each["verifies"] else "no",
        )
    console = Console(highlight=False)
    console.print(table)
    for each in found:
        for problem in each["problems"]:
            console.print(problem, markup=False, soft_wrap=True)
