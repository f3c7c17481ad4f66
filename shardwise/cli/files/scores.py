"""`shardwise data score`: stores the log-probabilities of a reference or a teacher beside a run's data, on as many ranks as its
layout needs."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from shardwise.hardware.chips import unknown_chip
from shardwise.run import read_run


def execute(args: argparse.Namespace) -> int:
    """Score the sets of a run."""
    from shardwise.train.processes import launch
    from shardwise.train.processes.environment import rank_environment

    run = launch.resolve_layout(read_run(args.run, args.overrides, (unknown_chip,)), args.overrides)
    from shardwise.train.batches.score import check_scoring, score

    environment = rank_environment(os.environ)
    launch.check_here(run, environment)
    launch.check_gpus(run)
    check_scoring(run)
    if environment is None and run.layout.world > 1:
        logs = Path(tempfile.mkdtemp(prefix="shardwise-score-"))
        words = ["data", "score", args.run, *(f"--{override}" for override in args.overrides)]
        code = launch.start_local(words, run.layout.world, logs)
        if code != 1:  # the message of a failure names the logs
            shutil.rmtree(logs, ignore_errors=True)
        return code
    if environment is not None:
        launch.join(environment, run)
    try:
        score(run, _say)
    finally:
        launch.leave()
    return 0


def _say(text: str) -> None:
    """Show progress on one line of a terminal; in a log, print only what is done."""
    ends = not text.endswith(" rows")
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="\n" if ends else "", file=sys.stderr, flush=True)
    elif ends:
        print(text, flush=True)
