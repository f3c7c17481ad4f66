"""`shardwise train`: trains a run into its folder, on as many ranks as its layout needs."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from shardwise.cli.machinery.ranks import words_of
from shardwise.hardware.chips import unknown_chip
from shardwise.run import read_run

HELP = """Train a run. Its folder (runs/NAME, or --out) gets run.toml, metrics.jsonl and checkpoints/. The same command resumes
it. If the layout has several ranks, they are started on this machine, unless torchrun or Slurm started them. On SIGTERM, SIGUSR1
or Ctrl-C it saves a checkpoint and ends with exit code 75; start it again to resume."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("run", help="the run, a TOML file; override it with --section.key=value")
    parser.add_argument("--out", type=Path, help="the run folder (default: runs/NAME)")


def execute(args: argparse.Namespace) -> int:
    """Train the run."""
    from shardwise.train.faults.ranks import free_port, start_fork_server
    from shardwise.train.processes import launch
    from shardwise.train.processes.environment import RankEnvironment, rank_environment

    # Mistakes are found before PyTorch is imported, which takes a while; the fork server imports it meanwhile.
    run = launch.resolve_layout(read_run(args.run, args.overrides, (unknown_chip,)), args.overrides)
    environment = rank_environment(os.environ, own_agent=bool(run.cluster.rendezvous))
    starts_ranks = environment is None and run.layout.world > 1
    if starts_ranks:
        start_fork_server()
    from shardwise.train.processes.check import check
    from shardwise.tune.source import source_of

    out = args.out or Path("runs") / run.name
    if environment is not None and run.train.elastic:
        nodes = max(1, environment.world_size // environment.local_world_size)
        run = launch.fit_layout(run, environment.world_size, nodes, launch.chip_here(run))
    launch.check_here(run, environment)
    launch.check_gpus(run)
    if starts_ranks:
        check(run, out, source_of)
        return launch.start_ranks(run, out, words_of(args))
    from shardwise.train.faults.stop import PREEMPTED, Preempted
    from shardwise.train.loop import train

    if environment is None and run.layout.offload:  # `fully_shard` needs a process group, even for one rank
        environment = RankEnvironment(0, 1, 0, "127.0.0.1", free_port())
    has_agent = environment is not None and environment.has_agent
    if environment is not None and (environment.world_size > 1 or run.layout.offload):
        placement = launch.join(environment, run)
        if environment.rank == 0:
            print(launch.describe_placement(environment, placement), flush=True)
    try:
        train(run, out, has_agent, source_of)
    except Preempted as stop:
        if environment is None or environment.rank == 0 or has_agent:  # print it once if all ranks share one output
            print(stop, file=sys.stderr)
        return PREEMPTED
    except OSError as e:
        if not has_agent:
            raise
        # A full disk or a lost mount may recover, so the agent restarts; user mistakes were found before.
        print(f"error: {e}", file=sys.stderr)
        return os.EX_IOERR
    finally:
        launch.leave()
    return 0
