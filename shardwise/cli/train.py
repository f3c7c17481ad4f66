"""`shardwise train`: trains a run into its folder, on as many ranks as its layout needs."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from shardwise.hardware.chips import unknown_chip
from shardwise.run import read_run

HELP = (
    "Train a run. Its folder (runs/NAME, or --out) gets run.toml, metrics.jsonl and checkpoints/; started again, it resumes. "
    "A layout of several ranks is started on this machine, unless torchrun or Slurm started them. On SIGTERM, SIGUSR1 or Ctrl-C "
    "it saves a checkpoint and ends with exit code 75: start it again to resume."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What follows the verb."""
    parser.add_argument("run", help="the run, a TOML file; override it with --section.key=value")
    parser.add_argument("--out", type=Path, help="the run folder (default: runs/NAME)")


def execute(args: argparse.Namespace) -> int:
    """Train."""
    from shardwise.train.faults.replan import fit, settle

    # Before PyTorch is imported, which takes a while.
    run = settle(read_run(args.run, args.overrides, (unknown_chip,)), args.overrides)
    from shardwise.train import launch
    from shardwise.train.faults.ranks import free_port
    from shardwise.train.faults.stop import PREEMPTED, Preempted
    from shardwise.train.loop import check, train

    out = args.out or Path("runs") / run.name
    where = launch.place(os.environ)
    if where is not None and run.train.elastic:
        run = fit(run, where.world, max(1, where.world // where.local_world), launch.chip_here(run))
    launch.check_here(run, where)
    if where is None and run.layout.world == 1 and run.layout.offload:
        # Offload is a kind of sharding, which needs a process group, be it of one rank.
        where = launch.Place(0, 1, 0, "127.0.0.1", free_port())
    if where is None and run.layout.world > 1:
        check(run, out)
        overrides = [f"--{override}" for override in args.overrides]
        return launch.start_ranks(run, out, ["train", args.run, "--out", str(out), *overrides])
    if where is not None and (where.world > 1 or run.layout.offload):
        launch.join(where, run)
    try:
        train(run, out, watched=where is not None and where.watched)
    except Preempted as stop:
        print(stop, file=sys.stderr)
        return PREEMPTED
    except OSError as e:
        if where is None or not where.watched:
            raise
        # A full disk or a lost mount may pass, so the run is restarted; a user's mistake was found before.
        print(f"error: {e}", file=sys.stderr)
        return os.EX_IOERR
    finally:
        launch.leave()
    return 0
