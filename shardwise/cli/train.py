"""`shardwise train`: trains a run into its folder, on as many ranks as its layout needs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from shardwise.run import Run, read_run, to_dict

HELP = (
    "Train a run. Its folder (runs/NAME, or --out) gets run.toml, metrics.jsonl and checkpoints/; started again, it goes on. "
    "A layout of several ranks is started on this machine, unless torchrun or Slurm started them."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What follows the verb."""
    parser.add_argument("run", help="the run, a TOML file; override it with --section.key=value")
    parser.add_argument("--out", type=Path, help="the run folder (default: runs/NAME)")


def chosen(run: Run) -> list[str]:
    """A layout that was searched for, as overrides, so that every rank trains with the same one."""
    usual = to_dict(Run())["layout"]
    keys = {k: v for k, v in to_dict(run)["layout"].items() if v != usual[k] and k != "fixed"} | {"auto": False}
    return [f"layout.{k}={json.dumps(v)}" for k, v in keys.items()] + [f"train.microbatch={run.train.microbatch}"]


def execute(args: argparse.Namespace) -> int:
    """Train."""
    run = read_run(args.run, args.overrides)
    if run.layout.auto:
        from shardwise.plan.search import resolve

        run = resolve(run)
        args.overrides += chosen(run)
        print(f"layout: {', '.join(chosen(run))}", file=sys.stderr)
    out = args.out or Path("runs") / run.name
    from shardwise.train import launch
    from shardwise.train.loop import check, train

    where = launch.place(os.environ)
    launch.check_world(run, where)
    if run.layout.world == 1 and not run.layout.offload:
        train(run, out)
        return 0
    if where is None and run.layout.world == 1:  # offloading is a kind of sharding, and wants a group, be it of one
        where = launch.Place(0, 1, 0, "127.0.0.1", launch.free_port())
    if where is None:
        check(run, out)
        overrides = [f"--{override}" for override in args.overrides]
        return launch.start_local(["train", args.run, "--out", str(out), *overrides], run.layout.world, out / "logs")
    launch.join(where, run)
    try:
        train(run, out)
    finally:
        launch.leave()
    return 0
