"""`shardwise trace`: explains where the time of a profile went, on which rank and axis it was lost, and what to change first."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli.machinery.options import at_least, new_file, write_file
from shardwise.cli.machinery.terminal import print_parts
from shardwise.cli.trace.read import Explained, read_and_explain
from shardwise.hardware.chips import ITEM_BYTES
from shardwise.ledger import Timeline, as_dict
from shardwise.run import UserError
from shardwise.run.problems import nearest

if TYPE_CHECKING:
    from shardwise.cli.trace.against import Comparison
    from shardwise.trace.answers import Explanation
    from shardwise.trace.rank import Rank

HELP = """Explain where the time of a profile went: each rank's time, what it waited for, and what to change first. Reads the JSON
of PyTorch's profiler (Kineto, plain or gzipped) from this trainer or any program, on NVIDIA or AMD GPUs or on CPUs alone; also
Nsight Systems (SQLite) and JAX (*.trace.json.gz, *.xplane.pb). Give files or folders, of all ranks or some of them. For snapshots
of PyTorch's CUDA allocator (pickles) it shows memory by owner over time, and what fills the peak. docs/tracing.md explains every
number."""

SPANS = 90_000
"""Approximate number of spans in the timeline of all ranks on a page."""
CLOSE_UP = 60_000
"""Approximate number of kernels in a close-up, so that a page stays usable."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="profiles, or folders of them")
    parser.add_argument("--json", action="store_true", help="print JSON: every answer, times in nanoseconds")
    parser.add_argument(
        "--from-step", type=int, metavar="N", help="first profiler step to read (default: all complete ones)"
    )
    parser.add_argument("--to-step", type=int, metavar="N", help="last profiler step to read")
    parser.add_argument("--all-events", action="store_true", help="read the whole file, whatever its steps")
    parser.add_argument(
        "--cache", type=Path, metavar="DIR", help="cache of parsed profiles (default: in the user's cache folder)"
    )
    parser.add_argument("--no-cache", action="store_true", help="do not use the cache")
    parser.add_argument(
        "--against",
        metavar="WHAT",
        help="compare with `plan` (of the recorded run), a run, a plan, or another profile",
    )
    parser.add_argument(
        "--fail-above",
        type=float,
        metavar="PERCENT",
        help="exit code 1 if the step is slower than --against by more than this",
    )
    parser.add_argument(
        "--within",
        type=at_least(0, float),
        default=10.0,
        metavar="PERCENT",
        help="mark differences from --against above this (default 10)",
    )
    parser.add_argument(
        "--chip", metavar="NAME", help="chip whose peak the MFU refers to (default: from the device name)"
    )
    parser.add_argument("--dtype", default="bfloat16", help="dtype of the GEMMs, for the peak (default bfloat16)")
    parser.add_argument("--html", type=new_file, metavar="FILE", help="also write a page with charts; it works offline")
    parser.add_argument(
        "--perfetto",
        "--export",
        dest="export",
        type=new_file,
        metavar="FILE",
        help="also write all ranks and the plan, for Perfetto",
    )


def execute(args: argparse.Namespace) -> int:
    """Read, select, explain, compare, print. Exit code 1 if the gate of `--fail-above` fails."""
    _check(args)
    from shardwise.cli.trace import memory

    snapshots, profiles = memory.snapshots_among(args.paths)
    if snapshots and not profiles:
        return memory.execute_memory(args, snapshots)
    args.paths = profiles
    histories = [*memory.histories_of(snapshots), *memory.profiled_histories(profiles)]
    others = [memory.baseline_of(args, history.rank) for history in histories]
    explained = read_and_explain(args.paths, args)
    comparison = None
    if args.against is not None:
        from shardwise.cli.trace.against import compare_with

        comparison = compare_with(args, explained.answers)
    passed = comparison is None or args.fail_above is None or comparison.slower <= args.fail_above
    if args.export:
        _export(explained, comparison, args)
    if args.html:
        write_file(args.html, trace_page(explained, comparison, args.within).encode())
        print(f"wrote {args.html}", file=sys.stderr)
    if args.json:
        compared = {"against": comparison.as_dict() | {"passed": passed}} if comparison else {}
        told = {"memory_snapshots": memory.as_json(histories, others)} if histories else {}
        print(json.dumps(as_json(explained) | compared | told))
    else:
        _print(explained.answers, explained.problems)
        if comparison is not None:
            from shardwise.cli.trace.against import show

            show(comparison, passed, args)
        if histories:
            print()
            memory.show(histories, others)
    return 0 if passed else 1


def _export(explained: Explained, comparison: Comparison | None, args: argparse.Namespace) -> None:
    """Write all ranks, and the plan if there is one, as a Chrome trace."""
    from shardwise.cli.trace.against import planned_timeline
    from shardwise.report.perfetto import write_chrome_trace
    from shardwise.trace.timeline import timeline

    planned = comparison.timeline if comparison is not None else planned_timeline(args.paths, explained.answers)
    ranks = {r.profile.rank: r for r in explained.ranks}
    lines = {"run: rank": timeline(ranks, explained.answers.clocks, None)}
    if planned is not None:
        lines = {"plan: pipeline rank": planned} | lines
    write_chrome_trace(lines, args.export)
    print(f"wrote {args.export}", file=sys.stderr)


def as_json(explained: Explained) -> dict[str, Any]:
    """The output of `--json`: every answer by name, the selected time windows, and the problems."""
    from shardwise.trace import export

    windows: dict[str, list[list[int | None]]] = {}
    for r in explained.ranks:
        by_step: list[list[int | None]] = [[step.number, step.start, step.end] for step in r.selection.steps]
        whole = zip(*r.windows, strict=True)
        windows[str(r.profile.rank)] = by_step or [[None, int(start), int(end)] for start, end in whole]
    return {**export.as_json(explained.answers), "windows": windows, "problems": list(explained.problems)}


def trace_page(explained: Explained, comparison: Comparison | None, within: float) -> str:
    """The page; differences from the comparison above `within` percent are marked."""
    from shardwise.report import html, html_trace
    from shardwise.trace.timeline import timeline

    answers = explained.answers
    points = min(max(SPANS // (3 * max(1, len(answers.seen))), 100), 1500)
    drawn = timeline({r.profile.rank: r for r in explained.ranks}, answers.clocks, points)
    sections = html_trace.sections(as_dict(answers), drawn, close_up(explained), explained.problems)
    if comparison is not None:
        sections.insert(2, html.comparison_table(comparison.differences, within / 100, comparison.names))
    first = Path(explained.ranks[0].profile.path)
    name = first.parent.parent.name if first.parent.name == "ranks" else first.parent.name or first.stem
    devices = sorted({device for device in answers.devices.values() if device})
    remark = f"{len(answers.seen)} of {answers.world} ranks" + (f" on {', '.join(devices)}" if devices else "")
    return html.page(f"Profile of {name}", sections, remark)


def close_up(explained: Explained) -> Timeline | None:
    """Every kernel of one step: of the slowest rank, then the fastest, then others as far as they fit."""
    from shardwise.trace.spans.intervals import window
    from shardwise.trace.spans.steps import Selection
    from shardwise.trace.timeline import timeline

    ranks = {r.profile.rank: r for r in explained.ranks}
    spans = {rank: row["span"] for rank, row in explained.answers.ranks.items()}
    order = sorted(spans, key=lambda rank: (-spans[rank], rank))
    order = list(dict.fromkeys([*order[:1], *order[-1:], *order]))
    steps = ranks[order[0]].selection.steps if order else ()
    if not steps:
        return None
    number = max(steps, key=lambda step: step.end - step.start).number
    drawn: dict[int, Rank] = {}
    left = CLOSE_UP
    for rank in order:
        step = next((step for step in ranks[rank].selection.steps if step.number == number), None)
        if step is None:
            continue
        busy = ranks[rank].activity
        left -= int(((busy.start < step.end) & (busy.end > step.start)).sum())
        if left < 0 and drawn:
            break
        drawn[rank] = ranks[rank].over(Selection(window(step.start, step.end), (step,)))
    return timeline(dict(sorted(drawn.items())), explained.answers.clocks, None)


def _check(args: argparse.Namespace) -> None:
    first, last = args.from_step, args.to_step
    if args.all_events and (first is not None or last is not None):
        raise UserError("--all-events looks at the whole file; leave it out to choose steps")
    if first is not None and last is not None and last < first:
        raise UserError(f"--to-step {last} comes before --from-step {first}")
    if args.dtype not in ITEM_BYTES:
        known = nearest(args.dtype, ITEM_BYTES) or f"; known: {', '.join(ITEM_BYTES)}"
        raise UserError(f'--dtype: there is no "{args.dtype}"{known}')
    if args.fail_above is not None and args.against is None:
        raise UserError("--fail-above needs --against, which says what the step is compared with")


def _print(answers: Explanation, problems: tuple[str, ...]) -> None:
    from shardwise.report import terminal_trace
    from shardwise.report.terminal import Console

    print_parts(Console(), terminal_trace.sections(as_dict(answers)))
    for problem in problems:
        print(f"problem: {problem}", file=sys.stderr)
