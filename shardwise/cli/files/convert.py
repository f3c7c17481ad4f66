"""`shardwise convert`: converts weights from a Hugging Face folder to a checkpoint, and back. The conversion streams, so a small
machine converts a model of any size; no pickle is ever loaded."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

HELP = """Convert weights and adapters to and from Hugging Face safetensors."""
DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the directions and their arguments."""
    ways = parser.add_subparsers(dest="way", required=True, metavar="from-hf | to-hf | from-peft | to-peft")
    inward = ways.add_parser("from-hf", help="convert a Hugging Face folder to a checkpoint")
    inward.add_argument("source", metavar="HF_DIR", help="folder with config.json and safetensors files")
    outward = ways.add_parser("to-hf", help="convert a checkpoint, or a run's newest one, to a Hugging Face folder")
    outward.add_argument("source", metavar="CHECKPOINT", help="checkpoint or run folder")
    outward.add_argument("--dtype", choices=DTYPES, help="dtype to write (default: as stored)")
    outward.add_argument("--merge", action="store_true", help="merge a run's adapters into its base weights")
    adapters = ways.add_parser("to-peft", help="convert a run's adapters to a folder for peft")
    adapters.add_argument("source", metavar="RUN_DIR", help="checkpoint or run folder with adapters")
    foreign = ways.add_parser("from-peft", help="convert adapters from peft to a checkpoint")
    foreign.add_argument("source", metavar="DIR", help="folder with adapter_config.json and adapter_model.safetensors")
    foreign.add_argument(
        "--base", default="", help="checkpoint of the base model (default: the folder that the adapters name)"
    )
    for way in (inward, outward, adapters, foreign):
        way.add_argument("out", metavar="OUT_DIR", help="folder to create; must be new or empty")


def execute(args: argparse.Namespace) -> int:
    """Convert, and print a summary."""
    import torch

    from shardwise.checkpoint.huggingface import from_hf, from_peft, to_hf, to_peft
    from shardwise.data.tokenizer import FILE, MARKER
    from shardwise.report import words

    begin = time.perf_counter()
    with _progress() as progress:
        if args.way == "from-hf":
            done = from_hf(args.source, args.out, progress)
        elif args.way == "to-peft":
            done = to_peft(args.source, args.out)
        elif args.way == "from-peft":
            done = from_peft(args.source, args.out, args.base)
        else:
            dtype = getattr(torch, args.dtype) if args.dtype else None
            done = to_hf(args.source, args.out, dtype, progress, merge=args.merge)
    seconds = time.perf_counter() - begin
    print(
        f"{args.out}: {done.architecture}, {done.parameters:,} parameters, {words.size(done.bytes)} in {seconds:.1f} s"
    )
    for note in done.notes:
        print(f"left out: {note}")
    if args.way == "from-hf":
        run = Path(args.out)
        if not any((run / name).is_file() for name in (FILE, MARKER)):
            print(f"left out: a tokenizer, for {args.source} has no {FILE}; transformers makes one, in Python:")
            print(f'  AutoTokenizer.from_pretrained("{args.source}").save_pretrained("{run}")')
        print(f"to train it further, on a set made by `shardwise data build --tokenizer {run}`:")
        print(f"  shardwise train {run / 'run.toml'} --train.weights={run} --data.sets=SET --out runs/{run.name}")
    return 0


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("convert", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
