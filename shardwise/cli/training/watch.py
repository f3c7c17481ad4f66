"""`shardwise watch`: shows runs on a page while they train, or afterwards."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardwise.cli.machinery.options import at_least

HELP = """Show a run, or all runs of a folder, on a page of this machine: loss, gradient norm, speed and memory beside the plan,
goodput, the time of each rank, events. It follows the trainer's files as they grow. When it is ready it prints its address;
anyone who has the address can see the page. Ctrl-C ends it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="a run folder, or a folder of runs")
    parser.add_argument("--port", type=at_least(0), default=0, help="port to listen on (default 0: any free one)")
    parser.add_argument("--no-open", action="store_true", help="only print the address, open no browser")


def execute(args: argparse.Namespace) -> int:
    """Serve the page until stopped."""
    from shardwise.workbench.app import make_app, serve_page
    from shardwise.workbench.watch import Watch

    serve_page(make_app(None, Watch(args.folder)), "watching", args.port, not args.no_open)
    return 0
