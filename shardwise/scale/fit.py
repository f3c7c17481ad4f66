"""Fits a law to points: Huber loss on the log of the loss, many starts, bootstrap resampling of the points for the intervals.

A form is not judged by the points it was fitted to: each is fitted again without the largest runs, and judged by how well it
predicts those. The same errors determine how wide an interval must be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from shardwise.run.problems import UserError
from shardwise.scale.laws import LAWS, Law, log_loss
from shardwise.scale.minimize import Array, Minima, Objective, minimize
from shardwise.scale.points import Points, groups
from shardwise.scale.published import EXPONENTS

DELTA = 1e-3
"""Where the Huber loss turns from squares to absolute values, in log loss (Hoffmann et al. 2022, D.3)."""
STARTS, RESAMPLED = 100, 200
LEFT_OUT, SCATTER = 5.0, 0.005
"""A point more than `LEFT_OUT` robust standard deviations off the law is left out. The standard deviation is taken as at least
`SCATTER` of the loss, about the difference between two seeds of a small model."""
EXPONENT, SPREAD = float(np.mean(EXPONENTS)), 3 * float(np.std(EXPONENTS))
"""What an exponent is before anything is seen, and its standard deviation: that of the published ones, and three times theirs. From
five runs that scatter by `SCATTER`, the loss at three times the size is predicted with a root mean square error of 2%, and of 3%
without it, if the true exponent is between 0.25 and 0.4; beyond, the prior gains little."""
LEVEL = 0.9
ENDS = (1 - LEVEL) / 2, (1 + LEVEL) / 2
"""The share of an interval, and the quantiles at its ends."""
_AGREE = 1e-6
_HELD_OUT = 0.3


@dataclass(frozen=True)
class FittedLaw:
    """One fitted form. Rows of `draws` are fits to resampled points."""

    name: str
    theta: Array
    draws: Array
    starts: int
    agree: int
    """The number of starts that ended at the best optimum."""
    held_out: float = float("nan")
    """Mean absolute error of log loss on the largest runs, when fitted without them."""


@dataclass(frozen=True)
class Fit:
    """Forms fitted to the same points, the best first."""

    laws: list[FittedLaw]
    points: Points
    left_out: Points
    x0: float
    y0: float
    residuals: Array
    widening: float
    """The factor by which intervals are wider than scatter and resampling alone would make them."""
    notes: list[str] = field(default_factory=list)

    @property
    def law(self) -> FittedLaw:
        """The form that is used for predictions."""
        return self.laws[0]


@dataclass(frozen=True)
class Interval:
    """A value, and the interval that contains 90% of those from resampled points."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, drawn: list[float]) -> Interval:
        """From the values of resampled points; without any, the interval is the value."""
        low, high = np.quantile(drawn, ENDS) if drawn else (value, value)
        return cls(value, float(low), float(high))


@dataclass(frozen=True)
class Prediction:
    """A loss with the interval that should contain 90% of measured losses."""

    loss: float
    low: float
    high: float


def fit(
    points: Points,
    forms: Sequence[str] = ("chinchilla", "over-training"),
    starts: int = STARTS,
    resampled: int = RESAMPLED,
    seed: int = 0,
    tell: Callable[[str], None] = lambda text: None,
) -> Fit:
    """Fits every form; outliers are left out and reported."""
    need = max(LAWS[name].size for name in forms)
    if len(points) < need + 1:
        raise UserError(f"too few points to fit {need} coefficients: {len(points)} of at least {need + 1}")
    if min(len(np.unique(points.params)), len(np.unique(points.tokens))) < 2:
        raise UserError(
            "all points have the same params or the same tokens: how the loss depends on them cannot be fitted"
        )
    x0, y0 = float(np.log(points.params).mean()), float(np.log(points.tokens).mean())
    tell("finding points that do not belong")
    keep = _kept(points, forms, x0, y0, seed)
    kept = points.chosen(keep)
    found, errors, notes = [], {}, []
    sizes = len(groups(kept.params, 0.1))  # within a tenth of each other they count once
    usable = [name for name in forms if sizes >= LAWS[name].sizes]
    for name in (each for each in forms if each not in usable):
        notes.append(f"{name} needs {LAWS[name].sizes} sizes of model, and there are {sizes}: it was not fitted")
    if not usable:
        raise UserError(*notes)
    for name in usable:
        tell(f"fitting {name}")
        found.append(_fit_law(LAWS[name], kept, x0, y0, starts, resampled, np.random.default_rng(seed)))
    folds = _folds(kept)
    for law in found:
        tell(f"predicting the largest runs by {law.name}")
        errors[law.name] = _held_out(law.name, kept, folds, x0, y0, seed)
    scores = {
        name: float(np.mean([np.abs(error).mean() for error, _ in each])) if each else np.nan
        for name, each in errors.items()
    }
    scored = [replace(law, held_out=scores[law.name]) for law in found]
    laws = sorted(scored, key=lambda law: (np.isnan(law.held_out), law.held_out))
    residuals = np.log(kept.loss) - _evaluate(laws[0].name, laws[0].theta[None], kept, x0, y0)[0]
    widening = _widening(errors[laws[0].name])
    if not folds:
        notes.append("too few points to hold some out: the form is not checked, and the interval may be too narrow")
    return Fit(laws, kept, points.chosen(~keep), x0, y0, residuals, widening, notes)


def predict(fitted: Fit, params: float, tokens: float, seed: int = 0) -> Prediction:
    """The loss of a model, with an interval that covers resampled coefficients, other forms, and the scatter of single runs."""
    at = np.array([params]), np.array([tokens]), fitted.x0, fitted.y0
    best = float(log_loss(fitted.law.name, fitted.law.theta, *at)[0, 0])
    random = np.random.default_rng(seed)
    drawn = np.concatenate(
        [
            log_loss(law.name, law.draws, *at)[: round(share * len(law.draws)), 0]
            for law, share in zip(fitted.laws, _shares(fitted.laws), strict=True)
        ]
    )
    drawn = drawn + random.choice(np.concatenate([fitted.residuals, -fitted.residuals]), len(drawn))
    low, high = np.quantile(drawn, ENDS)
    low, high = best - fitted.widening * max(0.0, best - low), best + fitted.widening * max(0.0, high - best)
    return Prediction(float(np.exp(best)), float(np.exp(low)), float(np.exp(high)))


def warnings(fitted: Fit, params: float, tokens: float) -> list[str]:
    """In which quantities a prediction extrapolates beyond the fitted runs."""
    points, found = fitted.points, []
    for what, value, seen in (
        ("parameters", params, points.params),
        ("tokens", tokens, points.tokens),
        ("FLOPs", 6 * params * tokens, points.flops),
        ("tokens a parameter", tokens / params, points.tokens / points.params),
    ):
        if value > seen.max() * 1.001:
            found.append(f"{value / seen.max():.3g} times the {what} of any run that was fitted")
        elif value < seen.min() / 1.001:
            found.append(f"{seen.min() / value:.3g} times fewer {what} than any run that was fitted")
    return found


def _shares(laws: Sequence[FittedLaw]) -> Array:
    """The share of each form in an interval: a form with twice the held-out error counts a quarter."""
    scores = np.array([law.held_out for law in laws])
    if np.isnan(scores).any():
        return np.ones(len(laws))
    scores = np.maximum(scores, 1e-12)  # of points without noise
    shares = (scores.min() / scores) ** 2
    return np.where(shares < 0.02, 0.0, shares)


def _objective(law: Law, points: Points, x0: float, y0: float, weights: Array, delta: float) -> Objective:
    """Huber loss of the residuals in log loss, over `delta` so that values are of order one; `weights` may have a row per fit."""
    x, y, target = np.log(points.params) - x0, np.log(points.tokens) - y0, np.log(points.loss)

    def value(theta: Array, rows: np.ndarray) -> tuple[Array, Array]:
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            found, slopes = law.evaluate(theta, x, y)
            residual = found - target
            clipped = np.clip(residual, -delta, delta)
            weight = weights[rows] if weights.ndim == 2 else weights
            total = (weight * clipped * (residual - 0.5 * clipped)).sum(1) / delta
            push = weight * clipped / delta
            gradient = np.stack([(push * slope).sum(1) for slope in slopes], 1)
            if law.exponent is not None:
                off = theta[:, law.exponent] - EXPONENT
                total += SCATTER * (off / SPREAD) ** 2 / 2
                gradient[:, law.exponent] += SCATTER * off / SPREAD**2
        return np.where(np.isfinite(gradient).all(1), total, np.inf), np.nan_to_num(gradient)

    return value


def _solve(law: Law, points: Points, x0: float, y0: float, starts: int, random: np.random.Generator) -> Minima:
    """The optimum from each start: first of a nearly squared loss, whose valley is wide, then of the Huber loss with `DELTA`."""
    level = float(np.log(points.loss).mean())
    at = law.starts(starts, level, random)
    for delta in (0.1, 0.01, DELTA):
        found = minimize(_objective(law, points, x0, y0, np.ones(len(points)), delta), at)
        at = found.at
    return found


def _fit_law(
    law: Law, points: Points, x0: float, y0: float, starts: int, resampled: int, random: np.random.Generator
) -> FittedLaw:
    found = _solve(law, points, x0, y0, starts, random)
    best = int(found.values.argmin())
    agree = int((found.values <= found.values[best] + _AGREE * max(abs(found.values[best]), 1e-9)).sum())
    drawn = np.empty((0, law.size))
    if resampled:
        weights = random.multinomial(len(points), np.full(len(points), 1 / len(points)), resampled).astype(np.float64)
        drawn = minimize(_objective(law, points, x0, y0, weights, DELTA), np.tile(found.at[best], (resampled, 1))).at
    return FittedLaw(law.name, found.at[best], drawn, starts, agree)


def _evaluate(name: str, theta: Array, points: Points, x0: float, y0: float) -> Array:
    return log_loss(name, theta, points.params, points.tokens, x0, y0)


def _kept(points: Points, forms: Sequence[str], x0: float, y0: float, seed: int) -> np.ndarray:
    """Points near the law with the fewest coefficients, which bends least towards outliers; fitted again until all kept points are
    near. The usual outliers are runs too short to leave their warm-up."""
    law = min((LAWS[name] for name in forms), key=lambda each: each.size)
    keep = np.ones(len(points), dtype=bool)
    for _ in range(10):
        chosen = points.chosen(keep)
        found = _solve(law, chosen, x0, y0, 12, np.random.default_rng(seed))
        off = np.abs(np.log(points.loss) - _evaluate(law.name, found.at[[found.values.argmin()]], points, x0, y0)[0])
        new = keep & (off <= LEFT_OUT * max(SCATTER, 1.4826 * float(np.median(off[keep]))))
        if (new == keep).all() or new.sum() <= law.size + 1:
            break
        keep = new
    return keep


def _folds(points: Points) -> list[np.ndarray]:
    """The held-out sets: the largest models, the longest runs for their size, the most compute."""
    found = []
    for value in (points.params, points.tokens / points.params, points.flops):
        # All runs of one value are held out together: the cut lies between two different values.
        ordered = np.unique(value)
        held = None
        for cut in ordered[:0:-1]:
            mask = value >= cut * (1 - 1e-9)
            if mask.mean() > _HELD_OUT and held is not None:
                break
            held = mask
        # From only two model sizes no law can extrapolate to the next.
        if held is not None and held.mean() <= 0.5 and (~held).sum() >= 8 and len(np.unique(points.params[~held])) >= 3:
            found.append(held)
    return found


def _held_out(
    name: str, points: Points, folds: Sequence[np.ndarray], x0: float, y0: float, seed: int
) -> list[tuple[Array, Array]]:
    """For each fold, the errors of log loss and half the width of the interval that should contain them."""
    found = []
    for held in folds:
        rest, tested = points.chosen(~held), points.chosen(held)
        law = _fit_law(LAWS[name], rest, x0, y0, 12, 60, np.random.default_rng(seed))
        best = _evaluate(name, law.theta[None], tested, x0, y0)[0]
        residuals = np.log(rest.loss) - _evaluate(name, law.theta[None], rest, x0, y0)[0]
        drawn = _evaluate(name, law.draws, tested, x0, y0)
        noise = np.random.default_rng(seed).choice(np.concatenate([residuals, -residuals]), drawn.shape)
        low, high = np.quantile(drawn + noise, ENDS, axis=0)
        error = np.log(tested.loss) - best
        found.append((error, np.where(error > 0, np.maximum(high - best, 1e-9), np.maximum(best - low, 1e-9))))
    return found


def _widening(errors: Sequence[tuple[Array, Array]]) -> float:
    """The factor on intervals for which held-out runs lie inside; never below 1."""
    if not errors:
        return 1.0
    return max(1.0, float(np.quantile(np.concatenate([np.abs(error) / width for error, width in errors]), LEVEL)))
