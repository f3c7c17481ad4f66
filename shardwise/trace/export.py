"""The answers for other uses: as JSON, as an account of the ledger to compare with a plan, and compared with another profile.

Quantities are normalised to one step of one rank, so that runs of different lengths and sizes can be compared. Kernels are matched
by name; where a library renamed them, by the name without template arguments. What a profile does not contain stays empty.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.ledger import AXIS_OF, COLLECTIVES, Account, Difference, Timeline, Traffic, as_dict
from shardwise.trace.answers import AxisTime, CommTime, Explanation, KernelTime, spread


def as_json(answers: Explanation) -> dict[str, Any]:
    """All answers as JSON: for every rank, summed over ranks, and with the spread. Times are in nanoseconds."""
    plain = as_dict(answers)
    axes: dict[str, dict[str, Any]] = {}
    for row in answers.axes:
        axes.setdefault(row.axis, {})[row.collective] = _axis(row)
    return plain | {
        "axes": axes,
        "idle": _table(answers.idle),
        "categories": _table(answers.categories),
        "kernels": [
            same | {"mean": row.mean, "spread": vars(spread(row.ranks))}
            for same, row in zip(plain["kernels"], answers.kernels, strict=True)
        ],
        "modules": plain["modules"]
        | {
            "rows": [
                same | {"total": row.total, "spread": vars(spread(row.ranks))}
                for same, row in zip(plain["modules"]["rows"], answers.modules.rows, strict=True)
            ]
        },
        "launches": _table({rank: vars(queue) for rank, queue in answers.launches.items()}),
        "pipelines": [
            same | {"bubble_share": step.share}
            for same, step in zip(plain["pipelines"], answers.pipelines, strict=True)
        ],
    }


def _axis(row: AxisTime) -> dict[str, Any]:
    names = ("messages", "bytes", "time", "exposed", "wait")
    return {
        "group": row.group,
        "all": _comm_time(row.total),
        "ranks": {str(rank): _comm_time(one) for rank, one in row.ranks.items()},
        "spread": {name: vars(spread({rank: getattr(m, name) for rank, m in row.ranks.items()})) for name in names},
    }


def _comm_time(one: CommTime) -> dict[str, float]:
    return vars(one) | {"bus_bandwidth": one.bus_bandwidth, "algorithm_bandwidth": one.algorithm_bandwidth}


def _table(ranks: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    """Quantities of each rank, and the spread of each over ranks."""
    names = dict.fromkeys(name for numbers in ranks.values() for name in numbers)
    spreads = {name: spread({rank: numbers.get(name, 0) for rank, numbers in ranks.items()}) for name in names}
    return {
        "ranks": {str(rank): dict(numbers) for rank, numbers in ranks.items()},
        "spread": {name: vars(one) for name, one in spreads.items()},
    }


def account(answers: Explanation, tokens: float = 0.0) -> Account:
    """The account of the slowest rank's mean step; `tokens` are those of a step over all ranks."""
    rank, steps = answers.slowest, answers.steps_on(answers.slowest)
    return Account(
        "trace",
        answers.ranks[rank]["span"] / steps / 1e9 if rank in answers.ranks else 0.0,
        tokens,
        {name: value / steps / 1e9 for name, value in answers.categories.get(rank, {}).items() if value},
        traffic=_traffic(answers, rank),
        timeline=Timeline(tuple(s for s in answers.timeline.spans if s.rank == rank), answers.timeline.seconds),
    )


def _traffic(answers: Explanation, rank: int) -> Traffic:
    """Wire bytes and messages of one rank in a step. A P2P message is counted at its sender."""
    size: dict[str, dict[str, float]] = {}
    messages: dict[str, dict[str, float]] = {}
    for row in answers.axes:
        one = row.ranks.get(rank)
        if one is None or row.collective not in COLLECTIVES:
            continue
        for record, value in ((size, one.bytes), (messages, one.messages)):
            kinds = record.setdefault(AXIS_OF.get(row.axis, row.axis), {})
            kinds[row.collective] = kinds.get(row.collective, 0.0) + value / answers.steps_on(rank)
    return Traffic(size, messages)


@dataclass(frozen=True)
class KernelChange:
    """A kernel in two runs; nanoseconds and calls of one step of one rank."""

    before: tuple[str, ...]
    """Its names; () if the run does not have it."""
    after: tuple[str, ...]
    kind: str
    module: str
    """The module with most of its time, after the change if it is still there."""
    calls_before: float
    calls_after: float
    time_before: float
    time_after: float

    @property
    def change(self) -> float:
        """Nanoseconds a step."""
        return self.time_after - self.time_before


def differences(before: Explanation, after: Explanation) -> tuple[Difference, ...]:
    """Time by class, category, idle cause and axis, and traffic, of two runs: seconds, bytes and messages per step and rank."""
    one, other = _quantities(before), _quantities(after)
    keys = sorted({**one, **other}, key=lambda key: key[0])
    found = (Difference(*key, one.get(key, 0.0), other.get(key, 0.0)) for key in keys)
    return tuple(difference for difference in found if difference.first or difference.second)


def _quantities(answers: Explanation) -> dict[tuple[str, str], float]:
    scale = answers.per_step(1)
    found: dict[tuple[str, str], float] = defaultdict(float)
    for numbers in (*answers.ranks.values(), *answers.categories.values()):
        for name, value in numbers.items():
            found["time", name] += value * scale / 1e9
    for causes in answers.idle.values():
        for name, value in causes.items():
            found["time", f"idle: {name}"] += value * scale / 1e9
    for row in answers.axes:
        total, name = row.total, f"{row.axis} {row.collective}"
        found["time", f"exposed {name}"] += total.exposed * scale / 1e9
        found["time", f"waiting in {name}"] += total.wait * scale / 1e9
        found["traffic", f"bytes {name}"] += total.bytes * scale
        found["traffic", f"messages {name}"] += total.messages * scale
    return found


def kernel_changes(before: Explanation, after: Explanation) -> tuple[KernelChange, ...]:
    """Kernels, the largest change of step time first. Equal names are matched first, then equal bare names."""
    groups: dict[tuple[str, str], tuple[list[KernelTime], list[KernelTime]]] = {}
    names = [{(k.name, k.kind) for k in run.kernels} for run in (before, after)]
    for at, run in enumerate((before, after)):
        for k in run.kernels:
            key = (k.name, k.kind)
            key = key if all(key in of_run for of_run in names) else (bare(k.name), k.kind)
            groups.setdefault(key, ([], []))[at].append(k)
    scales = before.per_step(1), after.per_step(1)

    def sums(kernels: Iterable[KernelTime], name: str, scale: float) -> float:
        return sum(getattr(k, name) for k in kernels) * scale

    changes = [
        KernelChange(
            tuple(k.name for k in first), tuple(k.name for k in second), kind,
            max(second or first, key=lambda k: k.total).module,
            *(sums(kernels, name, scale) for name in ("count", "total")
              for kernels, scale in zip((first, second), scales, strict=True)),
        )
        for (_, kind), (first, second) in groups.items()
    ]  # fmt: skip
    return tuple(sorted(changes, key=lambda change: -abs(change.change)))


def bare(name: str) -> str:
    """A kernel's name without template arguments, parameters, sizes and versions."""
    head = name
    while (shorter := re.sub(r"<[^<>]*>|\([^()]*\)", "", head)) != head:
        head = shorter
    head = re.sub(r"^(?:void|static|__global__)\s+", "", head.split("<")[0].split("(")[0].strip() or name)
    return re.sub(r"\d+(?:x\d+)*|_v?\d+", "", head)
