"""Fit the constants of serving to the published measurements, and leave each source out once.

The method is that of `fit_rows.py`: logarithms of factors that belong to a chip, a program or a format, never to a row, by
weighted least squares with a prior and outliers weighed down. The width of the interval is then set so that it holds four in
five of the rows, each predicted without its source.

    python benchmarks/fit_inference.py [--rounds 8] [--output shardwise/plan/serving/fitted.json]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from fit_rows import solve, weights_of

from shardwise.plan.published.rows import Unsupported, published
from shardwise.plan.published.serving_rows import MEASURES, first_measured, serving_of_row
from shardwise.plan.serving.inference import NAMES, constants_of, groups_of
from shardwise.plan.serving.loads import prepare, quantities

PRIOR = {"common": 0.5, "group": 0.15}
"""Standard deviations of the logarithms before anything is seen."""
LOOSE = {"wait": 0.7, "grouped": 0.8, "gap": 0.5, "launch": 0.3, "step": 0.7, "stall": 0.7, "arrive": 1.0, "queue": 0.7}
FIRST_TOKEN = ("arrive", "queue")
HELD = 0.8


class Case:
    """A row with everything the constants do not change."""

    def __init__(self, row: dict[str, Any], name: str = "") -> None:
        self.row, self.group = row, row["group"]
        self.serving, load, _ = serving_of_row(row)
        self.prepared = prepare(self.serving, load)
        self.name = name or first_measured(row)
        self.measured = row["measured"][self.name]
        self.groups = groups_of(self.serving)
        self.weight = 1.0 if row.get("complete") and not row.get("suspicious") else 0.25

    def residual(self, effects: dict[str, float]) -> float:
        """Logarithm of predicted over measured."""
        ours, unit = MEASURES[self.name]
        found = quantities(self.prepared, constants_of(self.serving, effects))[ours]
        return math.log(found * unit / self.measured)

    def names(self) -> set[str]:
        """The effects this row depends on."""
        return set(NAMES) | {
            f"{n}/{kind}:{self.groups[kind]}" for n, (_, kinds) in NAMES.items() for kind in kinds if self.groups[kind]
        }


def prior(name: str) -> float:
    base = name.split("/")[0]
    return LOOSE.get(base, PRIOR["common" if "/" not in name else "group"])


def jacobian(cases: list[Case], names: list[str], effects: dict[str, float]) -> tuple[np.ndarray, np.ndarray]:
    """Residuals, and how each moves with each effect."""
    start = np.array([case.residual(effects) for case in cases])
    columns = np.zeros((len(cases), len(names)))
    depends = [case.names() for case in cases]
    step = 0.02
    for n, name in enumerate(names):
        moved = effects | {name: effects.get(name, 0.0) + step}
        for c, case in enumerate(cases):
            if name in depends[c]:
                columns[c, n] = (case.residual(moved) - start[c]) / step
    return start, columns


def settle(cases: list[Any], names: list[str], fixed: dict[str, float], rounds: int) -> dict[str, float]:
    """The effects called `names`, the others held as they are."""
    scale = np.array([prior(name) for name in names])
    weights, now = weights_of(cases), np.zeros(len(names))
    for _ in range(rounds):
        residuals, columns = jacobian(cases, names, fixed | dict(zip(names, now, strict=True)))
        for _ in range(3):  # outliers are weighed anew as the linear model moves
            moved = solve(residuals, columns, weights, now, scale)
            residuals, now = residuals + columns @ (moved - now), moved
    return {name: round(float(value), 4) for name, value in zip(names, now, strict=True) if abs(value) >= 5e-5}


def fit(cases: list[Any], late: list[Any], rounds: int) -> dict[str, float]:
    """Effects of these rows; then, these held, those that only the time to the first token shows."""
    names = set().union(*(case.names() for case in cases))
    first = {name for name in names if name.split("/")[0] in FIRST_TOKEN}
    effects = settle(cases, sorted(names - first), {}, rounds)
    return effects | settle(late, sorted(first), effects, rounds) if late else effects


def spread(values: list[float]) -> str:
    """Bias, and middle and mean size, of logarithms of predicted over measured."""
    errors = [math.exp(v) - 1 for v in values]
    sizes = [abs(e) for e in errors]
    return f"bias {median(errors):+.3f} |error| median {median(sizes):.3f} mean {mean(sizes):.3f}"


def main() -> int:
    """Fit, print errors by source, write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    cases, late = [], []
    for row in published("inference"):
        try:
            cases.append(Case(row))
            late += [Case(row, "ttft_ms")] if row["measured"].get("ttft_ms") else []
        except Unsupported as reason:
            print(f"unsupported {row['id']}: {reason}", file=sys.stderr)
    groups = sorted({case.group for case in cases})
    effects = fit(cases, late, args.rounds)
    without = {
        g: fit([c for c in cases if c.group != g], [c for c in late if c.group != g], args.rounds) for g in groups
    }
    seen = {id(c): c.residual(effects) for c in cases}
    unseen = {id(c): c.residual(without[c.group]) for c in cases}
    for group in groups:
        own = [id(c) for c in cases if c.group == group]
        print(f"{group:22} {len(own):4} rows  seen: {spread([seen[n] for n in own])}")
        print(f"{'':22} {'':4} left out: {spread([unseen[n] for n in own])}")
    print(
        f"{'all':22} {len(cases):4} rows  seen: {spread(list(seen.values()))}; left out: {spread(list(unseen.values()))}"
    )
    width = float(np.quantile(np.abs(list(unseen.values())), HELD))
    print(f"half width of the interval {width:.3f}")
    if args.output:
        content = dict(effects=effects, without=without, interval=round(width, 3))
        args.output.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
