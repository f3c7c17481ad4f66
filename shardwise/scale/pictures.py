"""Plots of a fit, as lines and points for `report/plot.py`: isoFLOP curves, the envelope, residuals, with intervals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from shardwise.scale.fit import Fit, predict
from shardwise.scale.laws import log_loss
from shardwise.scale.minimize import Array
from shardwise.scale.optimum import best_size
from shardwise.scale.points import FLOPS_PER_TOKEN

Lines = list[dict[str, Any]]
_CURVES, _STEPS = 6, 48


def loss_of(fitted: Fit, params: Array, tokens: Array) -> Array:
    """The loss by the form that is used for predictions."""
    return np.exp(log_loss(fitted.law.name, fitted.law.theta, params, tokens, fitted.x0, fitted.y0)[0])


def _pairs(x: Array, y: Array) -> list[tuple[float, float]]:
    return list(zip(x.tolist(), y.tolist(), strict=True))


def iso_flops(fitted: Fit) -> Lines:
    """Loss over parameters for some amounts of compute, with the runs nearest to each (Hoffmann et al. 2022, figure 3)."""
    flops, points = np.log(fitted.points.flops), fitted.points
    levels = np.linspace(flops.min(), flops.max(), _CURVES)
    nearest = np.abs(flops[:, None] - levels[None]).argmin(1)
    found: Lines = []
    for at, level in enumerate(levels):
        best = best_size(lambda n, d: loss_of(fitted, n, d), math.exp(level))
        sizes = np.exp(np.linspace(math.log(best.params / 12), math.log(best.params * 12), _STEPS))
        losses = loss_of(fitted, sizes, math.exp(level) / (FLOPS_PER_TOKEN * sizes))
        own = nearest == at
        places = _pairs(points.params[own], points.loss[own])
        tips = [f"{name}: {loss:.4g}" for name, loss in zip(points.chosen(own).names, points.loss[own], strict=True)]
        found.append(dict(flops=math.exp(level), line=_pairs(sizes, losses), points=places, tips=tips))
    return found


def envelope(fitted: Fit, beyond: float = 10.0) -> Lines:
    """The best loss for each amount of compute, up to `beyond` times the largest run, with its interval; and the runs."""
    points = fitted.points
    levels = np.exp(np.linspace(math.log(points.flops.min()), math.log(points.flops.max() * beyond), _STEPS))
    line, band = [], []
    for level in levels.tolist():
        best = best_size(lambda n, d: loss_of(fitted, n, d), level)
        said = predict(fitted, best.params, best.tokens)
        line.append((level, said.loss))
        band.append((level, said.low, said.high))
    return [dict(line=line, band=band, points=_pairs(points.flops, points.loss), tips=list(points.names))]


def residuals(fitted: Fit) -> Lines:
    """The deviation of each run from the law, with the interval predicted for it."""
    points = fitted.points
    order = np.argsort(points.flops)
    places = _pairs(points.flops[order], 100 * fitted.residuals[order])
    band = []
    for at in order[:: max(1, len(order) // 40)]:
        said = predict(fitted, float(points.params[at]), float(points.tokens[at]))
        band.append(
            (float(points.flops[at]), 100 * math.log(said.low / said.loss), 100 * math.log(said.high / said.loss))
        )
    names = [points.names[at] for at in order]
    return [dict(points=places, band=band, line=[(x, 0.0) for x, _, _ in band], tips=names)]
