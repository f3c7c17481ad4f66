"""How the best size grows with compute, N ~ C^a, by Chinchilla's three approaches (Hoffmann et al. 2022, section 3): the lowest
loss of each amount of compute; parabolas through runs of equal compute; the fitted law. Each with its interval over resampled
runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shardwise.scale.fit import LEVEL, Fit
from shardwise.scale.laws import LAWS
from shardwise.scale.minimize import Array
from shardwise.scale.points import Points

SAME_COMPUTE = 0.25
"""Runs whose log FLOPs lie no further apart than this count as of equal compute."""
_RESAMPLED = 100


@dataclass(frozen=True)
class Exponent:
    """a of N ~ C^a; tokens then grow with C^(1 - a)."""

    value: float
    low: float
    high: float


def approaches(fitted: Fit, seed: int = 0) -> dict[str, Exponent]:
    """What each approach says, where the runs allow it."""
    random = np.random.default_rng(seed)
    found = {}
    for name, function in (("envelope", _envelope), ("isoflop", _parabolas)):
        exponent = _resampled(function, fitted.points, random)
        if exponent is not None:
            found[name] = exponent
    best = LAWS[fitted.law.name].coefficients(fitted.law.theta.tolist(), fitted.x0, fitted.y0)
    if {"alpha", "beta"} <= set(best):
        rows = [LAWS[fitted.law.name].coefficients(row.tolist(), fitted.x0, fitted.y0) for row in fitted.law.draws]
        drawn = [row["beta"] / (row["alpha"] + row["beta"]) for row in rows]
        found["law"] = _exponent(best["beta"] / (best["alpha"] + best["beta"]), drawn)
    return found


def _exponent(value: float, drawn: list[float]) -> Exponent:
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]) if drawn else (value, value)
    return Exponent(value, float(low), float(high))


def _resampled(function: Callable[[Points], float], points: Points, random: np.random.Generator) -> Exponent | None:
    value = function(points)
    if not np.isfinite(value):
        return None
    drawn = [function(points.chosen(random.integers(0, len(points), len(points)))) for _ in range(_RESAMPLED)]
    return _exponent(value, [each for each in drawn if np.isfinite(each)])


def _groups(points: Points) -> list[np.ndarray]:
    """Runs of about equal compute."""
    order = np.argsort(points.flops)
    logs = np.log(points.flops[order])
    groups: list[list[int]] = []
    start = -np.inf
    for at, value in zip(order, logs, strict=True):
        if value > start + SAME_COMPUTE:
            groups.append([])
            start = value
        groups[-1].append(int(at))
    return [np.array(group) for group in groups]


def _envelope(points: Points) -> float:
    """Approach 1, of final losses: of each amount of compute the run with the lowest loss."""
    best = [group[points.loss[group].argmin()] for group in _groups(points) if len(group) >= 3]
    return _slope(points.flops[best], points.params[best]) if len(best) >= 4 else np.nan


def _parabolas(points: Points) -> float:
    """Approach 2: the lowest point of a parabola in log N through runs of equal compute, where it lies among them."""
    flops, sizes = [], []
    for group in _groups(points):
        x, y = np.log(points.params[group]), np.log(points.loss[group])
        if len(np.unique(x)) < 5:
            continue
        bend, slope, _ = np.polyfit(x, y, 2)
        lowest = -slope / (2 * bend) if bend > 0 else np.nan
        if x.min() <= lowest <= x.max():
            flops.append(np.exp(np.log(points.flops[group]).mean()))
            sizes.append(np.exp(lowest))
    return _slope(np.array(flops), np.array(sizes)) if len(sizes) >= 4 else np.nan


def _slope(flops: Array, sizes: Array) -> float:
    return float(np.polyfit(np.log(flops), np.log(sizes), 1)[0]) if np.ptp(np.log(flops)) > 1 else np.nan
