"""A Poisson load over HTTP on one GPU with made-up weights: `shardwise serve`'s server, and a peer's if its command is given, asked
the same by the load generator of `shardwise load`; and the plan of it.

    python benchmarks/gpu/http_load.py llama3-8b --rate 12 --seconds 45 [--peer COMMAND] [--only ours|peer] [--out FILE]

Lengths are U(100,1024) of prompts and of answers, ends of text ignored, no prefix cache. 12 requests a second are 70% of what vLLM
0.26.0 answers of such an 8B load when all come at once (9,633 tokens/s, 562 an answer). The peer is a command that serves at the
port `{port}`, for vLLM:

    --peer 'python3 benchmarks/gpu/vllm_server.py PACK llama3-8b {port}'

where PACK is the folder that it was unpacked to. Our server needs the extra `[serve]` (starlette, uvicorn, httptools, jinja2).
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

LENGTHS = "U(100,1024)"
PORT = 8765
READY_SECONDS = 150.0
SHOWN = (("ttft_ms", "p50"), ("ttft_ms", "p99"), ("tpot_ms", "p50"), ("tpot_ms", "p99"))


def run_of(args: argparse.Namespace, overrides: list[str]) -> Any:
    """The run whose load is sent and planned."""
    from shardwise.run import read_run

    words = ["model.max_positions=8192", "train.dtype=bfloat16", "serve.prefix_cache=false"]
    words += [f"serve.rate={args.rate}", f"serve.requests={round(args.rate * args.seconds)}"]
    words += [f"serve.input_tokens={LENGTHS}", f"serve.output_tokens={LENGTHS}"]
    return read_run(None, [f"model.preset={args.preset}", *words, *overrides])


def serve(run: Any) -> None:
    """Our server, with random weights, until it is told to end."""
    import asyncio

    from shardwise.measure.bench.random_server import serve_engine
    from shardwise.measure.serve_load import ready_engine
    from shardwise.serve.event_loop import run_in_loop

    engine = ready_engine(run)
    gc.collect()
    gc.freeze()

    def ready(address: str, stop: Any) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.ask)
        print("serving at", address, flush=True)

    run_in_loop(serve_engine(engine, PORT, ready))


def wait_until_ready(process: subprocess.Popen[bytes]) -> float:
    """Seconds until the server answers."""
    began = time.monotonic()
    while time.monotonic() - began < READY_SECONDS:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with {process.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=2) as answer:
                if answer.status == 200:
                    return time.monotonic() - began
        except (urllib.error.URLError, OSError):
            time.sleep(0.25)
    raise SystemExit(f"the server was not ready after {READY_SECONDS:.0f} s")


def measured(command: list[str], run: Any, log: Path) -> dict[str, Any]:
    """Start a server, send it the load, end it."""
    from shardwise.plan.serving.simulate import requests_of
    from shardwise.run.lengths import parse_lengths
    from shardwise.schedules.serving.figures import Limits
    from shardwise.serve.event_loop import run_in_loop
    from shardwise.serve.load.client import Address
    from shardwise.serve.load.run import Load, run_load, summary

    lengths = parse_lengths(LENGTHS)
    load = Load(
        requests=len(requests_of(run.serve)), rate=run.serve.rate, input=lengths, output=lengths, sampling={"temperature": 0.6},
        warmup=8, seed=run.train.seed,
    )  # fmt: skip
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT) as process:
        try:
            ready = wait_until_ready(process)
            found = summary(run_in_loop(run_load(Address.of(f"http://127.0.0.1:{PORT}"), load)), Limits()).as_dict()
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
    return found | {"ready_s": ready}


def show(name: str, found: dict[str, Any]) -> None:
    """One line of the table."""
    times = "".join(f"{found[key][share]:12.2f}" for key, share in SHOWN)
    late = (found.get("late_ms") or {}).get("p99") or 0.0
    print(f"{name:8}{found['output_tokens_per_s']:12,.0f}{times}{found['failed']:8}{late:9.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("preset")
    parser.add_argument("--rate", type=float, default=12.0)
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--peer", default="", help="a command that serves at {port}")
    parser.add_argument("--only", choices=("ours", "peer"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--as-server", action="store_true", help="be our server")
    args, overrides = parser.parse_known_args()
    run = run_of(args, overrides)
    if args.as_server:
        serve(run)
        return
    from shardwise.measure.serve_load import here
    from shardwise.plan.serving.plan import plan_serving

    planned = plan_serving(here(run)).as_dict()
    heads = [f"{key.removesuffix('_ms')} {share}" for key, share in SHOWN]
    print(
        f"{'':8}{'tokens/s':>12}" + "".join(f"{head:>12}" for head in heads) + f"{'failed':>8}{'late':>9}", flush=True
    )
    show("plan", planned)
    rows: dict[str, Any] = {"preset": args.preset, "rate": args.rate, "plan": planned}
    own = [sys.executable, __file__, args.preset, "--as-server", f"--rate={args.rate}", f"--seconds={args.seconds}"]
    servers = {"ours": [*own, *overrides], "peer": shlex.split(args.peer.replace("{port}", str(PORT)))}
    folder = args.out.parent if args.out else Path()
    for name, command in servers.items():
        if command and args.only in (None, name):
            rows[name] = measured(command, run, folder / f"http-{name}.log")
            show(name, rows[name])
            if args.out:
                args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
