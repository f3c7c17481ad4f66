"""Reads and explains profiles according to the arguments of `shardwise trace`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shardwise.run import UserError

if TYPE_CHECKING:
    from shardwise.hardware.chips import Chip
    from shardwise.trace.answers import Explanation
    from shardwise.trace.rank import Rank
    from shardwise.trace.reading.profile import Profile


class Explained(NamedTuple):
    """Some profiles, read and explained."""

    ranks: tuple[Rank, ...]
    answers: Explanation
    problems: tuple[str, ...]


def read_and_explain(paths: list[Path], args: argparse.Namespace) -> Explained:
    """Read profiles and explain them according to the arguments."""
    from shardwise.trace.explain import explain
    from shardwise.trace.reading.cache import default_folder
    from shardwise.trace.reading.read import open_profiles

    folder = None if args.no_cache else args.cache or default_folder()
    with _progress_bar() as progress:
        opened = open_profiles(paths, folder, progress)
    ranks, notes = _choose(opened.profiles, args)
    return Explained(ranks, explain(ranks, _peak(opened.profiles, args)), (*opened.problems, *notes))


def _peak(profiles: tuple[Profile, ...], args: argparse.Namespace) -> float:
    """Peak FLOP/s of the chip that the user names, or else of the device; 0 if neither is known."""
    from shardwise.hardware.chips import find_chip

    if args.chip:
        return find_chip(args.chip).speed(args.dtype)
    chip = chip_of(device.name for profile in profiles for device in profile.used_devices)
    return chip.peak.get(args.dtype, 0.0) if chip is not None else 0.0


def chip_of(devices: Iterable[str]) -> Chip | None:
    """The one chip among devices with these names; None if it is not known, or not alone."""
    from shardwise.hardware.chips import chip_of_driver_name

    chips = {chip.name: chip for name in devices if (chip := chip_of_driver_name(name)) is not None}
    return next(iter(chips.values())) if len(chips) == 1 else None


def _choose(profiles: tuple[Profile, ...], args: argparse.Namespace) -> tuple[tuple[Rank, ...], tuple[str, ...]]:
    """Each rank with its selected steps, and notes for the user about them."""
    from shardwise.trace.rank import Rank
    from shardwise.trace.spans.activity import activity_of
    from shardwise.trace.spans.steps import find_steps, select_steps

    activities = [activity_of(profile) for profile in profiles]
    ranks = tuple(Rank(one, select_steps(one, args.from_step, args.to_step, args.all_events)) for one in activities)
    asked = args.from_step is not None or args.to_step is not None
    without = [r.profile for r in ranks if not r.selection.steps]
    notes = []
    if asked and len(without) == len(profiles):
        there = sorted({step.number for p in profiles for step in find_steps(p)})
        have = f"have {there[0]} to {there[-1]}" if there else "have no profiler steps at all"
        raise UserError(f"none of the profiler steps asked for is there; the profiles {have}")
    if asked:
        notes = [f"{p.path}: has none of the steps asked for, so rank {p.rank} is left out" for p in without]
    elif not args.all_events:
        notes = [f"{p.path}: has no complete profiler step, so all of it is looked at" for p in without]
    if len({r.selection.numbers for r in ranks if r.selection.steps}) > 1:
        notes.append("the ranks have different profiler steps; each is looked at over its own")
    return ranks, tuple(notes)


@contextmanager
def _progress_bar() -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar while profiles are read, on a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    bar = Progress(TextColumn("reading"), BarColumn(), DownloadColumn(), console=Console(stderr=True), transient=True)
    task = bar.add_task("", total=None)

    def progress(done: int, total: int) -> None:
        if not bar.live.is_started:  # only now: processes must be forked before any thread starts
            bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield progress
    finally:
        bar.stop()
