"""What traffic costs the computation beside it: products, attention and copies while another kernel holds SMs and moves memory.

NCCL's kernels hold an SM for each of their channels and read and write memory at the speed of the link. A copy kernel of as many
programs as channels stands in for them: each program loops over its own slice for as long as the work takes. The slowdown of the
work is the share of hidden traffic that the planner charges to computing (`contention` in `shardwise/plan/cost/constants.py`).

    python benchmarks/gpu/contention.py [--output contention.json]      # about a minute on one GPU
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from shapes import need_gpu

SIZES = ((8192, 4096, 4096), (8192, 14336, 4096), (8192, 4096, 14336), (4096, 8192, 8192), (16384, 8192, 2048))
HELD = (0, 8, 16, 24, 32)
RATES = (0, 4)
"""Rounds of waiting between two pieces of a copy: 0 as fast as an SM can, more like a link slower than memory."""
PIECE = 8192


@triton.jit
def _hold(source, target, rounds, idle, sink, slice_size, PIECE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each program copies its slice over and over; `idle` rounds of arithmetic between pieces slow it down."""
    at = tl.program_id(0).to(tl.int64) * slice_size
    waited = tl.zeros([32], tl.float32)
    for n in range(rounds):
        here = at + (n * PIECE) % slice_size + tl.arange(0, PIECE)
        tl.store(target + here, tl.load(source + here))
        for _ in range(idle):
            waited = tl.sin(waited + 1.0)
    tl.store(sink + tl.program_id(0) * 32 + tl.arange(0, 32), waited)


def milliseconds(work: Callable[[], Any], beside: Callable[[], Any] | None, times: int = 9) -> float:
    """The median of the work by CUDA events, with the other kernel running from before its start to after its end."""
    main, side = torch.cuda.Stream(), torch.cuda.Stream()
    warm, taken = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16), []
    for n in range(times + 2):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if beside is not None:
            with torch.cuda.stream(side):
                began = torch.cuda.Event()
                began.record()
                beside()
            main.wait_event(began)
        with torch.cuda.stream(main):
            if beside is not None:
                warm @ warm  # until the copies hold their SMs
            start.record()
            work()
            end.record()
        torch.cuda.synchronize()
        if n >= 2:
            taken.append(start.elapsed_time(end))
    return statistics.median(taken)


def _products(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    return [a @ b for _ in range(6)]


def works() -> dict[str, Callable[[], Any]]:
    """What is slowed down: several products of each shape, attention, a large elementwise kernel."""
    found: dict[str, Callable[[], Any]] = {}
    for m, n, k in SIZES:
        a, b = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((m, k), (k, n)))
        found[f"product {m}x{n}x{k}"] = functools.partial(_products, a, b)
    q, k2, v = (torch.randn(2, 32, 4096, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    scaled = torch.nn.functional.scaled_dot_product_attention
    found["attention"] = lambda: [scaled(q, k2, v, is_causal=True) for _ in range(4)]
    x = torch.randn(2**28, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    found["copy"] = lambda: [y.copy_(x) for _ in range(4)]
    return found


def main() -> int:
    """Measure, print a table and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    need_gpu()
    most, slice_size = max(HELD), 2**23
    source = torch.randn(most * slice_size, device="cuda", dtype=torch.bfloat16)
    target, sink = torch.empty_like(source), torch.empty(most * 32, device="cuda")
    rows = []

    def copies(held: int, idle: int, rounds: int) -> Callable[[], Any]:
        return lambda: _hold[(held,)](source, target, rounds, idle, sink, slice_size, PIECE=PIECE, num_warps=16)

    rates: dict[tuple[int, int], float] = {}
    for held in HELD[1:]:
        for idle in RATES:
            rounds = 20_000
            taken = milliseconds(copies(held, idle, rounds), None, times=3)
            rates[held, idle] = rounds / taken  # pieces of a program in a millisecond
    for name, work in works().items():
        alone = milliseconds(work, None)
        for held in HELD[1:]:
            for idle in RATES:
                rounds = int(rates[held, idle] * (2.5 * alone + 1.0))
                beside = milliseconds(work, copies(held, idle, rounds))
                moved = rates[held, idle] * held * PIECE * 4 / 1e6  # GB/s read and written, alone
                slower = beside / alone - 1
                row = dict(work=name, sms=held, copied_gbs=moved, alone_ms=alone, beside_ms=beside, slowdown=slower)
                rows.append(row)
                speed = f"{held:3} SMs {moved:8.0f} GB/s"
                print(f"{name:28} {speed}: {alone:.3f} ms alone, {beside:.3f} beside, {slower:+.1%}", flush=True)
    if args.output:
        args.output.write_text(json.dumps(dict(device=torch.cuda.get_device_name(), rows=rows), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
