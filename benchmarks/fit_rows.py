"""Fit the planner's constants to the published measurements, and leave each source out once.

A constant belongs to a chip, a link or a family of programs, never to a row (`shardwise/plan/cost/constants.py`). Their logarithms
are found by weighted least squares on the logarithm of predicted over measured seconds, with a prior that pulls each towards
0, outliers weighed down (Huber) and large sources held back to the square root of their size. Then each source is left out
and the rest fitted again; `shardwise validate` predicts a source with the constants that never saw it.

    python benchmarks/fit_rows.py [--rounds 10] [--output shardwise/plan/fitted.json]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardwise.plan.cost.constants import NAMES, constants_of, groups_of
from shardwise.plan.cost.job import Job
from shardwise.plan.published.rows import Unsupported, job_of_row, measured_seconds, published
from shardwise.plan.published.validate import layer_seconds
from shardwise.plan.time.step import Prepared, play, prepare, step_time
from shardwise.schedules import Cost

PRIOR = {"common": 0.3, "group": 0.15}
"""Standard deviations of the logarithms before anything is seen."""
LOOSE = {"launch": 0.5, "overhead": 1.0, "jitter": 0.7, "contention": 0.7, "exposed": 0.7}
HUBER = 0.08
NOISE = 0.07


class Case:
    """A row with everything the constants do not change."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.row, self.group = row, row["group"]
        self.job = job_of_row(row).job
        self.prepared: Prepared = prepare(self.job)
        seconds = measured_seconds(row, self.job)
        if not seconds:
            raise Unsupported("no time measured")
        self.measured = seconds
        self.groups = groups_of(self.job)
        self.weight = 1.0 if row.get("complete") and not row.get("suspicious") else 0.25

    def residual(self, effects: dict[str, float], *, near: bool = False) -> float:
        """Logarithm of predicted over measured; `near` the effects of the last exact call, without playing the pipeline."""
        constants = constants_of(self.job, effects)
        if self.row["kind"] == "layer":
            return math.log(layer_seconds(self.job, constants) / self.measured)
        play_one = self._near if near and self.job.layout.pipeline > 1 else self._exact
        return math.log(step_time(self.prepared, constants, play_one).seconds / self.measured)

    def _exact(self, job: Job, cost: Cost, wire: float) -> float:
        (makespan,) = play(job.layout, [job.microbatches], [cost], [wire])
        self.last = makespan, cost, wire
        return makespan

    def linearise(self, effects: dict[str, float]) -> None:
        """How the time from first forward to last backward grows with the costs of its passes: it is a sum of them along
        one path, so it is linear near where it was played."""
        self.residual(effects)
        if self.job.layout.pipeline == 1:
            return
        makespan, cost, wire = self.last
        parts = [cost.forward, cost.backward_input, cost.backward_weight]
        self.slopes = []
        for n, part in enumerate(parts):
            moved = [[1.01 * v for v in p] if n == m else p for m, p in enumerate(parts)]
            (longer,) = play(self.job.layout, [self.job.microbatches], [Cost(*moved)], [wire])
            self.slopes.append((longer - makespan) / (0.01 * sum(part)))
        rest = makespan - sum(g * sum(p) for g, p in zip(self.slopes, parts, strict=True))
        self.wire_slope = rest / wire if wire else 0.0

    def _near(self, job: Job, cost: Cost, wire: float) -> float:
        parts = (cost.forward, cost.backward_input, cost.backward_weight)
        return sum(g * sum(p) for g, p in zip(self.slopes, parts, strict=True)) + self.wire_slope * wire

    def names(self) -> set[str]:
        """The effects this row depends on."""
        own = set(NAMES)
        for name in list(own):
            own |= {f"{name}/{kind}:{self.groups[kind]}" for kind in NAMES[name][1] if self.groups[kind]}
        return own


def prior(name: str) -> float:
    base = name.split("/")[0]
    return LOOSE.get(base, PRIOR["common" if "/" not in name else "group"])


def jacobian(cases: list[Case], names: list[str], effects: dict[str, float]) -> tuple[np.ndarray, np.ndarray]:
    for case in cases:
        case.linearise(effects)
    start = np.array([case.residual(effects, near=True) for case in cases])
    columns = np.zeros((len(cases), len(names)))
    step = 0.02
    depends = [case.names() for case in cases]
    for n, name in enumerate(names):
        moved = effects | {name: effects.get(name, 0.0) + step}
        for c, case in enumerate(cases):
            if name in depends[c]:
                columns[c, n] = (case.residual(moved, near=True) - start[c]) / step
    return start, columns


def solve(
    residuals: np.ndarray, columns: np.ndarray, weights: np.ndarray, now: np.ndarray, scale: np.ndarray
) -> np.ndarray:
    """One step of weighted ridge regression from `now`."""
    robust = weights * np.minimum(1.0, HUBER / np.maximum(np.abs(residuals), 1e-9)) / NOISE**2
    left = columns.T @ (robust[:, None] * columns) + np.diag(1 / scale**2)
    right = -columns.T @ (robust * residuals) - now / scale**2
    return now + np.clip(np.linalg.solve(left, right), -0.5, 0.5)


def weights_of(cases: list[Case]) -> np.ndarray:
    sizes: dict[str, int] = defaultdict(int)
    for case in cases:
        sizes[case.group] += 1
    return np.array([case.weight / math.sqrt(sizes[case.group]) for case in cases])


class Fit(NamedTuple):
    """Effects, by name."""

    effects: dict[str, float]
    """Of all rows."""
    without: dict[str, dict[str, float]]
    """For each source, those of all others."""
    without_chip: dict[str, dict[str, float]]
    """For each generation of chips, those of all others."""


def fit(cases: list[Case], rounds: int) -> Fit:
    """Effects of all rows, and of all but one source or generation of chips."""
    names = sorted(set().union(*(case.names() for case in cases)))
    scale = np.array([prior(name) for name in names])
    weights = weights_of(cases)
    now = np.zeros(len(names))
    for number in range(rounds):
        residuals, columns = jacobian(cases, names, dict(zip(names, now.tolist(), strict=True)))
        for _ in range(3):  # outliers are weighed anew as the linear model moves
            moved = solve(residuals, columns, weights, now, scale)
            residuals, now = residuals + columns @ (moved - now), moved
        print(f"round {number + 1}: {summary(cases, dict(zip(names, now.tolist(), strict=True)))}", file=sys.stderr)
    effects = dict(zip(names, now.tolist(), strict=True))
    residuals, columns = jacobian(cases, names, effects)

    def leave_out(words: list[str]) -> dict[str, dict[str, float]]:
        """Effects fitted without the rows of each word in turn."""
        result = {}
        for word in sorted(set(words)):
            kept = np.array([other != word for other in words])
            left_out, own = now.copy(), residuals.copy()
            for _ in range(6):
                moved = solve(own[kept], columns[kept], weights[kept], left_out, scale)
                own, left_out = own + columns @ (moved - left_out), moved
            result[word] = dict(zip(names, left_out.tolist(), strict=True))
        return result

    return Fit(effects, leave_out([c.group for c in cases]), leave_out([c.groups["chip"] for c in cases]))


def spread(residuals: list[float]) -> float:
    """Within this, 8 of 10 lie."""
    return float(np.quantile(np.abs(residuals), 0.8))


def summary(cases: list[Case], effects: dict[str, float]) -> str:
    errors = [abs(math.exp(c.residual(effects)) - 1) for c in cases if c.weight == 1.0 and c.row["kind"] == "training"]
    return f"{len(errors)} rows, median {statistics.median(errors):.3f}, mean {statistics.mean(errors):.3f}"


def table(cases: list[Case], effects: dict[str, float], without: dict[str, dict[str, float]]) -> None:
    by_group: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        by_group[case.group].append(case)
    for group, members in sorted(by_group.items()):
        seen = [math.exp(c.residual(effects)) - 1 for c in members]
        unseen = [math.exp(c.residual(without[group])) - 1 for c in members]
        print(
            f"{group:22} {len(members):4} rows  seen: bias {statistics.median(seen):+.3f} "
            f"|err| {statistics.median(map(abs, seen)):.3f}  left out: bias {statistics.median(unseen):+.3f} "
            f"|err| median {statistics.median(map(abs, unseen)):.3f} mean {statistics.mean(map(abs, unseen)):.3f}"
        )
    for label, choose in (("seen", lambda c: effects), ("left out", lambda c: without[c.group])):
        errors = [
            abs(math.exp(c.residual(choose(c))) - 1) for c in cases if c.weight == 1 and c.row["kind"] == "training"
        ]
        print(
            f"{label}: {len(errors)} complete rows, median {statistics.median(errors):.4f} mean {statistics.mean(errors):.4f}"
        )


def cases_of(rows: list[dict[str, Any]]) -> list[Case]:
    cases = []
    for row in rows:
        try:
            cases.append(Case(row))
        except Unsupported as reason:
            if row.get("complete"):
                print(f"unsupported {row['id']}: {reason}", file=sys.stderr)
    return cases


def main() -> int:
    """Fit, print errors by source, write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    cases = cases_of([*published("training"), *published("layer"), *published("own")])
    effects, without, without_chip = fit(cases, args.rounds)
    table(cases, effects, without)
    judged = [case for case in cases if case.weight == 1 and case.row["kind"] == "training"]
    width = spread([case.residual(without[case.group]) for case in judged])
    chips = {name: [c for c in judged if c.groups["chip"] == name] for name in without_chip}
    by_chip = {name: [c.residual(without_chip[name]) for c in members] for name, members in chips.items() if members}
    for name, errors in by_chip.items():
        print(
            f"chips of {name} left out: {len(errors)} rows, median {statistics.median(errors):+.3f}, 80% {spread(errors):.3f}"
        )
    # A chip nobody has measured is as uncertain as the generation that the others say least about.
    unseen = max(map(spread, by_chip.values()))
    if args.output:

        def short(values: dict[str, float]) -> dict[str, float]:
            return {name: round(value, 4) for name, value in values.items() if abs(value) >= 5e-5}

        widths = dict(training=width, layer=width, unseen_chip=unseen)
        content: dict[str, Any] = dict(intervals={name: round(value, 4) for name, value in widths.items()})
        content |= dict(effects=short(effects), without={group: short(values) for group, values in without.items()})
        args.output.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
