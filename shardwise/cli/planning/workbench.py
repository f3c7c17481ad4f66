"""`shardwise workbench`: a page where a run's keys are controls, and the plan updates at once."""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

from shardwise.cli.machinery.options import at_least, new_file, write_file
from shardwise.run.problems import UserError

HELP = """Open a page on this machine where you change model, cluster, layout, batch and objective, and see memory, timeline,
traffic and cost at once. Without a run it starts with a 70B model. When it is ready it prints its address; anyone who has the
address can use the page. Ctrl-C ends it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument(
        "run", nargs="?", help="the run to start with, a TOML file; or a folder of runs, to watch and plan them"
    )
    parser.add_argument(
        "--export",
        type=new_file,
        metavar="FILE",
        help="write a page with the plans around the run instead, to open from disk",
    )
    parser.add_argument("--port", type=at_least(0), default=0, help="port to listen on (default 0: any free one)")
    parser.add_argument("--no-open", action="store_true", help="only print the address, open no browser")


def execute(args: argparse.Namespace) -> int:
    """Serve the page until stopped, or write it to a file."""
    from shardwise.workbench.app import Workbench, make_app, serve_page
    from shardwise.workbench.changes import with_layout
    from shardwise.workbench.question import base_of

    if args.run and not args.export and Path(args.run).is_dir():
        from shardwise.workbench.watch import Watch

        if args.overrides:
            key = args.overrides[0].partition("=")[0]
            raise UserError(f"--{key} changes one run, and {args.run} is a folder of runs; name the run's file")
        serve_page(make_app(None, Watch(Path(args.run))), "workbench", args.port, not args.no_open)
        return 0
    base = with_layout(base_of(args.run, args.overrides))
    if args.export:
        from shardwise.cli.machinery.terminal import progress_line
        from shardwise.workbench.export import export_page

        with progress_line() as say:
            page = export_page(base, say)
        write_file(args.export, page.encode())
        print(f"wrote {args.export}")
        return 0
    bench = Workbench(base)
    bench.answer({})  # the first answer takes longest: it reads curves and presets
    gc.collect()
    gc.freeze()  # these objects stay, and scanning them again and again would delay answers
    serve_page(make_app(bench), "workbench", args.port, not args.no_open)
    return 0
