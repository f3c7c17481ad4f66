"""`shardwise load`: measures how fast a server answers under a given load."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli.machinery.options import at_least, new_file, write_file
from shardwise.run.lengths import Lengths, parse_lengths
from shardwise.run.problems import Problem, UserError, unreadable

if TYPE_CHECKING:
    from shardwise.run import Run

HELP = """Send requests to a server with OpenAI's API, at random moments (--rate) or a fixed number at a time (--concurrency), and
print latency and throughput. Exit code 1 if a request failed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("url", help="the server, such as http://127.0.0.1:8000")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--rate", type=at_least(1e-6, float), help="requests a second, at random moments (Poisson)")
    how.add_argument("--concurrency", type=at_least(1), help="requests in flight at all times")
    how.add_argument("--plan", dest="run", metavar="RUN", help="the load of this run, compared with its plan")
    parser.add_argument("--requests", type=at_least(1), default=100, help="number of requests (100)")
    lengths = 'tokens of {}: a number, "U(100,1024)", or a file with a number on each line (128)'
    parser.add_argument("--input", default="128", metavar="LENGTHS", help=lengths.format("a prompt"))
    parser.add_argument("--output", default="128", metavar="LENGTHS", help=lengths.format("an answer"))
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="prompts, one per line (default: random tokens)")
    parser.add_argument("--chat", action="store_true", help="send chat messages instead of text to continue")
    parser.add_argument("--allow-end", action="store_true", help="answers may end before their length")
    parser.add_argument("--temperature", type=at_least(0, float), help="sampling temperature (default: the server's)")
    parser.add_argument("--model", default="", help="name of the model (default: the server's first)")
    parser.add_argument("--api-key", default="", help="key to send to the server")
    parser.add_argument(
        "--ttft-limit", type=at_least(0, float), metavar="MS", help="goodput: limit of the time to first token"
    )
    parser.add_argument(
        "--tpot-limit", type=at_least(0, float), metavar="MS", help="goodput: limit of the time per output token"
    )
    parser.add_argument("--warmup", type=at_least(0), default=0, help="requests before the measured ones (0)")
    parser.add_argument(
        "--timeout", type=at_least(0.001, float), default=600.0, help="seconds to wait for an answer (600)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of lengths, arrival times and tokens (0)")
    parser.add_argument("--html", type=new_file, metavar="FILE", help="write a page with charts")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def execute(args: argparse.Namespace) -> int:
    """Run the load, then print the figures."""
    from shardwise.cli.machinery.terminal import progress_line
    from shardwise.hardware.chips import unknown_chip
    from shardwise.run import read_run
    from shardwise.schedules.serving.figures import Limits
    from shardwise.serve.event_loop import run_in_loop
    from shardwise.serve.load.client import Address
    from shardwise.serve.load.run import Load, Progress, run_load, summary

    run = read_run(args.run, args.overrides, (unknown_chip,)) if args.run else None
    load = Load(
        requests=args.requests,
        rate=args.rate or 0.0,
        concurrency=args.concurrency or 0,
        input=_lengths(args.input, "--input"),
        output=_lengths(args.output, "--output"),
        texts=_texts(args.prompts) if args.prompts else (),
        chat=args.chat,
        model=args.model,
        sampling={} if args.temperature is None else {"temperature": args.temperature},
        ends=args.allow_end,
        warmup=args.warmup,
        seed=args.seed,
        seconds=args.timeout,
    )
    load = replace(load, **_of_run(run)) if run else load
    try:
        address = Address.of(args.url, args.api_key)
    except ValueError as e:
        raise UserError(str(e)) from None
    try:
        address.host.encode("idna")  # as it is looked up
    except UnicodeError:
        raise UserError(f"{args.url} does not name a host: {address.host}") from None
    given = (run.serve.ttft_ms or None, run.serve.tpot_ms or None) if run else (args.ttft_limit, args.tpot_limit)
    limits = Limits(*map(_limit, given))
    with progress_line() as say:

        def tell(now: Progress) -> None:
            failed = f", {now.failed} failed" if now.failed else ""
            say(f"{now.ended} of {load.requests} answered, {now.sent - now.ended} under way{failed}")

        records = run_in_loop(run_load(address, load, tell))
    found = summary(records, limits)
    figures = found.as_dict()
    if args.html:
        from shardwise.report.load_view import load_page

        write_file(args.html, load_page(f"Load on {args.url}", found).encode())
    if run:
        from shardwise.cli.planning.serving import show_verdict, verdict_of
        from shardwise.plan.serving.served import ServedLoad

        return max(show_verdict(verdict_of(run, ServedLoad(figures)), args.json), 1 if figures["failed"] else 0)
    if args.json:
        print(json.dumps(figures))
    else:
        _print(figures)
    return 1 if figures["failed"] else 0


def _of_run(run: Run) -> dict[str, Any]:
    """The load that the plan of a run simulates."""
    from shardwise.plan.serving.simulate import requests_of

    serve = run.serve
    if not (serve.rate or serve.concurrency):
        raise UserError(Problem("the run has no load: set serve.rate or serve.concurrency", "--plan", "command line"))
    asked = requests_of(serve, run.train.seed, run.layout.replicate)
    return dict(
        requests=len(asked), rate=serve.rate, concurrency=serve.concurrency, seed=run.train.seed,
        input=parse_lengths(serve.input_tokens, "serve.input_tokens"),
        output=parse_lengths(serve.output_tokens, "serve.output_tokens"),
    )  # fmt: skip


def _lengths(text: str, option: str) -> Lengths:
    """The lengths that an option describes. Python reads no number of more than 4,300 digits, and no such long name of a file."""
    try:
        return parse_lengths(text, option)
    except (ValueError, OSError):
        raise UserError(Problem(f'"{text[:20]}…" is too long for a number of tokens', option, "command line")) from None


def _limit(given: float | None) -> float:
    return math.inf if given is None else given


def _texts(path: Path) -> list[str]:
    try:
        # Not splitlines(): a prompt may hold other line breaks, such as U+2028.
        lines = [line for line in path.read_text(encoding="utf-8-sig").split("\n") if line]
    except (OSError, UnicodeDecodeError) as e:
        raise unreadable(e, "--prompts", path) from None
    if not lines:
        raise UserError(Problem("has no prompt in it", "--prompts", str(path)))
    return lines


def _print(figures: dict[str, Any]) -> None:
    from shardwise.report.terminal import Console
    from shardwise.report.terminal_load import print_load

    console = Console(highlight=False)
    print_load(console, figures)
    late = figures["late_ms"]["p99"]
    if late is not None and late > 20:
        console.print(f"requests were sent up to {late:.0f} ms late: this program or machine is too slow for the load")
