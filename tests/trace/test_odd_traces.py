"""Odd but legal profiles take time in proportion to their events, and at most three times that of a usual profile with as many."""

from __future__ import annotations

import io
import json
import resource
from argparse import Namespace
from functools import cache
from pathlib import Path

import odd_traces
import pytest
from odd_traces import ODD, PER_RANK, RANK_COSTS, Writer

from shardwise.cli.trace.page import write_page
from shardwise.cli.trace.read import read_and_explain
from shardwise.ledger import as_dict
from shardwise.report import terminal_trace
from shardwise.report.terminal import Console
from shardwise.trace.export import as_json

SMALL, LARGE = 6_000, (40_000, 160_000)
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
        write_page(explained, None, str(folder / "page.html"), 10)
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
@pytest.mark.drawn(6)
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
