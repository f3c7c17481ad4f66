"""What the HTTP server costs, without a model: an engine that answers at once, or keeps a GPU's pace while it waits.

The server runs in a process of its own, and `shardwise load`'s client drives it: short requests as fast as it takes them, long
streams as fast as it sends them (what a client is late with comes together), and streams at the pace of steps of some
milliseconds. Of the last the figure is what a step took beyond its pace: the engine's thread shares the interpreter with the
server.

python benchmarks/server_speed.py [--sequences 128] [--step-ms 10] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time

from shardwise.data.tokenizer import ByteTokenizer
from shardwise.run.lengths import Lengths
from shardwise.schedules.serving.figures import Limits
from shardwise.serve.event_loop import run_in_loop
from shardwise.serve.load.client import Address
from shardwise.serve.load.run import Load, run_load, summary
from shardwise.serve.request import Output, Request, Stats
from shardwise.serve.server.address import address_of, open_socket
from shardwise.serve.server.listen import Stop, serve
from shardwise.serve.server.model import Model


class PacedEngine:
    """Answers with the letter a; a step takes `seconds`, in which the interpreter is free."""

    vocab, max_tokens = 257, 1 << 20

    def __init__(self, seconds: float, sequences: int) -> None:
        self.seconds, self.sequences = seconds, sequences
        self.left: dict[str, int] = {}
        self.late: list[float] = []

    def add(self, request: Request) -> None:
        self.left[request.id] = request.max_tokens

    def abort(self, request_id: str) -> None:
        self.left.pop(request_id, None)

    def finish(self, request_id: str, index: int) -> None:
        self.left.pop(request_id, None)

    def step(self) -> list[Output]:
        start, outputs = time.perf_counter(), []
        if self.seconds and self.left:
            time.sleep(self.seconds)
        for name in list(self.left)[: self.sequences]:
            self.left[name] -= 1
            outputs.append(Output(name, 0, (97,), finish=None if self.left[name] else "length"))
            if not self.left[name]:
                del self.left[name]
        if self.seconds and len(outputs) == self.sequences:
            self.late.append(time.perf_counter() - start - self.seconds)
        return outputs

    @property
    def idle(self) -> bool:
        return not self.left

    def stats(self) -> Stats:
        return Stats(running=len(self.left))


def as_server(seconds: float, sequences: int) -> None:
    """Serve until the standard input ends, then say how late the median step was."""
    engine = PacedEngine(seconds, sequences)

    async def body() -> None:
        stop, loop, listener = Stop(), asyncio.get_running_loop(), open_socket("127.0.0.1", 0)

        def ended() -> None:
            loop.remove_reader(0)
            stop.ask()

        loop.add_reader(0, ended)
        model = Model("a", ByteTokenizer(), ends=frozenset([256]))
        await serve(engine, model, listener, stop, ready=lambda _: print(address_of(listener), flush=True))

    run_in_loop(body())
    late = sorted(engine.late) or [0.0]
    print(json.dumps({"p50": late[len(late) // 2] * 1e3, "p99": late[len(late) * 99 // 100] * 1e3}))


def measured(seconds: float, sequences: int, load: Load) -> dict[str, float]:
    """The figures of a load on a new server."""
    command = [sys.executable, __file__, "--serve", str(seconds), "--sequences", str(sequences)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url = server.stdout.readline().strip()
    found = summary(run_in_loop(run_load(Address.of(url), load)), Limits()).as_dict()
    late = json.loads(server.communicate()[0])
    assert not found["failed"], found["errors"]
    return {
        "requests_per_s": found["requests_per_s"],
        "tokens_per_s": found["output_tokens_per_s"],
        "tpot_p99_ms": found["tpot_ms"]["p99"] or 0.0,
        "step_late_p50_ms": late["p50"],
        "step_late_p99_ms": late["p99"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--sequences", type=int, default=128, help="that are answered at a time")
    parser.add_argument("--step-ms", type=float, default=10.0, help="pace of the last case")
    parser.add_argument("--serve", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.serve is not None:
        as_server(args.serve, args.sequences)
        return
    many, long = Lengths(8, 8), Lengths(128, 128)
    n = args.sequences
    cases = {
        "short requests": measured(0.0, n, Load(3000, concurrency=32, input=many, output=Lengths(1, 1), warmup=20)),
        "streams at once": measured(0.0, n, Load(6 * n, concurrency=n, input=long, output=Lengths(256, 256))),
        "streams at a pace": measured(
            args.step_ms / 1e3, n, Load(2 * n, concurrency=n, input=long, output=Lengths(200, 200))
        ),
    }
    if args.json:
        print(json.dumps(cases))
        return
    for name, found in cases.items():
        print(f"{name:<18} {found['requests_per_s']:7,.0f} requests/s {found['tokens_per_s']:9,.0f} tokens/s", end="")
        late = f"  steps {found['step_late_p50_ms']:.2f} ms late (99%: {found['step_late_p99_ms']:.2f})"
        print(late if name == "streams at a pace" else "")


if __name__ == "__main__":
    main()
