"""Plots of a fit: on the terminal, in a page, or as an SVG file."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from shardwise.cli.machinery.options import write_file
from shardwise.report import colors, html, words
from shardwise.report.plot import Plot, Series, letters, svg
from shardwise.scale.pictures import envelope, iso_flops, residuals

if TYPE_CHECKING:
    from shardwise.scale.fit import Fit


def plots_of(fitted: Fit) -> list[Plot]:
    """IsoFLOP curves, the envelope, residuals."""
    curves: list[Series] = []
    found = iso_flops(fitted)
    for at, each in enumerate(found):
        color, name = colors.ramp(at / max(1, len(found) - 1)), words.flops(each["flops"])
        curves.append(Series(name, each["line"], color))
        curves.append(Series(name, each["points"], color, joined=False, tips=each["tips"]))
    (best,), (off,) = envelope(fitted), residuals(fitted)
    blue, red = colors.CATEGORY["matmul"], colors.CATEGORY["tensor"]
    return [
        Plot("Loss of equal compute by size", "parameters", "loss", curves),
        Plot(
            "The best loss by compute, 90% interval", "FLOPs", "loss",
            [Series("the best size", best["line"], blue, band=best["band"]),
             Series("runs", best["points"], red, joined=False, tips=best["tips"])], words_x=_power,
        ),
        Plot(
            "Residuals, 90% interval", "FLOPs", "% of the loss",
            [Series("the law", off["line"], blue, band=off["band"]),
             Series("runs", off["points"], red, joined=False, tips=off["tips"])], words_x=_power,
        ),
    ]  # fmt: skip


def _power(value: float) -> str:
    return f"{value:.0e}".replace("e+", "e")


def write_pictures(args: argparse.Namespace, title: str, plots: list[Plot]) -> list[str]:
    """Write the requested files, and print text plots for `--plot` unless JSON is printed; returns the files."""
    written = []
    if args.svg:
        write_file(args.svg, svg(plots).encode())
        written.append(args.svg)
    if args.html:
        sections = [
            html.Section(plot.title, f"{plot.y} over {plot.x}", f'<div class="keep">{svg([plot])}</div>')
            for plot in plots
        ]
        write_file(args.html, html.page(title, sections).encode())
        written.append(args.html)
    if args.plot and not args.json:
        for plot in plots:
            print("\n".join(["", *letters(plot)]))
    return written
