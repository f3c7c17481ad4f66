"""Two profiles side by side: before and after a change. Everything is brought to one step of one rank first, so runs of different
lengths and sizes can be compared; kernels are matched by name, and where a library renamed them, by what is left of the name
without its parameters.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from shardwise.ledger import Difference
from shardwise.trace.answers import Explanation, KernelTime


@dataclass(frozen=True)
class KernelChange:
    """A kernel in two runs; nanoseconds and calls of one step and rank."""

    before: tuple[str, ...]
    """Its names; () where it was not there."""
    after: tuple[str, ...]
    kind: str
    module: str
    """Where most of its time lies, after the change where it is there."""
    calls_before: float
    calls_after: float
    time_before: float
    time_after: float

    @property
    def change(self) -> float:
        """Nanoseconds a step."""
        return self.time_after - self.time_before


@dataclass(frozen=True)
class RunChange:
    """What changed from one run to another."""

    step_before: int
    step_after: int
    differences: tuple[Difference, ...]
    """Classes of time, the ledger's categories, idle causes and traffic, of one step and rank: seconds, bytes, messages."""
    kernels: tuple[KernelChange, ...]
    """By how much they changed the step."""

    @property
    def slower(self) -> float:
        """By how many percent the step is slower; negative when it is faster."""
        return (self.step_after / self.step_before - 1) * 100 if self.step_before else 0.0

    def passes(self, percent: float) -> bool:
        """Whether the step is at most so many percent slower."""
        return self.slower <= percent


def compare_runs(before: Explanation, after: Explanation) -> RunChange:
    """Lay two runs side by side."""
    return RunChange(
        before.step_time, after.step_time, tuple(_differences(before, after)), tuple(_kernels(before, after))
    )


def _scale(answers: Explanation) -> float:
    """What brings a sum over ranks and steps to one step of one rank."""
    return 1 / max(len(answers.steps), 1) / max(len(answers.seen), 1)


def _quantities(answers: Explanation) -> dict[tuple[str, str], float]:
    """In the ledger's units and words: seconds, bytes, messages."""
    scale = _scale(answers)
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


def _differences(before: Explanation, after: Explanation) -> Iterable[Difference]:
    one, other = _quantities(before), _quantities(after)
    for account, name in sorted({**one, **other}, key=lambda key: key[0]):
        first, second = one.get((account, name), 0.0), other.get((account, name), 0.0)
        if first or second:
            yield Difference(account, name, first, second)


def bare(name: str) -> str:
    """A kernel's name without template arguments, parameters, sizes and versions."""
    head = name
    while (shorter := re.sub(r"<[^<>]*>|\([^()]*\)", "", head)) != head:
        head = shorter
    head = re.sub(r"^(?:void|static|__global__)\s+", "", head.split("<")[0].split("(")[0].strip() or name)
    return re.sub(r"\d+(?:x\d+)*|_v?\d+", "", head)


def _kernels(before: Explanation, after: Explanation) -> list[KernelChange]:
    """Same names first, then same bare names, then what only one has."""
    one = {(k.name, k.kind): k for k in before.kernels}
    other = {(k.name, k.kind): k for k in after.kernels}
    groups: dict[tuple[str, str], tuple[list[KernelTime], list[KernelTime]]] = {}
    for key in {**one, **other}:
        both = key in one and key in other
        place = key if both else (bare(key[0]), key[1])
        first, second = groups.setdefault(place, ([], []))
        if key in one:
            first.append(one[key])
        if key in other:
            second.append(other[key])
    scales = _scale(before), _scale(after)
    changes = [
        KernelChange(
            tuple(k.name for k in first),
            tuple(k.name for k in second),
            kind,
            max(second or first, key=lambda k: k.total).module,
            sum(k.count for k in first) * scales[0],
            sum(k.count for k in second) * scales[1],
            sum(k.total for k in first) * scales[0],
            sum(k.total for k in second) * scales[1],
        )
        for (_, kind), (first, second) in groups.items()
    ]
    return sorted(changes, key=lambda change: -abs(change.change))
