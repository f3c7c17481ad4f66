"""`shardwise scale fit` and `predict`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.cli.machinery.options import write_file
from shardwise.cli.machinery.terminal import progress_line
from shardwise.report import words
from shardwise.report.terminal import Console
from shardwise.report.terminal_scale import print_fit
from shardwise.run.problems import Problem, UserError, counted
from shardwise.scale.fit import LEVEL, Fit, warnings
from shardwise.scale.fit import fit as fit_points
from shardwise.scale.fit import predict as predict_loss
from shardwise.scale.points import Points, read_csv
from shardwise.scale.repeat import Repeats, effective, fit_repeats
from shardwise.scale.runs import is_run_folder, read_runs
from shardwise.scale.store import from_json, to_json


def fit(args: argparse.Namespace) -> int:
    """Fit a law, write it and print it."""
    points = _points(args)
    repeats = None
    forms = _forms(points) if args.form == "auto" else (args.form,)
    with progress_line() as tell:
        if args.form == "data-constrained":
            fitted, repeats = fit_repeats(points, args.seed)
        else:
            fitted = fit_points(points, forms, args.starts, args.resampled, args.seed, tell)
    source = dict(files=args.data, loss=args.loss, where=args.where)
    found = to_json(fitted, source) | dict(repeats=asdict(repeats) if repeats else None)
    if args.out:
        write_file(args.out, json.dumps(found, indent=1).encode() + b"\n")
    written = [args.out] if args.out else []
    if args.svg or args.html or args.plot:
        from shardwise.cli.scale.pictures import plots_of, write_pictures

        written += write_pictures(args, f"Scaling law of {', '.join(args.data[:3])}", plots_of(fitted))
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
            "best_size_exponent",
            "repeats",
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
    fitted, stored = from_json(args.fit)
    found = predict_loss(fitted, *_worth(fitted, stored, args))
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


def _worth(fitted: Fit, stored: dict[str, Any], args: argparse.Namespace) -> tuple[float, float]:
    """Parameters and tokens, or their effective values if tokens are repeated."""
    if not args.unique_tokens or args.unique_tokens >= args.tokens:
        return args.params, args.tokens
    repeats = Repeats(**stored["repeats"]) if stored.get("repeats") else Repeats()
    size, seen, unique = (np.array([value]) for value in (args.params, args.tokens, args.unique_tokens))
    params, tokens = effective(fitted, size, seen, unique, repeats)
    return float(params[0]), float(tokens[0])


def _points(args: argparse.Namespace) -> Points:
    """The points of one CSV file, or of run folders."""
    if absent := [path for path in args.data if not Path(path).exists()]:
        raise UserError(*(Problem("there is no such file or folder", where=path) for path in absent))
    if all(is_run_folder(path) for path in args.data):
        return read_runs(args.data, args.loss or "eval_loss")
    if len(args.data) > 1:
        others = [path for path in args.data if not is_run_folder(path)]
        raise UserError(
            *(Problem("is no folder of `shardwise train`; a CSV file is given alone", where=path) for path in others)
        )
    if not args.loss:
        raise UserError(Problem("name the column of the loss", "--loss", "command line"))
    return read_csv(args.data[0], args.loss, _where(args.where), args.params)


def _forms(points: Points) -> tuple[str, ...]:
    """Forms to fit. Runs with one ratio of tokens to parameters cannot separate the two, so a single power of both is fitted."""
    ratio = points.tokens / points.params
    return ("power",) if ratio.max() < 1.1 * ratio.min() else ("chinchilla", "over-training")


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
