"""Profiles read and explained, as the arguments of `shardwise trace` say: what the verb shows, compares and draws."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwise.run import UserError

if TYPE_CHECKING:
    from shardwise.trace.answers import Explanation
    from shardwise.trace.reading.events import Profile
    from shardwise.trace.spans.classes import Classified
    from shardwise.trace.spans.steps import Chosen


class Read(NamedTuple):
    """Some profiles, read and explained."""

    profiles: tuple[Profile, ...]
    classified: Mapping[int, Classified]
    chosen: Mapping[int, Chosen]
    answers: Explanation
    problems: tuple[str, ...]


def explained(paths: list[Path], args: argparse.Namespace) -> Read:
    """Read profiles and explain them, as the arguments say."""
    from shardwise.trace.explain import explain
    from shardwise.trace.reading.cache import default_folder
    from shardwise.trace.reading.open import open_profiles
    from shardwise.trace.spans.classes import classify

    folder = None if args.no_cache else args.cache or default_folder()
    with _reading() as told:
        opened = open_profiles(paths, folder, told)
    classified = {profile.rank: classify(profile) for profile in opened.profiles}
    chosen, said = _choose(opened.profiles, classified, args)
    answers = explain(opened.profiles, chosen, classified=classified, peak_flops=_peak(opened.profiles, args))
    return Read(opened.profiles, classified, chosen, answers, (*opened.problems, *said))


def _peak(profiles: tuple[Profile, ...], args: argparse.Namespace) -> float:
    """Operations a second of the chip that the user names, or else of the devices; 0 where neither is known."""
    from shardwise.hardware.chips import chip_of_driver_name, find_chip

    if args.chip:
        return find_chip(args.chip).speed(args.dtype)
    names = {device.name for profile in profiles for device in profile.devices}
    chips = {chip.name: chip for name in names if (chip := chip_of_driver_name(name)) is not None}
    chip = next(iter(chips.values())) if len(chips) == 1 else None
    return chip.peak.get(args.dtype, 0.0) if chip is not None else 0.0


def _choose(
    profiles: tuple[Profile, ...], classified: Mapping[int, Any], args: argparse.Namespace
) -> tuple[dict[int, Chosen], tuple[str, ...]]:
    """What is looked at of each rank, and what is worth saying about that."""
    from shardwise.trace.spans.steps import choose, find_steps

    chosen = {p.rank: choose(p, classified[p.rank], args.from_step, args.to_step, args.all_events) for p in profiles}
    asked = args.from_step is not None or args.to_step is not None
    empty = [p for p in profiles if asked and not chosen[p.rank].steps]
    if len(empty) == len(profiles):
        there = sorted({step.number for p in profiles for step in find_steps(p)})
        have = (
            f"; the profiles have {there[0]} to {there[-1]}"
            if there
            else "; the profiles have no profiler steps at all"
        )
        raise UserError(f"no profiler step in what --from-step and --to-step choose{have}")
    said = [f"{p.path}: has none of the steps asked for, so rank {p.rank} is left out" for p in empty]
    if not args.all_events and not asked:
        said += [
            f"{p.path}: has no complete profiler step, so all of it is looked at"
            for p in profiles
            if not chosen[p.rank].steps
        ]
    numbers = {one.numbers for rank, one in chosen.items() if one.steps}
    if len(numbers) > 1:
        said.append("the ranks have different profiler steps; each is looked at over its own")
    return chosen, tuple(said)


@contextmanager
def _reading() -> Iterator[Callable[[int, int], None] | None]:
    """A bar while profiles are read, where a person watches."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    bar = Progress(TextColumn("reading"), BarColumn(), DownloadColumn(), console=Console(stderr=True), transient=True)
    task = bar.add_task("", total=None)

    def told(done: int, total: int) -> None:
        if not bar.live.is_started:  # only now: reading in processes of their own must begin before any thread
            bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield told
    finally:
        bar.stop()
