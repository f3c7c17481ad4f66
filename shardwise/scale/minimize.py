"""Many small minimisations at once: BFGS over a batch of starts, in NumPy.

A law has three to seven coefficients and is fitted from many starts and to many resampled sets of points. Each fit is a row here,
so that one call of the objective evaluates all of them; converged rows are left out of the next call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Objective = Callable[[Array, NDArray[np.int64]], tuple[Array, Array]]
"""A function from coefficients (rows, k) and their row indices to values (rows,) and gradients (rows, k)."""

_ENOUGH, _CURVATURE = 1e-4, 0.9
"""The Wolfe conditions (Nocedal and Wright 2006, eq. 3.6): a step must gain at least `_ENOUGH` of the decrease that the slope
predicts, and leave at most `_CURVATURE` of the slope."""
_TRIES = 30


@dataclass(frozen=True)
class Minima:
    """The coefficients at which each row ended, and the value there."""

    at: Array
    values: Array


def minimize(objective: Objective, starts: Array, iterations: int = 300, tolerance: float = 1e-11) -> Minima:
    """Minimise every row from its start; a row ends when two consecutive iterations gain less than `tolerance` of the value."""
    at = np.array(starts, dtype=np.float64)
    rows, size = at.shape
    values, slopes = objective(at, np.arange(rows))
    inverse = np.tile(np.eye(size), (rows, 1, 1))
    idle = np.zeros(rows, dtype=int)
    live = np.flatnonzero(np.isfinite(values))
    for iteration in range(iterations):
        if not len(live):
            break
        step = _step(objective, live, at, values, slopes, inverse, first=iteration == 0)
        moved, change = step.at - at[live], step.slopes - slopes[live]
        gained = values[live] - step.values
        at[live], values[live], slopes[live] = step.at, step.values, step.slopes
        inverse[live] = _updated(inverse[live], moved, change)
        small = gained <= tolerance * np.maximum(np.abs(step.values), 1e-12)
        # A row that is stuck once resets its curvature and tries steepest descent before it gives up.
        inverse[live[small]] = np.eye(size)
        idle[live] = np.where(small, idle[live] + 1, 0)
        live = live[idle[live] < 2]
    return Minima(at, values)


@dataclass(frozen=True)
class _Step:
    at: Array
    values: Array
    slopes: Array


def _step(
    objective: Objective, live: NDArray[np.int64], at: Array, values: Array, slopes: Array, inverse: Array, first: bool
) -> _Step:
    """A step of each live row along its direction that meets the Wolfe conditions, or the best one tried."""
    here, value, slope = at[live], values[live], slopes[live]
    way = -np.einsum("rij,rj->ri", inverse[live], slope)
    along = (way * slope).sum(1)
    upward = ~(along < 0)
    way[upward] = -slope[upward]
    along = np.where(upward, -(slope * slope).sum(1), along)
    # The scale is unknown before the first step: no coefficient moves by more than one, and later by no more than five.
    length = np.minimum(1.0, 1.0 / np.maximum(np.abs(way).max(1), 1e-300)) if first else np.ones(len(live))
    length = np.minimum(length, 5.0 / np.maximum(np.abs(way).max(1), 1e-300))
    low, high = np.zeros(len(live)), np.full(len(live), np.inf)
    best = _Step(here.copy(), value.copy(), slope.copy())
    open_ = np.arange(len(live))
    for _ in range(_TRIES):
        tried = here[open_] + length[open_, None] * way[open_]
        found, gradient = objective(tried, live[open_])
        enough = np.isfinite(found) & (found <= value[open_] + _ENOUGH * length[open_] * along[open_])
        flat = (gradient * way[open_]).sum(1) >= _CURVATURE * along[open_]
        better = enough & (found < best.values[open_])
        take = open_[better]
        best.at[take], best.values[take], best.slopes[take] = tried[better], found[better], gradient[better]
        high[open_] = np.where(~enough, length[open_], high[open_])
        low[open_] = np.where(enough & ~flat, length[open_], low[open_])
        open_ = open_[~(enough & flat)]
        if not len(open_):
            break
        bounded = np.isfinite(high[open_])
        length[open_] = np.where(bounded, 0.5 * (low[open_] + np.where(bounded, high[open_], 0.0)), 2.0 * length[open_])
        # A bracket at rounding precision has nothing left to search.
        open_ = open_[length[open_] > 1e-14]
        if not len(open_):
            break
    return best


def _updated(inverse: Array, moved: Array, change: Array) -> Array:
    """The inverse Hessian after a step (Nocedal and Wright 2006, eq. 6.17); a step without positive curvature changes nothing."""
    product = (moved * change).sum(1)
    curved = product > 1e-300
    share = np.where(curved, 1.0 / np.where(curved, product, 1.0), 0.0)[:, None, None]
    left = np.eye(moved.shape[1]) - share * moved[:, :, None] * change[:, None, :]
    new = left @ inverse @ left.transpose(0, 2, 1) + share * moved[:, :, None] * moved[:, None, :]
    usable = curved & np.isfinite(new).all((1, 2))
    return np.where(usable[:, None, None], new, inverse)
