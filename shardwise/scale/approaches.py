"""How the best size grows with compute, N ~ C^a, by Chinchilla's three approaches (Hoffmann et al. 2022, section 3): the lowest
loss of each amount of compute; the lowest point of a curve through runs of equal compute; the fitted law. Each has an interval over
resampled runs. Where runs have exactly one amount of compute, the curve is an Akima spline (1970), as Porian et al. (2024) draw it:
a parabola depends on sizes far from the lowest. Where compute differs a little, it is a parabola, which tolerates scatter."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shardwise.scale.fit import Fit, Interval
from shardwise.scale.laws import LAWS
from shardwise.scale.minimize import Array
from shardwise.scale.points import Points, groups

SAME_COMPUTE, ALIKE = 0.01, 0.25
"""Runs whose log FLOPs differ by no more than this have the same compute, or about the same."""
_RESAMPLED = 100


def approaches(fitted: Fit, seed: int = 0) -> dict[str, Interval]:
    """The exponent a of N ~ C^a by each approach that the runs allow; tokens then grow with C^(1 - a)."""
    random = np.random.default_rng(seed)
    every = fitted.points.beside(fitted.left_out)  # an outlier of the law may still be the best of its compute
    found = {}
    for name, function, points in (
        ("envelope", _envelope, fitted.points),
        ("isoflop", _isoflops, every),
        ("isoflop", _parabolas, fitted.points),
    ):
        exponent = _resampled(function, points, random) if name not in found else None
        if exponent is not None:
            found[name] = exponent
    best = LAWS[fitted.law.name].coefficients(fitted.law.theta.tolist(), fitted.x0, fitted.y0)
    if {"alpha", "beta"} <= set(best):
        rows = [LAWS[fitted.law.name].coefficients(row.tolist(), fitted.x0, fitted.y0) for row in fitted.law.draws]
        drawn = [row["beta"] / (row["alpha"] + row["beta"]) for row in rows]
        found["law"] = Interval.of(best["beta"] / (best["alpha"] + best["beta"]), drawn)
    return found


def _resampled(function: Callable[[Points], float], points: Points, random: np.random.Generator) -> Interval | None:
    value = function(points)
    if not np.isfinite(value):
        return None
    drawn = [function(points.chosen(random.integers(0, len(points), len(points)))) for _ in range(_RESAMPLED)]
    return Interval.of(value, [each for each in drawn if np.isfinite(each)])


def _envelope(points: Points) -> float:
    """Approach 1, with final losses: the run with the lowest loss for each amount of compute."""
    best = [group[points.loss[group].argmin()] for group in groups(points.flops, ALIKE) if len(group) >= 3]
    return _slope(points.flops[best], points.params[best]) if len(best) >= 4 else np.nan


def _isoflops(points: Points) -> float:
    """Approach 2: the lowest point of a curve in log N through runs of one amount of compute."""
    return _lowest_points(points, SAME_COMPUTE, lowest_point)


def _parabolas(points: Points) -> float:
    """The same for runs of about equal compute, with parabolas."""
    return _lowest_points(points, ALIKE, _lowest_of_parabola)


def _lowest_points(points: Points, apart: float, lowest: Callable[[Array, Array], float]) -> float:
    flops, sizes = [], []
    for group in groups(points.flops, apart):
        ordered = group[np.argsort(points.params[group])]
        x, y = np.log(points.params[ordered]), np.log(points.loss[ordered])
        if len(np.unique(x)) < 5:
            continue
        at = lowest(x, y)
        if x[0] < at < x[-1]:
            flops.append(np.exp(np.log(points.flops[group]).mean()))
            sizes.append(np.exp(at))
    return _slope(np.array(flops), np.array(sizes)) if len(sizes) >= 4 else np.nan


def _lowest_of_parabola(x: Array, y: Array) -> float:
    bend, slope, _ = np.polyfit(x, y, 2)
    return float(-slope / (2 * bend)) if bend > 0 else np.nan


def lowest_point(x: Array, y: Array) -> float:
    """The x where the Akima spline through points (at least three, x ascending) is lowest: a cubic between two points, whose slope
    at each point is a mean of the neighbouring slopes; each weight is how much the curve bends on the other side."""
    x, places = np.unique(x, return_index=True)
    y = y[places]
    slopes = np.diff(y) / np.diff(x)
    ends = 2 * slopes[0] - slopes[1], 2 * slopes[-1] - slopes[-2]
    m = np.concatenate([[2 * ends[0] - slopes[0], ends[0]], slopes, [ends[1], 2 * ends[1] - slopes[-1]]])
    left, right = np.abs(m[3:] - m[2:-1]), np.abs(m[1:-2] - m[:-3])
    both = left + right
    own = np.where(
        both > 0, (left * m[1:-2] + right * m[2:-1]) / np.where(both > 0, both, 1.0), (m[1:-2] + m[2:-1]) / 2
    )
    t, h = np.linspace(0.0, 1.0, 201)[:, None], np.diff(x)
    curve = y[:-1] * (1 + 2 * t) * (1 - t) ** 2 + y[1:] * t**2 * (3 - 2 * t)
    curve += h * t * (1 - t) * ((1 - t) * own[:-1] - t * own[1:])
    at, interval = np.unravel_index(int(curve.argmin()), curve.shape)
    return float(x[interval] + t[at, 0] * h[interval])


def _slope(flops: Array, sizes: Array) -> float:
    return float(np.polyfit(np.log(flops), np.log(sizes), 1)[0]) if np.ptp(np.log(flops)) > 1 else np.nan
