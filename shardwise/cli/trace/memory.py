"""Memory in `shardwise trace`: snapshots of PyTorch's allocator, from any program or recorded by `shardwise profile`, alone or
with a profile; compared with the plan, a run, or another snapshot."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli.machinery.options import write_file
from shardwise.ledger import Difference, as_dict
from shardwise.run import Problem, Run, UserError, read_run

if TYPE_CHECKING:
    from shardwise.trace.memory.history import MemoryHistory

TEMPORARY = ("logits", "gathered", "buffers")
"""Owners of a plan that live only within a pass; a snapshot cannot tell them apart."""


@dataclass(frozen=True)
class MemoryBaseline:
    """The memory that `--against` names."""

    name: str
    owners: Mapping[str, float]
    """Bytes at the peak, by owner."""

    def differences(self, history: MemoryHistory) -> list[Difference]:
        """Differences by owner, and of the peak."""
        names = dict.fromkeys([*self.owners, *history.owners])
        each = [
            Difference("memory", name, self.owners.get(name, 0.0), float(history.owners.get(name, 0))) for name in names
        ]
        return [*each, Difference("memory", "peak", sum(self.owners.values()), float(history.peak))]


def snapshots_among(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """The snapshots among the paths, and the other paths."""
    from shardwise.trace.memory.snapshot import is_snapshot

    found = [path for path in paths if is_snapshot(path)]
    return found, [path for path in paths if path not in found]


def histories_of(snapshots: Sequence[Path]) -> list[MemoryHistory]:
    """The memory history of every device in the snapshots."""
    from shardwise.trace.memory.history import explain_snapshot
    from shardwise.trace.memory.snapshot import read_snapshots

    return [explain_snapshot(each) for path in snapshots for each in read_snapshots(path)]


def profiled_histories(paths: Sequence[Path]) -> list[MemoryHistory]:
    """The memory histories of the ranks of profiles that `shardwise profile` recorded on GPUs."""
    from shardwise.trace.memory.history import explain_snapshot
    from shardwise.trace.memory.snapshot import read_profiled

    found = []
    for path in paths:
        for file in sorted((path / "memory").glob("rank-*.json.gz")) if path.is_dir() else ():
            snapshot = read_profiled(file, int(file.name.split("-")[1].split(".")[0]))
            if snapshot is not None:
                found.append(explain_snapshot(snapshot))
    return found


def baseline_of(args: argparse.Namespace, rank: int) -> MemoryBaseline | None:
    """The memory that `--against` names; None if it has none."""
    from shardwise.trace.memory.snapshot import is_snapshot

    if args.against is None:
        return None
    if args.against == "plan":
        from shardwise.cli.trace.against import run_beside

        return planned_of(run_beside(args.paths), rank)
    path = Path(args.against)
    if not path.exists():
        raise UserError(
            Problem(f"{path} does not exist; give a plan, a run, a snapshot, or the word plan", "--against")
        )
    if path.suffix == ".toml":
        return planned_of(read_run(path, []), rank)
    if is_snapshot(path) or path.is_dir():
        others = profiled_histories([path]) if path.is_dir() else histories_of([path])[:1]
        other = next((each for each in others if each.rank == rank), others[0] if others else None)
        if other is None:
            return None
        return MemoryBaseline("before", {name: float(size) for name, size in other.owners.items()})
    try:
        stages = json.loads(path.read_text(encoding="utf-8"))["memory"]["stages"]
        return MemoryBaseline("plan", _as_seen(max(stages, key=lambda owners: sum(owners.values()))))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def planned_of(run: Run, rank: int) -> MemoryBaseline:
    """The planned memory of a rank, as the allocator sees it."""
    from shardwise.plan.plan import plan

    stages = plan(run).account.memory.ranks
    return MemoryBaseline(
        "plan", _as_seen(stages[min(rank * len(stages) // max(run.layout.world, 1), len(stages) - 1)])
    )


def _as_seen(owners: Mapping[str, float]) -> dict[str, float]:
    """A plan's owners as in a snapshot: without memory outside the allocator, and with the owners it cannot tell apart summed."""
    kept = {name: float(size) for name, size in owners.items() if name not in (*TEMPORARY, "workspace") and size}
    return kept | {"temporary": float(sum(owners.get(name, 0.0) for name in TEMPORARY))}


def execute_memory(args: argparse.Namespace, snapshots: Sequence[Path]) -> int:
    """Report on snapshots alone. Exit code 1 if the peak exceeds what `--fail-above` allows."""
    histories = histories_of(snapshots)
    if not histories:
        raise UserError(Problem("has no device with memory or a history", where=str(snapshots[0])))
    others = [baseline_of(args, history.rank) for history in histories]
    if args.against is not None and None in others:
        raise UserError(Problem(f"{args.against} has no memory to compare with", "--against"))
    passed = all(passes(args, history, other) for history, other in zip(histories, others, strict=True))
    if args.html:
        from shardwise.report import html, memory_view

        parts = [section for history, other in zip(histories, others, strict=True)
                 for section in memory_view.sections(as_record(history), None if other is None else other.owners)]  # fmt: skip
        write_file(args.html, html.page(f"Memory of {snapshots[0].name}", parts).encode())
        print(f"wrote {args.html}", file=sys.stderr)
    if args.json:
        print(json.dumps({"memory_snapshots": as_json(histories, others), "passed": passed}))
    else:
        show(histories, others)
    return 0 if passed else 1


def passes(args: argparse.Namespace, history: MemoryHistory, other: MemoryBaseline | None) -> bool:
    """Whether the peak is within the allowed limit."""
    if other is None or args.fail_above is None:
        return True
    return history.peak <= sum(other.owners.values()) * (1 + args.fail_above / 100)


def as_record(history: MemoryHistory) -> dict[str, Any]:
    """A history as plain data."""
    return as_dict(history) | {"fragmentation": history.fragmentation}


def as_json(histories: Sequence[MemoryHistory], others: Sequence[MemoryBaseline | None]) -> list[dict[str, Any]]:
    """The histories as JSON data; sizes in bytes, times in microseconds."""
    found = []
    for history, other in zip(histories, others, strict=True):
        found.append(as_record(history))
        if other is not None:
            found[-1]["against"] = {"name": other.name, "differences": as_dict(other.differences(history))}
    return found


def show(histories: Sequence[MemoryHistory], others: Sequence[MemoryBaseline | None]) -> None:
    """Print the histories."""
    from rich.text import Text

    from shardwise.report import memory_view, terminal

    console = terminal.Console(highlight=False)
    for history, other in zip(histories, others, strict=True):
        record = as_record(history)
        console.print(terminal.key_figures(memory_view.figures(record)))
        heads, rows = memory_view.owner_rows(record, None if other is None else other.owners)
        for names, lines in (
            (heads, rows),
            (["the largest at the peak", "owner", "held", "allocations"], memory_view.place_rows(record)),
        ):
            table = terminal.plain_table()
            for at, name in enumerate(names):
                table.add_column(name, justify="left" if at == 0 or name == "owner" else "right", no_wrap=True)
            for line in lines:
                table.add_row(*map(Text, line))
            console.print()
            console.print(table)
        console.print()
        for text in memory_view.curve(record):
            console.print(Text(text))
