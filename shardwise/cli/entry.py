"""Where the `shardwise` command begins. Signals come first, everything else is imported after that."""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import NoReturn

from shardwise.train.faults.stop import end_at_once


def entry() -> NoReturn:
    """The console script."""
    trains, is_rank = sys.argv[1:2] == ["train"], "RANK" in os.environ
    if not is_rank:
        end_at_once("interrupted", 128 + signal.SIGINT, (signal.SIGINT,))
    if trains and not is_rank:
        end_at_once("told to stop before the first step: there is nothing to save")
    from shardwise.cli.letters import NAME, register
    from shardwise.cli.main import main

    register()
    for stream in (sys.stdout, sys.stderr):  # replace letters that the terminal cannot show
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=NAME)
    if not trains:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    code = main(sys.argv[1:])
    if sys.argv[1:2] == ["plan"]:
        # Freeing a search's records one by one takes a seventh of its time, and a plan has nothing else to clean up.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
