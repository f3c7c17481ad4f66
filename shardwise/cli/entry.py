"""The entry point of the `shardwise` command. Signals come first, everything else is imported after that."""

from __future__ import annotations

import io
import os
import signal
import sys
import warnings
from typing import NoReturn

from shardwise.train.faults.stop import end_at_once, ignore_signals


def hide_deprecations() -> None:
    """Hide PyTorch's deprecation warnings, about which users can do nothing. This applies only to the command and its ranks;
    `PYTHONWARNINGS` or `-W` shows them."""
    if sys.warnoptions:
        return
    for category, message in (
        (FutureWarning, ""),
        (UserWarning, r"(?is).*deprecat"),
        (DeprecationWarning, ""),
    ):
        warnings.filterwarnings("ignore", message, category, module=r"torch(\.|$)")
    # Some are attributed to the caller's module.
    warnings.filterwarnings("ignore", r"(?is).*\btorch\b.*deprecat", FutureWarning)
    warnings.filterwarnings("ignore", r"(?is).*\btorch\b.*deprecat", UserWarning)


def entry() -> NoReturn:
    """The console script."""
    hide_deprecations()
    trains, is_rank = sys.argv[1:2] == ["train"], "RANK" in os.environ
    if not is_rank:
        end_at_once("interrupted", 128 + signal.SIGINT, (signal.SIGINT,))
    if trains and not is_rank:
        end_at_once("stop requested before the first step: there is nothing to save")
    from shardwise.cli.machinery.terminal import NAME, register
    from shardwise.cli.main import main

    register()
    for stream in (sys.stdout, sys.stderr):  # replace characters that the terminal cannot show
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=NAME)
    if not trains:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    code = main(sys.argv[1:])
    if trains:
        ignore_signals()
    if sys.argv[1:2] in (["plan"], ["serve"]):
        # Freeing a search's records one by one takes a seventh of its time, and a plan has nothing else to clean up.
        # At the end of a server, Triton's bindings would list every object of theirs that is still alive. All output is written:
        # `main` flushes stdout, and stderr is flushed with each line.
        os._exit(code)
    sys.exit(code)
