"""`shardwise trace` of memory: snapshots of PyTorch's allocator, of any program or recorded by `shardwise profile`, alone or beside
the time of a profile; against the plan, a run, or another snapshot."""

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
    from shardwise.trace.memory.story import MemoryStory

TEMPORARY = ("logits", "gathered", "buffers")
"""Owners of a plan that come and go within a pass: a snapshot cannot tell them apart."""


@dataclass(frozen=True)
class Beside:
    """What memory is compared with."""

    name: str
    owners: Mapping[str, float]
    """Bytes at the peak."""

    def differences(self, story: MemoryStory) -> list[Difference]:
        """Owner by owner, and all together."""
        names = dict.fromkeys([*self.owners, *story.owners])
        each = [
            Difference("memory", name, self.owners.get(name, 0.0), float(story.owners.get(name, 0))) for name in names
        ]
        return [*each, Difference("memory", "peak", sum(self.owners.values()), float(story.peak))]


def snapshots_among(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Snapshots, and what is left."""
    from shardwise.trace.memory.snapshot import is_snapshot

    found = [path for path in paths if is_snapshot(path)]
    return found, [path for path in paths if path not in found]


def stories_of(snapshots: Sequence[Path]) -> list[MemoryStory]:
    """Every device of some snapshots."""
    from shardwise.trace.memory.snapshot import read_snapshots
    from shardwise.trace.memory.story import tell

    return [tell(each) for path in snapshots for each in read_snapshots(path)]


def stories_beside(paths: Sequence[Path]) -> list[MemoryStory]:
    """Of the ranks of profiles that `shardwise profile` recorded on GPUs."""
    from shardwise.trace.memory.snapshot import read_profiled
    from shardwise.trace.memory.story import tell

    found = []
    for path in paths:
        for file in sorted((path / "memory").glob("rank-*.json.gz")) if path.is_dir() else ():
            snapshot = read_profiled(file, int(file.name.split("-")[1].split(".")[0]))
            if snapshot is not None:
                found.append(tell(snapshot))
    return found


def beside(args: argparse.Namespace, rank: int) -> Beside | None:
    """What `--against` names, as memory; None where it has none."""
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
    if is_snapshot(path):
        other = next(iter(stories_of([path])), None)
        return None if other is None else Beside("before", {name: float(size) for name, size in other.owners.items()})
    if path.is_dir():
        others = stories_beside([path])
        other = next((each for each in others if each.rank == rank), others[0] if others else None)
        return None if other is None else Beside("before", {name: float(size) for name, size in other.owners.items()})
    try:
        stages = json.loads(path.read_text(encoding="utf-8"))["memory"]["stages"]
        return Beside("plan", _as_seen(max(stages, key=lambda owners: sum(owners.values()))))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(Problem(f"{path} has no memory to compare with", "--against")) from None


def planned_of(run: Run, rank: int) -> Beside:
    """The plan of a rank, as the allocator sees it."""
    from shardwise.plan.plan import plan

    stages = plan(run).account.memory.ranks
    return Beside("plan", _as_seen(stages[min(rank * len(stages) // max(run.layout.world, 1), len(stages) - 1)]))


def _as_seen(owners: Mapping[str, float]) -> dict[str, float]:
    """A plan's owners as a snapshot has them: what is not the allocator's left out, what it cannot tell apart together."""
    kept = {name: float(size) for name, size in owners.items() if name not in (*TEMPORARY, "workspace") and size}
    return kept | {"temporary": float(sum(owners.get(name, 0.0) for name in TEMPORARY))}


def execute_memory(args: argparse.Namespace, snapshots: Sequence[Path]) -> int:
    """Tell snapshots alone. Exit code 1 where the peak is above what `--fail-above` allows."""
    stories = stories_of(snapshots)
    if not stories:
        raise UserError(Problem("has no device with memory or a history", where=str(snapshots[0])))
    others = [beside(args, story.rank) for story in stories]
    passed = all(passes(args, story, other) for story, other in zip(stories, others, strict=True))
    if args.html:
        from shardwise.report import html, memory_view

        parts = [section for story, other in zip(stories, others, strict=True)
                 for section in memory_view.sections(as_record(story), None if other is None else other.owners)]  # fmt: skip
        write_file(args.html, html.page(f"Memory of {snapshots[0].name}", parts).encode())
        print(f"wrote {args.html}", file=sys.stderr)
    if args.json:
        print(json.dumps({"memory_snapshots": as_json(stories, others), "passed": passed}))
    else:
        show(stories, others)
    return 0 if passed else 1


def passes(args: argparse.Namespace, story: MemoryStory, other: Beside | None) -> bool:
    """Whether a peak is not above what is allowed."""
    if other is None or args.fail_above is None:
        return True
    return story.peak <= sum(other.owners.values()) * (1 + args.fail_above / 100)


def as_record(story: MemoryStory) -> dict[str, Any]:
    """A story as plain data."""
    return as_dict(story) | {"fragmentation": story.fragmentation}


def as_json(stories: Sequence[MemoryStory], others: Sequence[Beside | None]) -> list[dict[str, Any]]:
    """For programs; sizes in bytes, times in microseconds."""
    found = []
    for story, other in zip(stories, others, strict=True):
        more = (
            {} if other is None else {"against": {"name": other.name, "differences": as_dict(other.differences(story))}}
        )
        found.append(as_record(story) | more)
    return found


def show(stories: Sequence[MemoryStory], others: Sequence[Beside | None]) -> None:
    """For people."""
    from rich.text import Text

    from shardwise.report import memory_view, terminal

    console = terminal.Console(highlight=False)
    for story, other in zip(stories, others, strict=True):
        record = as_record(story)
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
        for text in memory_view.lines(record):
            console.print(Text(text))
