"""`shardwise bench`: measures this machine into a profile for the planner."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli.machinery.options import at_least, write_file
from shardwise.run import Problem, Run, UserError, counted, read_planned

if TYPE_CHECKING:
    from rich.table import Table

    from shardwise.hardware import Profile
    from shardwise.measure.bench.machine import Progress
    from shardwise.train.processes.environment import RankEnvironment

HELP = """Measure this machine: GEMMs, attention, copies, the host overhead of a training step, and with --ranks collectives.
--serve measures the steps of the serving engine. Use the profile with `shardwise plan RUN --cluster.profile=FILE`."""

SECONDS, QUICK_SECONDS = 60.0, 10.0
MOST_RANKS = 4096
COLUMNS = ("size(B)", "count", "type", "redop", "time(us)", "algbw(GB/s)", "busbw(GB/s)")
"""Column names of nccl-tests."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument(
        "--out", metavar="FILE", default="hardware-profile.json", help="file to write (default: hardware-profile.json)"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--ranks", type=int, metavar="N", help="also measure collectives over N ranks of this machine")
    parser.add_argument("--serve", action="store_true", help="measure the steps of the serving engine instead")
    parser.add_argument("--only", choices=("kernels", "collectives"), help="measure only these")
    parser.add_argument(
        "--seconds", type=float, help=f"approximate time for kernels and for collectives, each (default {SECONDS:.0f})"
    )
    parser.add_argument("--quick", action="store_true", help=f"fewer shapes, about {QUICK_SECONDS:.0f} seconds")
    parser.add_argument(
        "--rehearse",
        dest="run",
        metavar="RUN",
        help="measure the GEMMs and the attention of one rank of this run, as in its step",
    )
    parser.add_argument("--rank", type=at_least(0), help="rehearse: which rank (default 0)")
    parser.add_argument("--json", action="store_true", help="print the profile instead of tables")
    parser.add_argument("--quiet", action="store_true", help="write the profile and print nothing")


def execute(args: argparse.Namespace) -> int:
    """Run the requested measurements, write the profile and print it."""
    from shardwise.train.processes.environment import rank_environment

    environment = rank_environment(os.environ)
    _check(args, environment)
    args.seconds = args.seconds or (QUICK_SECONDS if args.quick else SECONDS)
    if environment is not None:
        return _as_rank(args, environment)
    if args.run or args.serve:
        profile = _rehearsed(args) if args.run else _serving(args)
    else:
        from shardwise.measure.bench.machine import empty_profile

        profile = _kernels(args) if args.only != "collectives" else empty_profile(_device(args))
        if (args.ranks or 1) > 1 and args.only != "kernels":
            profile = replace(profile, collective=_collectives(args))
    _finish(args, profile)
    return 0


def _rehearsed(args: argparse.Namespace) -> Profile:
    """A profile with the points of a rehearsal."""
    from shardwise.cli.machinery.terminal import progress_line
    from shardwise.hardware.chips import unknown_chip
    from shardwise.measure.rehearse import rehearsed_profile

    run = read_planned(args.run, args.overrides, (unknown_chip,)).run
    if args.device != "auto":
        run = replace(run, train=replace(run.train, device=args.device))
    if run.layout.auto:
        from shardwise.plan.search import resolve

        run = resolve(run)
    with progress_line() as say:
        return rehearsed_profile(run, args.rank or 0, say)


def _check(args: argparse.Namespace, environment: RankEnvironment | None) -> None:
    """Report everything wrong with the command before anything is measured."""
    from shardwise.model.device import choose_device

    problems = []
    if args.overrides and not args.run:
        key = args.overrides[0].partition("=")[0]
        raise UserError(f"shardwise bench takes no run without --rehearse, so it has no --{key}")
    if args.rank is not None and not args.run:
        problems.append(Problem("is the rank of --rehearse; --ranks is a number of ranks", "--rank", "command line"))
    if args.ranks is not None and not 1 <= args.ranks <= MOST_RANKS:
        what = f"is {args.ranks}, but a machine has at least one rank and {MOST_RANKS:,} at most"
        problems.append(Problem(what, "--ranks", "command line"))
    if args.seconds is not None and not 0 < args.seconds < math.inf:
        problems.append(Problem(f"is {args.seconds:g}, but has to be above 0 and finite", "--seconds", "command line"))
    if args.only == "collectives" and environment is None and (args.ranks or 1) < 2:
        problems.append(Problem("needs --ranks of 2 or more", "--only collectives", "command line"))
    if environment is not None and args.ranks not in (None, environment.world_size):
        problems.append(
            Problem(f"is {args.ranks}, but {environment.world_size} ranks were started", "--ranks", "command line")
        )
    if args.serve and (args.run or args.ranks or args.only):
        problems.append(Problem("measures an engine on one device, and nothing else", "--serve", "command line"))
    try:
        choose_device(args.device)
    except UserError:
        problems.append(Problem("is cuda, but PyTorch sees no GPU on this machine", "--device", "command line"))
    reason = _unwritable(Path(args.out))
    if reason:
        problems.append(Problem(f"cannot be written: {reason}", where=args.out))
    if problems:
        raise UserError(*problems)


def _unwritable(path: Path) -> str:
    """Why a file cannot be written, or ""; checked before a minute is spent on its content."""
    if path.is_dir():
        return "it is a folder"
    if not path.absolute().parent.is_dir():
        return "its folder does not exist"
    target = path if path.exists() else path.absolute().parent
    return "" if os.access(target, os.W_OK) else "permission denied"


def _device(args: argparse.Namespace) -> Any:
    from shardwise.model.device import choose_device

    return choose_device(args.device)


def _kernels(args: argparse.Namespace) -> Profile:
    from shardwise.measure.bench.machine import measure_kernels

    with _progress() as progress:
        return measure_kernels(_device(args), args.seconds, args.quick, progress)


def _serving(args: argparse.Namespace) -> Profile:
    from shardwise.measure.bench.serving import measure_serving

    with _progress() as progress:
        return measure_serving(_device(args), args.seconds, progress)


def _collectives(args: argparse.Namespace) -> tuple[dict[str, Any], ...]:
    """The points measured by ranks that this command starts."""
    from shardwise.cli.machinery.ranks import start_here
    from shardwise.hardware import load_profile

    print(f"collectives over {args.ranks} ranks …", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "collectives.json"
        arguments = ["bench", "--only", "collectives", "--out", str(out), "--device", args.device, "--quiet"]
        arguments += ["--seconds", str(args.seconds), *(["--quick"] if args.quick else [])]
        if start_here(arguments, args.ranks):
            raise UserError("a rank failed while collectives were measured; no profile was written")
        return load_profile(out).collective


def _as_rank(args: argparse.Namespace, environment: RankEnvironment) -> int:
    """Run as one of the ranks that torchrun, Slurm or this command started; the first measures the kernels, writes and prints."""
    from shardwise.measure.bench.collectives import collective_points
    from shardwise.measure.bench.machine import empty_profile
    from shardwise.train.processes import launch

    first = environment.rank == 0
    launch.join(environment, replace(Run(), train=replace(Run().train, device=args.device)))
    try:
        import torch.distributed as dist

        device = _device(args)
        profile = empty_profile(device)
        if first and args.only != "collectives":
            profile = _kernels(args)
        if args.only != "kernels":
            dist.barrier()
            with _progress(quiet=not first) as progress:
                report = partial(progress, "collectives")
                points = collective_points(device, args.seconds, args.quick, report)
            profile = replace(profile, collective=tuple(points))
    finally:
        launch.leave()
    if first:
        _finish(args, profile)
    return 0


def _finish(args: argparse.Namespace, profile: Profile) -> None:
    from shardwise.hardware.profile import dump_profile

    content = dump_profile(profile)
    write_file(args.out, (json.dumps(content, indent=1) + "\n").encode())
    if args.quiet:
        return
    if args.json:
        print(json.dumps(content))
        return
    _print(profile)
    chip = f" --cluster.chip={profile.chip}" if profile.chip else ""
    print(f"wrote {args.out}; use it with --cluster.profile={args.out}{chip}", file=sys.stderr)
    if not profile.chip:
        print("this GPU is not in the catalogue: set cluster.chip to the most similar chip", file=sys.stderr)


@contextmanager
def _progress(quiet: bool = False) -> Iterator[Progress]:
    """A progress bar for each measurement, on stderr."""
    from rich.progress import Progress

    from shardwise.report.terminal import Console

    bars: dict[str, Any] = {}
    with Progress(console=Console(stderr=True), transient=True, disable=quiet or not sys.stderr.isatty()) as progress:

        def update(what: str, share: float) -> None:
            if what not in bars:
                bars[what] = progress.add_task(what, total=1.0)
            progress.update(bars[what], completed=share)

        yield update


def _print(profile: Profile) -> None:
    from shardwise.report import words
    from shardwise.report.terminal import Console

    console = Console()
    console.print(f"{profile.machine}, torch {profile.torch}", style="bold", highlight=False)
    if profile.launch:
        console.print(
            f"a tiny kernel {words.seconds(profile.kernel_seconds)}; host overhead in training {words.seconds(profile.launch)} "
            f"a kernel, {words.seconds(profile.overhead)} a step and {words.seconds(profile.layer_overhead)} a layer",
            highlight=False,
        )
    if profile.decode:
        console.print(
            f"host of a serving engine: {words.seconds(profile.serve_step)} a step and {words.seconds(profile.serve_sequence)} a "
            f"sequence; with prompts {words.seconds(profile.serve_mixed)} and {words.seconds(profile.serve_layer)} a layer"
            + (f"; plans were off by {profile.serve_error:.0%}" if profile.serve_error else ""),
            highlight=False,
        )
    for table in tables(profile):
        console.print()
        console.print(table)


def tables(profile: Profile) -> list[Table]:
    """The measured points as tables."""
    from shardwise.report import words

    def moved(point: dict[str, Any]) -> tuple[str, str, str]:
        return words.size(point["bytes"]), words.seconds(point["seconds"]), f"{point['gbs']:.1f}"

    made = []
    if profile.gemm:
        made.append(_speeds("GEMM", profile.gemm, ("m", "n", "k"), ("dtype",)))
    if profile.grouped:
        made.append(_speeds("Grouped GEMM of experts", profile.grouped, ("tokens", "n", "k", "experts"), ("dtype",)))
    for dtype in dict.fromkeys(p["dtype"] for p in profile.attention):
        members = [
            p | {"length": p["queries"], "head dim": p["head_dim"]} for p in profile.attention if p["dtype"] == dtype
        ]
        sizes = ("batch", "heads", "length", "head dim")
        made.append(_speeds(f"Causal attention in {dtype}", members, sizes, ("backend", "direction")))
    if profile.memory:
        made.append(_table("Copy", ("bytes", "time", "GB/s"), [moved(p) for p in profile.memory]))
    if profile.elementwise:
        columns = ("", "direction", "dtype", "planned bytes", "time", "GB/s")
        rows = [(p["operation"], p["direction"], p["dtype"], *moved(p)) for p in profile.elementwise]
        made.append(_table("Elementwise operations", columns, rows))
    made += _serving_tables(profile)
    for size, operation in dict.fromkeys((p["size"], p["operation"]) for p in profile.collective):
        members = [p for p in profile.collective if (p["size"], p["operation"]) == (size, operation)]
        made.append(_table(f"{operation}, {counted(size, 'rank')}", COLUMNS, [_nccl_row(p) for p in members]))
    return made


def _serving_tables(profile: Profile) -> list[Table]:
    """Seconds of a layer in the steps of a serving engine, one table per layer shape."""
    from shardwise.hardware.profile import LAYER
    from shardwise.report import words

    made = []
    for shape in dict.fromkeys(tuple(p[name] for name in LAYER) for p in profile.decode):
        name = f"hidden {shape[0]}, ffn {shape[1]}, {shape[2]} heads of {shape[4]}, {shape[3]} of keys"
        decode = [p for p in profile.decode if tuple(p[name] for name in LAYER) == shape]
        prompt = [p for p in profile.prompt if tuple(p[name] for name in LAYER) == shape]
        keys = list(dict.fromkeys(p["keys"] for p in decode))
        times = {(p["sequences"], p["keys"]): words.seconds(p["seconds"]) for p in decode}
        rows = [(str(n), *(times.get((n, k), "") for k in keys)) for n in dict.fromkeys(p["sequences"] for p in decode)]
        made.append(_table(f"A token each, {name}", ("sequences", *(f"{k} keys" for k in keys)), rows))
        each = [(str(p["prompts"]), str(p["tokens"]), str(p["keys"]), words.seconds(p["seconds"])) for p in prompt]
        made.append(_table(f"Prompts, {name}", ("prompts", "tokens", "keys", "layer"), each))
        sizes = ("sequences", "keys", "prompts", "tokens")
        both = [p for p in profile.mixed if tuple(p[name] for name in LAYER) == shape]
        rows = [(*(str(p[size]) for size in sizes), words.seconds(p["seconds"])) for p in both]
        if rows:
            made.append(_table(f"A token each beside prompts, {name}", (*sizes, "layer"), rows))
    return made


def _nccl_row(point: dict[str, Any]) -> tuple[str, ...]:
    time = f"{point['seconds'] * 1e6:.1f}"
    speeds = f"{point['algbw']:.3f}", f"{point['busbw']:.3f}"
    return (str(point["bytes"]), str(point["count"]), point["type"], point["redop"], time, *speeds)


def _speeds(title: str, points: Iterable[dict[str, Any]], sizes: Sequence[str], names: Sequence[str]) -> Table:
    """TFLOP/s by shape, a column for each kind of kernel."""
    from shardwise.report import words

    found: dict[tuple[int, ...], dict[str, str]] = {}
    for point in points:
        kind, speed = "\n".join(str(point[name]).removesuffix("_attention") for name in names), point["tflops"]
        row = found.setdefault(tuple(point[name] for name in sizes), {})
        row[kind] = words.digits(speed) if speed >= 1 else f"{speed:.4f}"
    shapes = sorted(found.items())
    kinds = list(dict.fromkeys(kind for _, row in shapes for kind in row))
    rows = [(*map(str, shape), *(row.get(kind, "") for kind in kinds)) for shape, row in shapes]
    return _table(f"{title}, TFLOP/s", (*sizes, *kinds), rows)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim", title=title, title_justify="left"
    )
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
