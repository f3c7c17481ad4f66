"""Odd but legal profiles take time and memory in proportion to their events, and at most three times those of a usual profile with
as many."""

from __future__ import annotations

import ctypes
import io
import json
import os
import resource
import sys
from argparse import Namespace
from functools import cache
from pathlib import Path

import odd_traces
import pytest
from odd_traces import ODD, PER_RANK, RANK_COSTS, Writer

from shardwise.cli.trace.read import read_and_explain
from shardwise.cli.trace.verb import trace_page
from shardwise.ledger import as_dict
from shardwise.report import terminal_trace
from shardwise.report.terminal import Console
from shardwise.trace.export import as_json

SMALL, MEMORY, LARGE = 6_000, 20_000, (40_000, 160_000)
MOST = 3.0
ROUNDS, LARGE_ROUNDS = 12, 4
ARGUMENTS = Namespace(
    no_cache=True, cache=None, chip=None, dtype="bfloat16", from_step=None, to_step=None, all_events=False
)


def used() -> float:
    """CPU seconds of this process and of its children so far."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def explain(folder: Path, page: bool = False) -> float:
    """CPU seconds to read, explain, print and write as JSON, and as a page if asked for."""
    begun = used()
    explained = read_and_explain([folder], ARGUMENTS)
    json.dumps(as_json(explained.answers))
    console = Console(file=io.StringIO(), width=120)
    for part in terminal_trace.sections(as_dict(explained.answers)):
        console.print(part)
    if page:
        (folder / "page.html").write_text(trace_page(explained, None, 10))
    return used() - begun


def seconds(folder: Path, make: Writer, count: int, rounds: int = 3, page: bool = False) -> float:
    """Of some rounds, the one that other programs disturbed least."""
    return min(explain(made(folder, make, count), page) for _ in range(rounds))


def made(folder: Path, make: Writer, count: int) -> Path:
    """The folder of a profile, made when it is first asked for."""
    if not folder.exists():
        folder.mkdir()
        make(folder, count)
    return folder


def bytes_taken(folder: Path) -> int:
    """The most memory, beyond what was there before, of a process that explains a profile; on one core it reads by itself."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
            ctypes.CDLL("libc.so.6").malloc_trim(0)  # what is free already would hide what is taken
            Path("/proc/self/clear_refs").write_text("5")  # the most that was resident is counted anew
            before = _status("VmRSS")
            explain(folder, page=True)
            os.write(theirs, str(_status("VmHWM") - before).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return int(said)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def plain_events(make: Writer, count: int) -> int:
    """Events of the usual profile that an odd one is compared with."""
    return count + (count // PER_RANK * RANK_COSTS if make is odd_traces.many_ranks else 0)


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> object:
    """CPU seconds of a usual profile with so many events, measured once for each number; everything is imported by then."""
    folder = tmp_path_factory.mktemp("plain")
    seconds(folder / "first", odd_traces.plain, 2000, 2, page=True)

    def measured(count: int, page: bool = False) -> float:
        return seconds(folder / f"{count} {page}", odd_traces.plain, count, 3 if count < LARGE[1] else 1, page)

    return cache(measured)


@pytest.mark.usefixtures("usual")  # by then everything is imported
@pytest.mark.parametrize("make", ODD, ids=lambda make: make.__name__)
@pytest.mark.drawn(3)
def test_an_odd_profile_takes_no_longer_than_three_usual_ones(make: Writer, tmp_path: Path) -> None:
    odd = made(tmp_path / "odd", make, SMALL)
    plain = made(tmp_path / "plain", odd_traces.plain, plain_events(make, SMALL))
    ratios: list[float] = []
    # One after the other, so that a busy machine slows both alike; the round that it disturbed least counts.
    while len(ratios) < ROUNDS and min(ratios, default=MOST + 1) > MOST:
        ratios.append(explain(odd) / explain(plain))
    assert min(ratios) <= MOST, f"as long as {min(ratios):.2f} usual profiles at best, of {ratios}"


@pytest.mark.large("growth: what is quadratic, but hidden by a small constant at the small tier's sizes; the page, too")
@pytest.mark.parametrize("make", ODD, ids=lambda make: make.__name__)
def test_time_grows_with_the_events(make: Writer, usual, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    small, large = (seconds(tmp_path / str(count), make, count, 1, page=True) for count in LARGE)
    assert large <= 1.6 * LARGE[1] / LARGE[0] * small, f"{LARGE[0]} events: {small:.2f} s, {LARGE[1]}: {large:.2f} s"
    ratios = [large / usual(plain_events(make, LARGE[1]), True)]
    while len(ratios) < LARGE_ROUNDS and min(ratios) > MOST:  # the usual one was measured at another time
        plain = made(tmp_path / "plain", odd_traces.plain, plain_events(make, LARGE[1]))
        ratios.append(explain(tmp_path / str(LARGE[1]), page=True) / explain(plain, page=True))
    assert min(ratios) <= MOST, f"with its page as long as {min(ratios):.2f} usual profiles at best, of {ratios}"


ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="Linux says how much memory a process had at most")


@ON_LINUX
@pytest.mark.usefixtures("usual")
@pytest.mark.parametrize("make", ODD, ids=lambda make: make.__name__)
@pytest.mark.drawn(1)
def test_an_odd_profile_takes_no_more_memory_than_three_usual_ones(make: Writer, tmp_path: Path) -> None:
    odd = bytes_taken(made(tmp_path / "odd", make, MEMORY))
    plain = bytes_taken(made(tmp_path / "plain", odd_traces.plain, plain_events(make, MEMORY)))
    assert odd <= MOST * plain, f"{odd / 2**20:.0f} MiB, a usual one {plain / 2**20:.0f}"


@ON_LINUX
@pytest.mark.large("growth: what is quadratic, but hidden by a small constant at the small tier's sizes")
@pytest.mark.usefixtures("usual")
@pytest.mark.parametrize("make", ODD, ids=lambda make: make.__name__)
def test_memory_grows_with_the_events(make: Writer, tmp_path: Path) -> None:
    small, large = (bytes_taken(made(tmp_path / str(count), make, count)) for count in LARGE)
    assert large <= 1.6 * LARGE[1] / LARGE[0] * small, f"{small / 2**20:.0f} MiB, then {large / 2**20:.0f}"
    plain = bytes_taken(made(tmp_path / "plain", odd_traces.plain, plain_events(make, LARGE[1])))
    assert large <= MOST * plain, f"{large / 2**20:.0f} MiB, a usual one {plain / 2**20:.0f}"
