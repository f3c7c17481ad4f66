"""`shardwise train`: trains a run into its folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardwise.run import read_run

HELP = "Train a run. Its folder (runs/NAME, or --out) gets run.toml, metrics.jsonl and checkpoints/; started again, it goes on."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What follows the verb."""
    parser.add_argument("run", help="the run, a TOML file; override it with --section.key=value")
    parser.add_argument("--out", type=Path, help="the run folder (default: runs/NAME)")


def execute(args: argparse.Namespace) -> int:
    """Train."""
    run = read_run(args.run, args.overrides)
    from shardwise.train.loop import train

    train(run, args.out or Path("runs") / run.name)
    return 0
