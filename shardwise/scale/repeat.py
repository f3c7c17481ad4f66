"""The value of data that is repeated for several epochs (Muennighoff et al. 2023, eq. 5 to 7).

Repeated tokens count less with every epoch, and so do parameters beyond the best size for the distinct tokens: both decay
exponentially, with R_D and R_N the repetitions after which little is gained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from shardwise.run.problems import UserError
from shardwise.scale.fit import Fit, fit
from shardwise.scale.laws import LAWS
from shardwise.scale.minimize import Array
from shardwise.scale.points import Points

PUBLISHED = (15.39, 5.31)
"""R_D and R_N of the paper, fitted to C4 with Chinchilla's form (appendix A)."""
_GRID, _ROUNDS = 13, 9
_BOUNDS = (math.log(0.3), math.log(300.0))


@dataclass(frozen=True)
class Repeats:
    """The decay constants of repeated data (R_D) and of excess parameters (R_N)."""

    data: float = PUBLISHED[0]
    params: float = PUBLISHED[1]


def effective(fitted: Fit, params: Array, tokens: Array, unique: Array, repeats: Repeats) -> tuple[Array, Array]:
    """The parameters and the fresh tokens that would reach the same loss."""
    coefficients = LAWS[fitted.law.name].coefficients(fitted.law.theta.tolist(), fitted.x0, fitted.y0)
    if not {"A", "B", "alpha", "beta"} <= set(coefficients):
        raise UserError(f"repeated data needs a law with a term for data; {fitted.law.name} has none")
    a, b, alpha, beta = (coefficients[key] for key in ("A", "B", "alpha", "beta"))
    own = np.minimum(unique, tokens)
    # The best size for the distinct tokens: where the derivatives by log N and log D are equal.
    fed = (alpha * a / (beta * b)) ** (1 / alpha) * own ** (beta / alpha)
    fed = np.minimum(fed, params)
    again, excess = tokens / own - 1, params / fed - 1
    worth = own * (1 + repeats.data * -np.expm1(-again / repeats.data))
    return fed * (1 + repeats.params * -np.expm1(-excess / repeats.params)), np.where(again > 1e-9, worth, tokens)


def fit_repeats(points: Points, seed: int = 0) -> tuple[Fit, Repeats]:
    """Fits the law to the runs that saw their data once, then the decay of repeats to the others: on a grid that is refined, with
    the Huber loss as in every fit here."""
    once = points.tokens <= points.unique * 1.01
    if (~once).sum() < 3:
        raise UserError("fewer than 3 runs repeat their data (unique_tokens below tokens): its worth cannot be fitted")
    base = fit(points.chosen(once), seed=seed)
    rest = points.chosen(~once)
    law = LAWS[base.law.name]
    centre, width = np.array([math.log(each) for each in PUBLISHED]), (_BOUNDS[1] - _BOUNDS[0]) / 2
    for _ in range(_ROUNDS):
        data, params = (np.clip(np.linspace(at - width, at + width, _GRID), *_BOUNDS) for at in centre)
        best = (math.inf, 0.0, 0.0)
        for r_d in data:
            for r_n in params:
                n, d = effective(base, rest.params, rest.tokens, rest.unique, Repeats(math.exp(r_d), math.exp(r_n)))
                x, y = np.log(n) - base.x0, np.log(d) - base.y0
                off = law.evaluate(base.law.theta[None], x, y, slope=False)[0][0] - np.log(rest.loss)
                clipped = np.clip(off, -1e-3, 1e-3)
                best = min(best, (float((clipped * (off - 0.5 * clipped)).sum()), float(r_d), float(r_n)))
        centre, width = np.array(best[1:]), width / 2.5
    return base, Repeats(math.exp(centre[0]), math.exp(centre[1]))
