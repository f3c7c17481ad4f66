"""Selects what charts show, once for terminal and page: ranks and their order, the kind of a span, the Pareto front."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any, Literal

from shardwise.ledger import (
    CATEGORIES,
    COLLECTIVES,
    OWNERS,
    PASSES,
    Account,
    Difference,
    Memory,
    Span,
    Timeline,
    Traffic,
)
from shardwise.run.axes import AXES
from shardwise.run.problems import counted

ALL_BARS = 8
"""A pipeline of at most this many ranks is shown in full."""

_ACTIONS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight", "R": "recompute"}
_ACTION = re.compile(r"([FBIWR])(\d+\.\d+)?$")
_PASS_NAMES = (*PASSES, "backward")


@dataclass(frozen=True)
class Column:
    """A column of a ranking: its key in each row, its title, the format of its values, and whether low or high is better."""

    key: str
    title: str
    words: Callable[[Any], str] = str
    better: Literal["low", "high", ""] = ""
    unit: float = 1.0
    """Tick marks on an axis are round multiples of this: 2**30 for bytes."""
    essential: bool = False
    """Whether to keep it on a narrow terminal, which drops the other columns first."""
    below: bool = False
    """Whether to list it below the table if it does not fit."""

    def text(self, row: Mapping[str, Any]) -> str:
        """A row's formatted value, "" if it has none."""
        value = row.get(self.key)
        return "" if value is None else self.words(value)


@dataclass(frozen=True)
class MemoryBar:
    """One bar: a pipeline rank, or the mean of the ranks without their own bar."""

    label: str
    owners: Mapping[str, float]
    note: str = ""

    @property
    def total(self) -> float:
        """Bytes of all owners."""
        return sum(self.owners.values())


@dataclass(frozen=True)
class TrafficRow:
    """Bytes and messages of one collective on one axis."""

    axis: str
    collective: str
    bytes: float
    messages: float


def pass_of_action(name: str) -> str:
    """The pass that a schedule's action ("F2.5") belongs to; "" for any other name."""
    found = _ACTION.match(name)
    return _ACTIONS[found[1]] if found else ""


def pass_of(span: Span) -> str:
    """The pass of a span on the compute stream, from its name ("forward", "backward input 3", "F2.5"); else ""."""
    if span.stream != "compute":
        return ""
    if action := pass_of_action(span.name):
        return action
    name = span.name.lower().replace(" ", "_").replace("-", "_")
    return max((each for each in _PASS_NAMES if name.startswith(each)), key=len, default="")


def kind_of(span: Span) -> str:
    """The legend entry of a span: its pass, or its category."""
    return pass_of(span) or span.category


def ordered(names: Iterable[str], known: Sequence[str]) -> list[str]:
    """Names in the order of `known`, then the others in their given order."""
    given = list(dict.fromkeys(names))
    return [name for name in dict.fromkeys(known) if name in given] + [name for name in given if name not in known]


def unrepeated(names: Iterable[str]) -> list[str]:
    """The names, "" for one that equals the one above it."""
    return [name if name != above else "" for above, name in pairwise(["", *names])]


def owners_of(memory: Memory) -> list[str]:
    """The owners that hold anything, in the ledger's order."""
    return ordered((owner for rank in memory.ranks for owner, held in rank.items() if held), OWNERS)


def memory_bars(memory: Memory, longest: int = ALL_BARS) -> list[MemoryBar]:
    """Every pipeline rank; for a longer pipeline, the first, the fullest, the last and the mean of the rest."""
    totals = memory.totals
    if len(totals) <= longest:
        return [MemoryBar(str(rank), owners) for rank, owners in enumerate(memory.ranks)]
    fullest = totals.index(max(totals))
    shown = sorted({0, fullest, len(totals) - 1})
    bars = [MemoryBar(str(rank), memory.ranks[rank], "fullest" if rank == fullest else "") for rank in shown]
    rest = [owners for rank, owners in enumerate(memory.ranks) if rank not in shown]
    mean = {owner: sum(each.get(owner, 0.0) for each in rest) / len(rest) for owner in owners_of(memory)}
    return [*bars, MemoryBar("rest", mean, f"mean of {len(rest)}")]


def breakdown(account: Account) -> list[tuple[str, float]]:
    """Categories that took time, longest first; the rest of the step is "not accounted for". Values below a millionth of the step
    are dropped: they are zeros that smooth formulas do not reach exactly."""
    parts = [(name, taken) for name, taken in account.breakdown.items() if taken > 1e-6 * account.step_seconds]
    missing = account.step_seconds - sum(taken for _, taken in parts)
    if parts and missing > 1e-3 * account.step_seconds:
        parts.append(("not accounted for", missing))
    place = {name: at for at, name in enumerate(CATEGORIES)}
    return sorted(parts, key=lambda part: (-part[1], place.get(part[0], len(place))))


def traffic_rows(traffic: Traffic) -> list[TrafficRow]:
    """Every axis and collective with traffic, in the order of the axes."""
    rows = []
    for axis in ordered([*traffic.bytes, *traffic.messages], AXES):
        moved, sent = traffic.bytes.get(axis, {}), traffic.messages.get(axis, {})
        for collective in ordered([*moved, *sent], COLLECTIVES):
            row = TrafficRow(axis, collective, moved.get(collective, 0.0), sent.get(collective, 0.0))
            if row.bytes or row.messages:
                rows.append(row)
    return rows


def streams_of(spans: Iterable[Span]) -> list[str]:
    """The streams that occur: compute first, then the axes."""
    return ordered((span.stream for span in spans), ("compute", *AXES))


def non_overlapping(spans: Iterable[Span], most: int = 16) -> list[list[Span]]:
    """Spans of one stream by start, in as few rows as possible without overlap within a row. The last of `most` rows takes all
    spans that do not fit into the rows before."""
    found: list[list[Span]] = []
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    for span in sorted(spans, key=lambda each: each.start):
        start, end = nanoseconds(span)
        while busy and busy[0][0] <= start:
            heappush(free, heappop(busy)[1])
        if free:
            row = heappop(free)
        elif len(found) < most:
            row = len(found)
            found.append([])
        else:
            found[-1].append(span)
            continue
        found[row].append(span)
        heappush(busy, (end, row))
    return found


def nanoseconds(span: Span) -> tuple[int, int]:
    """Start and end as integer nanoseconds. Times are rounded, not durations, so adjacent spans stay adjacent."""
    return round(span.start * 1e9), round((span.start + span.seconds) * 1e9)


def left_out(timeline: Timeline) -> str:
    """A clause on the microbatches that a timeline omits."""
    return f"; {timeline.left_out} more not drawn" if timeline.left_out else ""


def beyond(difference: Difference, tolerance: float | Mapping[str, float]) -> bool:
    """Whether two numbers differ by more than the relative tolerance: one for all, or that of their quantity ("account: name") or
    else of their account, 0 if neither is listed. NaN always does."""
    if isinstance(tolerance, Mapping):
        of_account = tolerance.get(difference.account, 0.0)
        tolerance = tolerance.get(f"{difference.account}: {difference.name}", of_account)
    return not abs(difference.relative) <= tolerance


def agreement(differences: Sequence[Difference], tolerance: float | Mapping[str, float]) -> str:
    """The comparison in a sentence."""
    apart = sum(beyond(each, tolerance) for each in differences)
    if not differences:
        return "Nothing to compare: the accounts share no quantity."
    if not apart:
        one = len(differences) == 1
        return f"{'The one quantity agrees' if one else f'All {len(differences)} quantities agree'} within tolerance."
    differ = "differs" if apart == 1 else "differ"
    return f"{apart} of {counted(len(differences), 'quantity')} {differ} by more than the tolerance."


def pareto_front(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> list[bool]:
    """Which rows are Pareto-optimal: no other row is at least as good in every column with a better side, and better in one."""
    sides = [column for column in columns if column.better]
    scores = [tuple(row[c.key] if c.better == "low" else -row[c.key] for c in sides) for row in rows]
    distinct = sorted(set(scores))
    best: set[tuple[Any, ...]] = set()
    # In sorted order a row can only be dominated by an earlier one, and then also by one on the front.
    for score in distinct:
        if not any(all(a <= b for a, b in zip(other, score, strict=True)) for other in best):
            best.add(score)
    return [score in best for score in scores]
