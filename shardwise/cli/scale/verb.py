"""`shardwise scale`: scaling laws. Declares its verbs and their arguments; the files beside this one do the work."""

from __future__ import annotations

import argparse
import importlib

from shardwise.cli.machinery.options import at_least, new_file

HELP = """Fit scaling laws to runs, and predict the loss of larger ones."""
FORMS = ("auto", "chinchilla", "over-training", "kaplan", "data-constrained", "power")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verbs and their arguments."""
    verbs = parser.add_subparsers(dest="scale_verb", metavar="VERB", required=True)
    _fit(verbs.add_parser("fit", help="fit a law to finished runs", description=FIT))
    _ladder(verbs.add_parser("ladder", help="write and train small runs that predict a large one", description=LADDER))
    _coordinates(
        verbs.add_parser(
            "coordinates", help="check whether learning rates transfer over widths", description=COORDINATES
        )
    )
    _noise(verbs.add_parser("noise", help="measure the critical batch from gradient noise", description=NOISE))
    _predict(verbs.add_parser("predict", help="predict the loss of a model, with an interval", description=PREDICT))


FIT = """Fit the loss of runs as a function of parameters and tokens. A CSV file needs the columns params, tokens or flops (6
params tokens), and one for the loss. Without --form two forms are fitted; the one that better predicts the largest runs, held
out, is used."""
LADDER = """Write small versions of a large run, with their batch and learning rate, and train them. Then fit a law to their
losses, and predict the loss of the large run with an interval."""
COORDINATES = """The coordinate check: train some steps at several widths, and print how far the outputs of each part moved. With
train.parametrization = "mup" they do not depend on the width. Exit code 1 if they do."""
NOISE = """Train some steps of a run, then measure the gradient noise scale: the batch beyond which more sequences a step save few
steps (McCandlish et al. 2018). The Step law's batch is printed beside it."""
PREDICT = """Predict the loss of a model with a fit, and the interval in which 90% of such runs should lie."""


def _fit(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(module="shardwise.cli.scale.laws", function="fit")
    parser.add_argument("data", nargs="+", metavar="DATA", help="a CSV file of finished runs, or run folders")
    parser.add_argument(
        "--loss", default="", metavar="COLUMN", help="column of the loss; for run folders, the metric (eval_loss)"
    )
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="COLUMN=VALUE",
        help="only rows with this value; may be repeated",
    )
    parser.add_argument("--params", default="params", metavar="COLUMN", help="the column of parameters (params)")
    parser.add_argument("--form", choices=FORMS, default="auto", help="form of the law (auto: the better of two)")
    parser.add_argument("--starts", type=at_least(1), default=100, help="random starting points (100)")
    parser.add_argument("--resampled", type=at_least(20), default=200, help="bootstrap samples of the points (200)")
    parser.add_argument("--seed", type=at_least(0), default=0, help="seed of starts and resampling (0)")
    parser.add_argument("--out", type=new_file, metavar="FIT.json", help="write the fit, for predict and budget")
    _pictures(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _ladder(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(module="shardwise.cli.scale.ladder", function="ladder")
    parser.add_argument("run", help="the run to predict, a TOML file")
    parser.add_argument(
        "--budget",
        type=at_least(1e-9, float),
        default=0.1,
        help="FLOPs of all small runs; up to 1: as a share of the large run (0.1)",
    )
    parser.add_argument("--rungs", type=at_least(4), default=5, help="number of small runs (5)")
    parser.add_argument("--out", metavar="DIR", help="folder for the runs (runs/NAME-ladder)")
    parser.add_argument(
        "--train", action="store_true", help="train them here, one after another; the same command resumes"
    )
    parser.add_argument("--slurm", action="store_true", help="write them as an array for sbatch")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _coordinates(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(module="shardwise.cli.scale.steps", function="coordinates")
    parser.add_argument("run", nargs="?", help="the run, a TOML file")
    parser.add_argument("--widths", default="64,128,256,512,1024", metavar="W,W,…", help="hidden sizes (64 to 1024)")
    parser.add_argument("--steps", type=at_least(1), default=10, help="steps to train at each width (10)")
    parser.add_argument("--seeds", type=at_least(1), default=2, help="seeds to average over (2)")
    _pictures(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _noise(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(module="shardwise.cli.scale.steps", function="noise")
    parser.add_argument("run", nargs="?", help="the run, a TOML file")
    parser.add_argument("--steps", type=at_least(0), default=100, help="steps to train before measuring (100)")
    parser.add_argument("--draws", type=at_least(2), default=16, help="batches to measure (16)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _pictures(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plot", action="store_true", help="draw the pictures on the terminal")
    parser.add_argument("--svg", type=new_file, metavar="FILE", help="write the pictures")
    parser.add_argument("--html", type=new_file, metavar="FILE", help="write a page with the pictures")


def _predict(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(module="shardwise.cli.scale.laws", function="predict")
    parser.add_argument("fit", metavar="FIT.json", help="a file written by `shardwise scale fit`")
    parser.add_argument("--params", required=True, type=at_least(1, float), metavar="N", help="parameters of the model")
    parser.add_argument("--tokens", required=True, type=at_least(1, float), metavar="D", help="tokens it is trained on")
    parser.add_argument(
        "--unique-tokens",
        type=at_least(1, float),
        metavar="U",
        help="distinct tokens among these; fewer means repeated data (all)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def execute(args: argparse.Namespace) -> int:
    """Run the verb."""
    return getattr(importlib.import_module(args.module), args.function)(args)
