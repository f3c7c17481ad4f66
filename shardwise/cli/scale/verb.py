"""`shardwise scale`: scaling laws. The verbs below it, each with its arguments; the work is in the files beside this one."""

from __future__ import annotations

import argparse
import importlib

from shardwise.cli.machinery.options import at_least, new_file

HELP = "fit scaling laws to runs, and predict the loss of larger ones"
FORMS = ("auto", "chinchilla", "over-training", "kaplan")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verbs and their arguments."""
    verbs = parser.add_subparsers(dest="scale_verb", metavar="VERB", required=True)
    _fit(verbs.add_parser("fit", help="fit a law to a CSV file of runs", description=FIT))
    _predict(verbs.add_parser("predict", help="the loss of a model, with its interval", description=PREDICT))


FIT = """Fit the loss of runs in their parameters and tokens. A CSV file has columns params, tokens or flops (6 params tokens), one
for the loss. Without --form, two forms are fitted; the one predicts that says best what the largest of the runs reached when these
are held out."""
PREDICT = """What loss a fit expects of a model, and the interval that 90% of such runs should lie in."""


def _fit(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(module="shardwise.cli.scale.laws", function="fit")
    parser.add_argument("data", metavar="DATA.csv", help="runs that were made")
    parser.add_argument("--loss", required=True, metavar="COLUMN", help="the column of the loss")
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="COLUMN=VALUE",
        help="only rows with this value; may be repeated",
    )
    parser.add_argument("--params", default="params", metavar="COLUMN", help="the column of parameters (params)")
    parser.add_argument("--form", choices=FORMS, default="auto", help="of the law (auto: the better of two)")
    parser.add_argument("--starts", type=at_least(1), default=100, help="random places to begin at (100)")
    parser.add_argument("--resampled", type=at_least(20), default=200, help="sets of resampled points (200)")
    parser.add_argument("--seed", type=at_least(0), default=0, help="of starts and resampling (0)")
    parser.add_argument("--out", type=new_file, metavar="FIT.json", help="write the fit, for predict and budget")
    _pictures(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _pictures(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plot", action="store_true", help="draw the pictures on the terminal")
    parser.add_argument("--svg", type=new_file, metavar="FILE", help="write the pictures")
    parser.add_argument("--html", type=new_file, metavar="FILE", help="write a page with the pictures")


def _predict(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(module="shardwise.cli.scale.laws", function="predict")
    parser.add_argument("fit", metavar="FIT.json", help="what `shardwise scale fit` wrote")
    parser.add_argument("--params", required=True, type=at_least(1, float), metavar="N", help="parameters of the model")
    parser.add_argument("--tokens", required=True, type=at_least(1, float), metavar="D", help="tokens it is trained on")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def execute(args: argparse.Namespace) -> int:
    """Run the verb."""
    return getattr(importlib.import_module(args.module), args.function)(args)
