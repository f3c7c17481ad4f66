"""A fit as a file: the fitted laws and their points, so that it can predict later and elsewhere."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.run.problems import Problem, UserError, unreadable
from shardwise.scale.approaches import approaches
from shardwise.scale.fit import LEVEL, Fit, FittedLaw, Interval
from shardwise.scale.laws import LAWS, log_loss
from shardwise.scale.minimize import Array
from shardwise.scale.points import Points, make_points

VERSION = 1


def coefficients(fitted: Fit, law: FittedLaw) -> dict[str, dict[str, float]]:
    """Each coefficient as the paper writes it, with its interval over resampled points."""
    best = LAWS[law.name].coefficients(law.theta.tolist(), fitted.x0, fitted.y0)
    drawn = [LAWS[law.name].coefficients(row.tolist(), fitted.x0, fitted.y0) for row in law.draws]
    return {name: asdict(Interval.of(value, [each[name] for each in drawn])) for name, value in best.items()}


def to_json(fitted: Fit, source: dict[str, Any]) -> dict[str, Any]:
    """The whole fit; `coefficients` and `intervals` are for people and programs, predictions use `laws`."""
    best = coefficients(fitted, fitted.law)
    return dict(
        version=VERSION, source=source, form=fitted.law.name, formula=LAWS[fitted.law.name].sentence,
        coefficients={name: each["value"] for name, each in best.items()},
        intervals={name: [each["low"], each["high"]] for name, each in best.items()},
        level=LEVEL, count=len(fitted.points), left_out=list(fitted.left_out.names), notes=fitted.notes,
        residual=float(np.median(np.abs(fitted.residuals))), widening=fitted.widening,
        best_size_exponent={name: asdict(each) for name, each in approaches(fitted).items()},
        forms={law.name: _law_for_people(fitted, law) for law in fitted.laws},
        middle=[fitted.x0, fitted.y0],
        laws=[dict(name=law.name, theta=law.theta.tolist(), draws=law.draws.tolist()) for law in fitted.laws],
        points=_points_out(fitted.points), points_left_out=_points_out(fitted.left_out),
    )  # fmt: skip


def from_json(path: str | Path) -> tuple[Fit, dict[str, Any]]:
    """The fit in a file, and the file's whole content."""
    place = str(path)
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        if found["version"] != VERSION:
            raise UserError(
                Problem(f"is of version {found['version']}; this program reads {VERSION}: fit again", where=place)
            )
        x0, y0 = map(float, found["middle"])
        laws = [_law_in(each, found["forms"]) for each in found["laws"]]
        points, left_out = _points_in(found["points"]), _points_in(found["points_left_out"])
        best = laws[0]
        residuals = np.log(points.loss) - log_loss(best.name, best.theta, points.params, points.tokens, x0, y0)[0]
        fitted = Fit(laws, points, left_out, x0, y0, residuals, float(found["widening"]), list(found["notes"]))
    except OSError as e:
        raise unreadable(e, where=place) from None
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError):
        raise UserError(Problem("is not a fit: `shardwise scale fit` writes one", where=place)) from None
    return fitted, found


def _law_for_people(fitted: Fit, law: FittedLaw) -> dict[str, Any]:
    error = None if math.isnan(law.held_out) else law.held_out
    return dict(
        coefficients=coefficients(fitted, law), held_out_error=error, starts=law.starts, starts_at_the_optimum=law.agree
    )  # fmt: skip


def _law_in(each: dict[str, Any], forms: dict[str, Any]) -> FittedLaw:
    form = forms[each["name"]]
    size = LAWS[each["name"]].size
    theta, draws = _array(each["theta"]), _array(each["draws"]).reshape(-1, size)
    if theta.shape != (size,):
        raise ValueError
    error = form["held_out_error"]
    return FittedLaw(
        each["name"], theta, draws, form["starts"], form["starts_at_the_optimum"], math.nan if error is None else float(error)
    )  # fmt: skip


def _array(values: Any) -> Array:
    found = np.array(values, dtype=np.float64)
    if not np.isfinite(found).all():
        raise ValueError
    return found


def _points_out(points: Points) -> dict[str, Any]:
    return dict(
        names=list(points.names), params=points.params.tolist(), tokens=points.tokens.tolist(), loss=points.loss.tolist(),
        unique_tokens=points.unique.tolist(),
    )  # fmt: skip


def _points_in(found: dict[str, Any]) -> Points:
    params, tokens, loss, unique = (_array(found[key]) for key in ("params", "tokens", "loss", "unique_tokens"))
    return make_points(params, tokens, loss, found["names"], unique)
