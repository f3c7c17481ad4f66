"""`shardwise serve`: serves a checkpoint over OpenAI's HTTP API."""

from __future__ import annotations

import argparse
import asyncio
import gc
import ipaddress
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.cli.machinery.options import at_least
from shardwise.run.problems import Problem, UserError, unreadable

if TYPE_CHECKING:
    from shardwise.serve.replicas import Remake

HELP = """Serve a checkpoint, or the newest one of a run folder, over OpenAI's HTTP API: /v1/completions, /v1/chat/completions,
/v1/models, /health, /metrics. Prints its address when it is ready. On SIGTERM and Ctrl-C running requests are finished first. If
the layout has several ranks, they are started on this machine, unless torchrun or Slurm started them."""

LIMITS = ("waiting", "connections", "body_bytes", "drain_seconds")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("run", metavar="CHECKPOINT", type=Path, help="a checkpoint or a run folder")
    parser.add_argument(
        "--adapter", type=Path, metavar="DIR", help="adapters to merge: a folder of peft, or the run that trained them"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: all (127.0.0.1)")
    parser.add_argument("--port", type=at_least(0), default=8000, help="port to listen on; 0: any free one (8000)")
    parser.add_argument("--model-name", default="", help="name of the model for clients (default: the run's name)")
    parser.add_argument(
        "--api-key",
        action="append",
        default=[],
        help="key that clients must send; @FILE: one key per line; may be repeated",
    )
    parser.add_argument("--chat-template", type=Path, metavar="FILE", help="Jinja template (default: the checkpoint's)")
    waiting = "requests that may wait; more get 429 with Retry-After (1024)"
    parser.add_argument("--max-waiting", dest="waiting", type=at_least(1), metavar="N", help=waiting)
    connections = "most open connections (4096)"
    parser.add_argument("--max-connections", dest="connections", type=at_least(1), metavar="N", help=connections)
    body = "most bytes of a request (8388608)"
    parser.add_argument("--max-body", dest="body_bytes", type=at_least(1024), metavar="BYTES", help=body)
    drain = "seconds for running requests after SIGTERM (60)"
    parser.add_argument("--drain-seconds", type=at_least(0, float), metavar="SECONDS", help=drain)


def execute(args: argparse.Namespace) -> int:
    """Serve until SIGTERM."""
    keys = keys_of(args.api_key)

    from shardwise.checkpoint.folder import checkpoint_folder
    from shardwise.checkpoint.format import RUN_FILE
    from shardwise.checkpoint.huggingface.peft import adapted, adapter_folder
    from shardwise.cli.machinery.ranks import engine_here, rank_here, start_ranks
    from shardwise.run import read_served
    from shardwise.serve.event_loop import run_in_loop
    from shardwise.serve.server.address import address_of, open_socket
    from shardwise.serve.server.limits import Limits
    from shardwise.serve.server.listen import Stop, serve, within_files
    from shardwise.serve.server.model import load_model_files

    folder = checkpoint_folder(args.run)
    run = read_served(folder / RUN_FILE, args.overrides)
    tuned = adapter_folder(args.adapter) if args.adapter else None
    model = load_model_files(folder, args.model_name or run.name, args.chat_template, tuned)
    given = {name: value for name in LIMITS if (value := getattr(args, name)) is not None}
    limits = within_files(Limits(**given))
    if not rank_here() and not keys and not _is_local(args.host):
        print(f"warning: whoever reaches {args.host} may use this model; --api-key KEY asks for a key", file=sys.stderr)
    code = start_ranks(run, args)
    if code is not None:
        return code
    # Opened before the weights are read, which may take minutes.
    listener = None if rank_here() else open_socket(args.host, args.port)

    def remake(vocab: int) -> Remake:
        from shardwise.serve.grammar import Grammars

        return Grammars(model.tokenizer, vocab, model.ends).make

    with adapted(folder, args.adapter) as weights, engine_here(weights, run, remake=remake, warm=True) as engine:
        if engine is None or listener is None:
            return 0
        # These objects stay, and scanning them again and again would delay steps.
        gc.collect()
        gc.freeze()

        async def until_signalled() -> int:
            stop = Stop()
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, stop.ask)
            line = f"serving {model.name} at {address_of(listener)}"
            failed = await serve(engine, model, listener, stop, limits, keys, lambda _: print(line, flush=True))
            return 1 if failed else 0

        code = run_in_loop(until_signalled())
        if code and run.layout.world > 1:
            os._exit(code)  # do not wait for the other ranks
    return code


def keys_of(given: list[str]) -> list[str]:
    """The keys of the command line. Keys in a file are not visible to others who list the machine's processes."""
    found = []
    for each in given:
        if not each.startswith("@"):
            found.append(each)
            continue
        try:
            lines = Path(each[1:]).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as e:
            raise unreadable(e, "--api-key", each[1:]) from None
        found += [line.strip() for line in lines if line.strip()]
    if given and not (found and all(found)):
        raise UserError(Problem("is empty, which would let everybody in", "--api-key", "command line"))
    return found


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
