"""`shardwise quantize`: turns a checkpoint into a folder with 8-bit or 4-bit weights."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.cli.machinery.options import at_least
from shardwise.run.problems import Problem, UserError

if TYPE_CHECKING:
    from shardwise.quantize.layers import Method

HELP = """Round the matrices of a checkpoint, or of the newest one of a run folder, to 8 or 4 bits. Writes a Hugging Face folder
in the compressed-tensors format, which `shardwise serve`, vLLM and transformers read. Prints the perplexity before and after."""
WEIGHTS = ("fp8", "int8", "int4")
METHODS = ("round", "gptq", "awq", "smoothquant")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="a checkpoint or a run folder")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to create; must be new or empty")
    parser.add_argument("--weights", choices=WEIGHTS, required=True, help="format of the matrices")
    methods = (
        "round to nearest, GPTQ, AWQ, or SmoothQuant, which rounds inputs too (default: round for int8, else gptq)"
    )
    parser.add_argument("--method", choices=METHODS, help=methods)
    data = "calibration data: a set of tokens (`shardwise data build`) or a file of text (default: the run's data)"
    parser.add_argument("--set", dest="data", metavar="DATA", type=Path, help=data)
    parser.add_argument("--sequences", type=at_least(1), default=128, help="sequences to calibrate on (128)")
    parser.add_argument(
        "--eval-sequences", type=at_least(1), default=64, help="sequences to measure the perplexity on (64)"
    )
    parser.add_argument(
        "--weight-only", action="store_true", help="fp8: inputs stay in 16 bits, as int8's and int4's do"
    )
    parser.add_argument("--group", type=at_least(8), default=128, help="int4: weights that share a scale (128)")
    parser.add_argument("--symmetric", action="store_true", help="int4: no zero points")
    parser.add_argument("--act-order", action="store_true", help="gptq: columns with the largest inputs first")
    parser.add_argument("--damping", type=at_least(0, float), default=0.01, help="gptq: damping of the Hessian (0.01)")
    parser.add_argument("--alpha", type=at_least(0, float), default=0.5, help="smoothquant: migration strength (0.5)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def execute(args: argparse.Namespace) -> int:
    """Quantise, and print a summary."""
    method: Method = args.method or ("round" if args.weights == "int8" else "gptq")
    problems = []
    if method == "smoothquant" and args.weights == "int4":
        problems.append(
            Problem("is for weights and inputs of 8 bits; int4 has gptq and awq", "--method", "command line")
        )
    if method == "smoothquant" and args.weight_only:
        problems.append(
            Problem("moves the range of inputs that are rounded; --weight-only rounds none", "--method", "command line")
        )
    if args.group % 8:
        problems.append(Problem(f"{args.group} is no multiple of 8", "--group", "command line"))
    if args.alpha > 1:
        problems.append(Problem(f"{args.alpha} is above 1", "--alpha", "command line"))
    if problems:
        raise UserError(*problems)

    from dataclasses import replace

    from shardwise.cli.machinery.terminal import progress_line
    from shardwise.quantize.layers import Settings
    from shardwise.quantize.quantize import quantize_checkpoint
    from shardwise.report import words
    from shardwise.run.weights import QUANTIZED, SMOOTHED

    form = QUANTIZED[args.weights]
    if args.weights == "int4":
        form = replace(form, group=args.group, zeros=not args.symmetric)
    elif method == "smoothquant" and args.weights == "int8":
        form = SMOOTHED
    if args.weight_only:
        form = replace(form, activations="")
    settings = Settings(form, method, args.damping, args.act_order, args.alpha)
    with progress_line() as tell:
        done = quantize_checkpoint(
            args.checkpoint, args.out, settings, args.data, args.sequences, args.eval_sequences, args.device,
            args.overrides, tell,
        )  # fmt: skip
    if args.json:
        found = dict(
            out=str(args.out), weights=args.weights, method=method, bytes_before=done.bytes_before,
            bytes_after=done.bytes_after, perplexity_before=done.perplexity_before,
            perplexity_after=done.perplexity_after, notes=done.notes,
        )  # fmt: skip
        print(json.dumps(found))
        return 0
    print(f"{args.out}: {args.weights} by {method}, {words.size(done.bytes_before)} to {words.size(done.bytes_after)}")
    print(f"perplexity {done.perplexity_before:.4f} to {done.perplexity_after:.4f} ({100 * done.change:+.2f}%)")
    for note in done.notes:
        print(note)
    return 0
