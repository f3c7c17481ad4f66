"""`shardwise scale`: scaling laws. The verbs below it, each with its arguments; the work is in the files beside this one."""

from __future__ import annotations

import argparse
import importlib

from shardwise.cli.machinery.options import at_least, new_file

HELP = "fit scaling laws to runs, and predict the loss of larger ones"
FORMS = ("auto", "chinchilla", "over-training", "kaplan", "data-constrained", "power")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verbs and their arguments."""
    verbs = parser.add_subparsers(dest="scale_verb", metavar="VERB", required=True)
    _fit(verbs.add_parser("fit", help="fit a law to a CSV file of runs", description=FIT))
    _ladder(verbs.add_parser("ladder", help="small runs that predict a large one", description=LADDER))
    _coordinates(
        verbs.add_parser("coordinates", help="whether learning rates transfer over widths", description=COORDINATES)
    )
    _noise(verbs.add_parser("noise", help="the critical batch from the noise of gradients", description=NOISE))
    _predict(verbs.add_parser("predict", help="the loss of a model, with its interval", description=PREDICT))


FIT = """Fit the loss of runs in their parameters and tokens. A CSV file has columns params, tokens or flops (6 params tokens), one
for the loss. Without --form, two forms are fitted; the one predicts that says best what the largest of the runs reached when these
are held out."""
LADDER = """Write small runs of the kind of a large one, with their batch and learning rate; train them; fit a law to what they
reach, and predict the loss of the large one with an interval."""
COORDINATES = """The coordinate check: train some steps at several widths, and print how far the outputs of each part moved. With
train.parametrization = "mup" the width makes no difference. Exit code 1 where it does."""
NOISE = """Train some steps of a run, then measure the noise of its gradients: the batch beyond which more sequences a step save few
steps (McCandlish et al. 2018), beside what the Step law says."""
PREDICT = """What loss a fit expects of a model, and the interval that 90% of such runs should lie in."""


def _fit(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(module="shardwise.cli.scale.laws", function="fit")
    parser.add_argument("data", nargs="+", metavar="DATA", help="a CSV file of runs that were made, or run folders")
    parser.add_argument(
        "--loss", default="", metavar="COLUMN", help="the column of the loss; of run folders, the metric (eval_loss)"
    )
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


def _ladder(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(module="shardwise.cli.scale.ladder", function="ladder")
    parser.add_argument("run", help="the run to predict, a TOML file")
    parser.add_argument(
        "--budget",
        type=at_least(1e-9, float),
        default=0.1,
        help="FLOPs of all rungs; up to 1: a share of the run's (0.1)",
    )
    parser.add_argument("--rungs", type=at_least(4), default=5, help="how many (5)")
    parser.add_argument("--out", metavar="DIR", help="folder for the runs (runs/NAME-ladder)")
    parser.add_argument(
        "--train", action="store_true", help="train them here, one after another; started again, it resumes"
    )
    parser.add_argument("--slurm", action="store_true", help="write them as an array for sbatch")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _coordinates(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(module="shardwise.cli.scale.coordinates", function="coordinates")
    parser.add_argument("run", nargs="?", help="the run, a TOML file")
    parser.add_argument("--widths", default="64,128,256,512,1024", metavar="W,W,…", help="hidden sizes (64 to 1024)")
    parser.add_argument("--steps", type=at_least(1), default=10, help="to train at each (10)")
    parser.add_argument("--seeds", type=at_least(1), default=2, help="to take the mean of (2)")
    _pictures(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _noise(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(module="shardwise.cli.scale.noise", function="noise")
    parser.add_argument("run", nargs="?", help="the run, a TOML file")
    parser.add_argument("--steps", type=at_least(0), default=100, help="to train before (100)")
    parser.add_argument("--draws", type=at_least(2), default=16, help="gradients of a whole batch (16)")
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
    parser.add_argument(
        "--unique-tokens",
        type=at_least(1, float),
        metavar="U",
        help="of these, distinct ones: the data is passed over again (all)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def execute(args: argparse.Namespace) -> int:
    """Run the verb."""
    return getattr(importlib.import_module(args.module), args.function)(args)
