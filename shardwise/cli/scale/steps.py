"""`shardwise scale coordinates` and `noise`: train some steps, to check whether learning rates transfer over widths, or to measure
the critical batch."""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING

from shardwise.cli.machinery.terminal import progress_line
from shardwise.cli.scale.pictures import write_pictures
from shardwise.report import colors, words
from shardwise.report.plot import Plot, Series
from shardwise.run import Problem, UserError, read_run
from shardwise.scale.published import step_law
from shardwise.scale.runs import count

if TYPE_CHECKING:
    from shardwise.measure.coordinates import Coordinates

FLAT = 0.05
"""A smaller slope counts as zero."""


def coordinates(args: argparse.Namespace) -> int:
    """Measure and print; exit code 1 if the residual stream or the logits depend on the width."""
    from shardwise.measure.coordinates import coordinates as measure

    try:
        widths = sorted({int(width) for width in args.widths.split(",")})
    except ValueError:
        raise UserError(
            Problem(f'"{args.widths}" is not a list such as 64,128,256', "--widths", "command line")
        ) from None
    if len(widths) < 2 or widths[0] < 1:
        raise UserError(Problem("two widths at least are compared", "--widths", "command line"))
    run = read_run(args.run, args.overrides)
    with progress_line() as tell:
        found = measure(run, widths, args.steps, args.seeds, tell)
    slopes = found.slopes
    worst = max(abs(slope) for name, slope in slopes.items() if not name.endswith((".attention", ".ffn")))
    title, plots = "Coordinate check", [_plot(found, run.train.parametrization)]
    if args.json:
        write_pictures(args, title, plots)
        figures = dict(widths=found.widths, changes=found.changes, slopes=slopes, worst=worst)
        print(json.dumps(figures | dict(parametrization=run.train.parametrization)))
        return 0 if worst < FLAT else 1
    print(f"change of outputs after {args.steps} steps, parametrization {run.train.parametrization}")
    name_width = max(map(len, slopes))
    print(f"{'':<{name_width}}  {'slope':>7}  " + "  ".join(f"{width:>8,}" for width in found.widths))
    for name, values in found.changes.items():
        print(f"{name:<{name_width}}  {slopes[name]:>+7.3f}  " + "  ".join(f"{value:>8.3g}" for value in values))
    said = "does not depend" if worst < FLAT else "depends"
    print(f"what the stream and the logits learn {said} on the width: the largest slope is {worst:.3f}")
    for path in write_pictures(args, title, plots):
        print(f"wrote {path}")
    return 0 if worst < FLAT else 1


def _plot(found: Coordinates, parametrization: str) -> Plot:
    lines = []
    for at, (name, values) in enumerate(found.changes.items()):
        color = colors.ramp(at / max(1, len(found.changes) - 1))
        points = [(float(width), value) for width, value in zip(found.widths, values, strict=True)]
        lines += [Series(name, points, color), Series(name, points, color, joined=False)]
    title = f"Coordinate check, {parametrization}"
    return Plot(title, "width", "change of outputs", lines, log_y=True, words_x=words.count)


def noise(args: argparse.Namespace) -> int:
    """Measure and print the critical batch."""
    from shardwise.measure.noise import measure_noise

    run = read_run(args.run, args.overrides)
    with progress_line() as tell:
        found = measure_noise(run, args.steps, args.draws, tell=tell)
    rate, batch = step_law(float(count(run)), float(run.train.steps * run.batch_tokens))
    known = math.isfinite(found.critical_batch) and found.critical_batch > 0
    if args.json:
        values = dict(
            step=found.step, loss=found.loss if math.isfinite(found.loss) else None, signal=found.signal, variance=found.variance,
            critical_batch_tokens=found.critical_batch if known else None, batch_tokens=run.batch_tokens,
            step_law_batch_tokens=batch, step_law_lr=rate,
        )  # fmt: skip
        print(json.dumps(values))
        return 0
    if known:
        print(f"critical batch after {found.step} steps: {words.count(round(found.critical_batch))} tokens")
    else:
        print(f"after {found.step} steps the noise hides the gradient: give more --draws or a larger batch")
    by_law = f"by the Step law {words.count(round(batch))}, with lr {rate:.2g}"
    print(f"the run's batch: {words.count(run.batch_tokens)} tokens; {by_law}")
    return 0
