"""Fit the planner's constants to the published measurements, and leave each source out once.

A constant belongs to a chip, a link or a family of programs, never to a row (`shardwise/plan/cost/constants.py`). Their logarithms
are found by weighted least squares on the logarithm of predicted over measured seconds, with a prior that pulls each towards
0, outliers weighed down (Huber) and large sources held back. Then each source is left out
and the rest fitted again; `shardwise validate` predicts a source with the constants that never saw it.

    python benchmarks/fit_rows.py [--rounds 10] [--output shardwise/plan/fitted.json]      # and left_out.json beside it
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardwise.plan.cost.constants import BOUNDS, NAMES, constants_of, groups_of, kinds_of, widened
from shardwise.plan.cost.job import Job
from shardwise.plan.cost.passes import Passes
from shardwise.plan.cost.software import mixture
from shardwise.plan.published.rows import Unsupported, job_of_row, measured_seconds, program_name, published
from shardwise.plan.published.validate import layer_seconds
from shardwise.plan.time.data import DataSeconds
from shardwise.plan.time.step import (
    Prepared,
    copied_once,
    makespans,
    prepare,
    slowdown,
    stage_passes,
    step_time,
    tail_seconds,
    update_seconds,
    with_zero,
)
from shardwise.schedules import Cost

PRIOR = {
    "common": 0.04,
    "chip": 0.015,
    "part": 0.14,
    "family": 0.008,
    "kernel": 0.015,
    "kernels": 0.015,
    "fabric": 0.06,
    "fp8": 0.015,
    "source": 0.0125,
}
"""Standard deviations of the logarithms before anything is seen, by what an effect depends on. Most families of programs and
kernels are known by one or two sources: where they may be far from each other, one source's level is taken for its program's. Parts
of a generation differ in power and clock. Chosen on the errors of sources left out; chosen on half of the sources they are better
on the other half too (by 6 and 11% in two splits)."""
EXPERT = 0.12
"""Likewise, of how fast chips and dispatchers bring tokens to experts."""
LOOSE = {"launch": 0.12, "overhead": 0.3, "jitter": 0.4, "contention": 0.7, "exposed": 0.7}
LEVEL = 0.025
"""Likewise, of a source's products, which are its level."""
OWN = {"source": 0.4, "matmul": 0.4, "launch": 0.4, "overhead": 1.0}
"""Likewise, of what the machines and the people of one source do otherwise, once all else is settled: narrow before, so that what
sources have in common is not put down to each of them. Chosen on rows left out of sources of which others are known."""
SETTLED = 3
STEP = 0.02
FOLDS = 5
FEWEST = 15
"""Rows that a class has to have for an interval of its own."""
WAYS = ("forward", "backward_input", "backward_weight")
HUBER = 0.08
NOISE = 0.035
HELD_BACK = 0.25
"""By this power of its size a large source counts less."""


class Case:
    """A row with everything the constants do not change."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.row, self.group = row, row["group"]
        question = job_of_row(row)
        self.job, self.assumed = question.job, question.assumed
        self.prepared: Prepared = prepare(self.job)
        self.others = [(a.chance, prepare(replace(self.job, framework=a.framework))) for a in question.alternatives]
        seconds = measured_seconds(row, self.job)
        if not seconds:
            raise Unsupported("no time measured")
        self.measured = seconds
        self.groups = groups_of(self.job, row["group"])
        self.weight = 1.0 if row.get("complete") and not row.get("suspicious") else 0.25
        if row.get("repeat_of"):
            self.weight *= 0.5
        self.offset = self.spread = 0.0
        self.of = {
            name: [name, *(f"{name}/{kind}:{self.groups[kind]}" for kind in kinds_of(name) if self.groups[kind])]
            for name in NAMES
        }
        """The effects that each constant of this row is made of."""
        kinds, homes = self.prepared.kinds, self.job.layout.placement
        mine = (tuple(k for k, home in zip(kinds, homes, strict=True) if home == r) for r in range(max(homes) + 1))
        self.ranks = sorted(set(mine))
        """The kinds of stages that ranks have together, each combination once."""

    def residual(self, effects: dict[str, float]) -> float:
        """Logarithm of predicted over measured."""
        return math.log(self.seconds(constants_of(self.job, effects, self.group)) / self.measured) + self.offset

    def seconds(self, constants: dict[str, float]) -> float:
        """Predicted, of the likeliest program."""
        if self.row["kind"] == "layer":
            return layer_seconds(self.job, constants)
        return step_time(self.prepared, constants, self._exact).seconds

    def mix(self, effects: dict[str, float]) -> None:
        """What the program may do otherwise moves the prediction by its share."""
        if self.others and self.row["kind"] != "layer":
            base = self.seconds(constants_of(self.job, effects, self.group))
            times = [(p, step_time(o, constants_of(o.job, effects, self.group)).seconds) for p, o in self.others]
            self.offset, self.spread = mixture([(chance, math.log(other / base)) for chance, other in times])

    def _exact(self, job: Job, cost: Cost, wire: float) -> float:
        (makespan,) = makespans(job.layout, [job.microbatches], [cost], [wire])
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
        costs = [Cost(*parts)]
        for n in range(3):
            costs.append(Cost(*([1.01 * v for v in p] if n == m else p for m, p in enumerate(parts))))
        spans = makespans(self.job.layout, [self.job.microbatches] * 4, costs, [wire] * 4)
        self.slopes = [(longer - spans[0]) / (0.01 * sum(part)) for longer, part in zip(spans[1:], parts, strict=True)]
        rest = makespan - sum(g * sum(p) for g, p in zip(self.slopes, parts, strict=True))
        self.wire_slope = rest / wire if wire else 0.0

    def near(self, constants: dict[str, Any]) -> Any:
        """Seconds near where it was last played, without playing; constants may be arrays. The same as `step_time` otherwise."""
        if self.row["kind"] == "layer":
            return layer_seconds(self.job, constants)
        job, prepared = self.job, self.prepared
        each = zip(prepared.stages, prepared.data, strict=True)
        own = [stage_passes(job, stage, data, constants) for stage, data in each]
        zero = [with_zero(p, d, constants, job.framework.zero_overlap) for p, d in zip(own, prepared.data, strict=True)]
        hop = constants["pipeline"] * prepared.hop
        blocks = hop if job.framework.pipeline_blocks else 0.0 * hop
        wire = 0.0 * hop if job.framework.pipeline_blocks else hop
        counts = [(kind, prepared.kinds.count(kind)) for kind in range(len(zero))]
        sums = [
            sum(times * (getattr(zero[kind], name) + add) for kind, times in counts)
            for name, add in (("forward", blocks), ("backward_input", blocks), ("backward_weight", 0.0))
        ]
        if job.layout.pipeline == 1:
            makespan = job.microbatches * sum(sums)
        else:
            makespan = sum(g * total for g, total in zip(self.slopes, sums, strict=True)) + self.wire_slope * wire
        tails, updates = [], []
        for mine in self.ranks:
            data = DataSeconds(*map(sum, zip(*(prepared.data[k] for k in mine), strict=True)))
            forward, inputs, weights = (sum(getattr(own[k], n) for k in mine) for n in WAYS)
            work = Passes(forward, inputs, weights, {})
            tails.append(tail_seconds(job, work, data, constants))
            updates.append(update_seconds(job, data, constants) + copied_once(data, job.stage_microbatches, constants))
        whole = makespan + np.maximum.reduce(tails) + np.maximum.reduce(updates) + constants["overhead"]
        return whole * slowdown(job, constants)

    def slope(self, effects: dict[str, float]) -> tuple[float, dict[str, float]]:
        """The residual, and how it grows with each constant's logarithm."""
        constants = constants_of(self.job, effects, self.group)
        names = [name for name in NAMES if constants[name]]
        moved = {name: np.full(len(names) + 1, value) for name, value in constants.items()}
        for n, name in enumerate(names):
            moved[name][n + 1] *= math.exp(STEP)
        logs = np.log(self.near(moved))
        found = dict(zip(names, ((logs[1:] - logs[0]) / STEP).tolist(), strict=True))
        for name in BOUNDS:  # its effects are those of the odds
            (low, high), value = BOUNDS[name], constants[name]
            found[name] *= (value - low) * (high - value) / ((high - low) * value)
        return float(logs[0]) - math.log(self.measured) + self.offset, found

    def names(self) -> set[str]:
        """The effects this row depends on."""
        return set().union(*self.of.values())


def prior(name: str) -> float:
    base, _, kind = name.partition("/")
    kind = kind.split(":")[0] or "common"
    if kind == "source":
        return LEVEL if base == "matmul" else LOOSE[base] / 5 if base in LOOSE else PRIOR["source"]
    if kind == "part":
        return PRIOR["part"]
    return LOOSE.get(base, EXPERT if base == "expert" and kind != "common" else PRIOR[kind])


def prior_of_source(name: str) -> float:
    """That of what is only known of one source, with all else settled."""
    base = name.split("/")[0]
    return OWN.get(base, LOOSE[base] / 5 if base in LOOSE else OWN["source"])


def jacobian(cases: list[Case], names: list[str], effects: dict[str, float]) -> tuple[np.ndarray, np.ndarray]:
    """Residuals, and how they grow with each effect: with all effects of a constant alike."""
    at = {name: n for n, name in enumerate(names)}
    start, columns = np.zeros(len(cases)), np.zeros((len(cases), len(names)))
    for c, case in enumerate(cases):
        case.mix(effects)
        case.linearise(effects)
        start[c], slopes = case.slope(effects)
        for name, slope in slopes.items():
            columns[c, [at[effect] for effect in case.of[name]]] = slope
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
    return np.array([case.weight / sizes[case.group] ** HELD_BACK for case in cases])


def of_one_source(names: list[str], cases: list[Case]) -> np.ndarray:
    """Which effects are of a chip that only one of these sources has: nothing tells them from the source's."""
    sources: dict[str, set[str]] = defaultdict(set)
    for case in cases:
        for name in case.names():
            sources[name].add(case.group)
    return np.array(["/part:" in name and len(sources[name]) == 1 for name in names])


class Fit(NamedTuple):
    """Effects, by name."""

    effects: dict[str, float]
    """Of all rows."""
    without: dict[str, dict[str, float]]
    """For each source, those of all others."""
    without_chip: dict[str, dict[str, float]]
    """For each generation of chips, those of all others."""
    without_program: dict[str, dict[str, float]]
    """For each program that rows name, those of all others."""
    folds: dict[str, dict[str, float]]
    """For each fifth of the rows of every source, those of the others: what a source tells about its other rows."""


def fit(cases: list[Case], rounds: int) -> Fit:
    """Effects of all rows, and of all but one source or generation of chips."""
    names = sorted(set().union(*(case.names() for case in cases)))
    scale = np.array([prior(name) for name in names])
    weights = weights_of(cases)
    now = np.zeros(len(names))
    for number in range(rounds):
        residuals, columns = jacobian(cases, names, dict(zip(names, now.tolist(), strict=True)))
        columns = columns * ~of_one_source(names, cases)
        for _ in range(3):  # outliers are weighed anew as the linear model moves
            moved = solve(residuals, columns, weights, now, scale)
            residuals, now = residuals + columns @ (moved - now), moved
        print(f"round {number + 1}: {summary(cases, dict(zip(names, now.tolist(), strict=True)))}", file=sys.stderr)
    effects = dict(zip(names, now.tolist(), strict=True))
    residuals, columns = jacobian(cases, names, effects)
    sources = np.array(["/source:" in name for name in names])
    own_scale = np.array([prior_of_source(name) for name in np.array(names)[sources]])

    def settled(start: np.ndarray, kept: np.ndarray) -> dict[str, float]:
        """The effects with those of sources fitted to what is left once more, by themselves. They move far, so that slopes are
        taken anew."""
        moved = start.copy()
        for _ in range(SETTLED):
            own, slopes = jacobian(cases, names, dict(zip(names, moved.tolist(), strict=True)))
            for _ in range(3):
                before = moved[sources]
                moved[sources] = solve(own[kept], slopes[kept][:, sources], weights[kept], before, own_scale)
                own = own + slopes[:, sources] @ (moved[sources] - before)
        return dict(zip(names, moved.tolist(), strict=True))

    def leave_out(words: list[str], *, settle: bool = False) -> dict[str, dict[str, float]]:
        """Effects fitted without the rows of each word in turn."""
        result = {}
        for word in sorted(set(words)):
            kept = np.array([other != word for other in words])
            left_out, own = now.copy(), residuals.copy()
            told = columns * ~of_one_source(names, [case for case, keep in zip(cases, kept, strict=True) if keep])
            for _ in range(6):
                moved = solve(own[kept], told[kept], weights[kept], left_out, scale)
                own, left_out = own + columns @ (moved - left_out), moved
            found = dict(zip(names, left_out.tolist(), strict=True))
            result[word] = settled(left_out, kept) if settle else found
        return result

    groups, chips = [c.group for c in cases], [c.groups["chip"] for c in cases]
    programs = [program_name(c.row) for c in cases]
    whole = settled(now, np.ones(len(cases), bool))
    folds = leave_out(folds_of(cases), settle=True)
    return Fit(whole, leave_out(groups), leave_out(chips), leave_out(programs), folds)


def folds_of(cases: list[Case]) -> list[str]:
    """A fifth of each source's rows each."""
    seen: dict[str, int] = defaultdict(int)
    folds = []
    for case in cases:
        folds.append(str(seen[case.group] % FOLDS))
        seen[case.group] += 1
    return folds


def width_of(cases: list[Case], residuals: list[float]) -> float:
    """The width of a class: that with which the intervals of its rows, each wider for what was assumed, hold 8 of 10, rows of large
    sources counting less."""
    weights = weights_of(cases) / np.array([c.weight for c in cases])
    low, high = 0.0, 3.0
    for _ in range(40):
        middle = (low + high) / 2
        inside = [abs(r) <= widened(middle, len(c.assumed), c.spread) for c, r in zip(cases, residuals, strict=True)]
        low, high = (low, middle) if np.average(inside, weights=weights) >= 0.8 else (middle, high)
    return high


def intervals(cases: list[Case], fit: Fit) -> dict[str, float]:
    """Widths by class (`classes_of` in `shardwise/plan/cost/constants.py`). A class with few rows takes the wider class' width."""
    own = [c for c in cases if not c.row.get("suspicious")]
    left_out = {id(c): c.residual(fit.without[c.group]) for c in own}
    new_program = {id(c): c.residual(fit.without_program[program_name(c.row)]) for c in own}
    known = {id(c): c.residual(fit.folds[fold]) for c, fold in zip(cases, folds_of(cases), strict=True)}
    new_chip = {id(c): c.residual(fit.without_chip[c.groups["chip"]]) for c in own}
    found: dict[str, list[tuple[Case, float]]] = defaultdict(list)
    for c in own:
        kind = "experts" if c.job.model.experts else "dense"
        for name in (f"{kind} on {c.groups['chip']}", kind, c.row["kind"]):
            found[name].append((c, left_out[id(c)]))
        found[f"{kind}, known source"].append((c, known[id(c)]))
        for name, residuals in (("program", new_program), ("chip", new_chip)):
            found[f"unseen {name}"].append((c, residuals[id(c)]))
            found[f"{kind}, unseen {name}"].append((c, residuals[id(c)]))
    result = {}
    for name, members in found.items():
        if len(members) >= FEWEST or name in ("dense", "experts", "training", "layer", "unseen program", "unseen chip"):
            result[name] = width_of([c for c, _ in members], [r for _, r in members])
    return result


def summary(cases: list[Case], effects: dict[str, float]) -> str:
    errors = [abs(math.exp(c.residual(effects)) - 1) for c in cases if c.weight == 1.0 and c.row["kind"] == "training"]
    return f"{len(errors)} rows, median {statistics.median(errors):.3f}, mean {statistics.mean(errors):.3f}"


def table(
    cases: list[Case],
    effects: dict[str, float],
    without: dict[str, dict[str, float]],
    folds: dict[str, dict[str, float]],
) -> None:
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
    fold_of = {id(case): folds[fold] for case, fold in zip(cases, folds_of(cases), strict=True)}
    for label, choose in (
        ("seen", lambda c: effects),
        ("left out of a known source", lambda c: fold_of[id(c)]),
        ("left out", lambda c: without[c.group]),
    ):
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
    found = fit(cases, args.rounds)
    table(cases, found.effects, found.without, found.folds)
    widths = intervals(cases, found)
    for name, width in widths.items():
        print(f"interval of {name}: {width:.3f}")
    if args.output:

        def short(values: dict[str, float], *, sources: bool = False) -> dict[str, float]:
            kept = ((name, round(value, 4)) for name, value in values.items() if sources or "/source:" not in name)
            # Those of products say which chips were seen, also where they are as any other.
            return {name: value for name, value in kept if abs(value) >= 1e-3 or name.startswith("matmul/chip:")}

        def write(path: Path, content: dict[str, Any]) -> None:
            path.write_text(json.dumps(content, indent=1) + "\n")

        rounded = {name: round(value, 4) for name, value in widths.items()}
        write(args.output, dict(intervals=rounded, effects=short(found.effects, sources=True)))
        others = ("without", "without_program")
        content = {name: {word: short(v) for word, v in getattr(found, name).items()} for name in others}
        write(args.output.with_name("left_out.json"), content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
