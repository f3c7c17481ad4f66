"""`shardwise scale fit` and `predict`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from shardwise.cli.machinery.options import write_file
from shardwise.cli.machinery.progress import told
from shardwise.report import words
from shardwise.report.terminal import Console
from shardwise.report.terminal_scale import print_fit
from shardwise.run.problems import Problem, UserError, counted
from shardwise.scale.fit import LEVEL, warnings
from shardwise.scale.fit import fit as fit_points
from shardwise.scale.fit import predict as predict_loss
from shardwise.scale.points import read_csv
from shardwise.scale.store import from_json, to_json


def fit(args: argparse.Namespace) -> int:
    """Fit, write, print."""
    points = read_csv(args.data, args.loss, _where(args.where), args.params)
    forms = ("chinchilla", "over-training") if args.form == "auto" else (args.form,)
    with told() as tell:
        fitted = fit_points(points, forms, args.starts, args.resampled, args.seed, tell)
    source = dict(file=str(args.data), loss=args.loss, where=args.where)
    found = to_json(fitted, source)
    if args.out:
        write_file(args.out, json.dumps(found, indent=1).encode() + b"\n")
    written = [args.out] if args.out else []
    if args.svg or args.html or args.plot:
        from shardwise.cli.scale.pictures import plots_of, write_pictures

        written += write_pictures(args, f"Scaling law of {args.data}", plots_of(fitted))
    if args.json:
        kept = (
            "source",
            "form",
            "formula",
            "coefficients",
            "intervals",
            "level",
            "count",
            "left_out",
            "notes",
            "residual",
            "forms",
        )
        print(json.dumps({key: found[key] for key in kept}))
    else:
        print_fit(Console(highlight=False), found)
        for path in written:
            print(f"wrote {path}")
    return 0


def predict(args: argparse.Namespace) -> int:
    """Print the loss and its interval."""
    fitted, _ = from_json(args.fit)
    found = predict_loss(fitted, args.params, args.tokens)
    beyond = warnings(fitted, args.params, args.tokens)
    if args.json:
        values: dict[str, Any] = dict(
            loss=found.loss, low=found.low, high=found.high, level=LEVEL, form=fitted.law.name, params=args.params,
            tokens=args.tokens, warnings=beyond,
        )  # fmt: skip
        print(json.dumps(values))
        return 0
    print(f"loss {found.loss:.4f}, {words.percent(LEVEL)} between {found.low:.4f} and {found.high:.4f}")
    print(f"by {fitted.law.name}, fitted to {counted(len(fitted.points), 'run')}")
    for each in beyond:
        print(f"beyond the runs: {each}")
    return 0


def _where(given: Sequence[str]) -> dict[str, str]:
    found, problems = {}, []
    for text in given:
        column, equals, value = text.partition("=")
        if not equals or not column:
            problems.append(Problem(f'"{text}" is not COLUMN=VALUE', "--where", "command line"))
        found[column.strip()] = value.strip()
    if problems:
        raise UserError(*problems)
    return found
