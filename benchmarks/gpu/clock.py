"""How fast a chip at its limit of power computes when it rests a part of the time.

    python benchmarks/gpu/clock.py [--seconds 1.2] [--works layer products ...] [--out FILE]

GEMMs in 16 and 8 bits and of experts, attention and copies, over and over, with pauses in which no kernel does anything; each
kernel timed by itself, in the later half of the time. Prints what they take beside what they take without pauses, the clock and the
power (`nvidia-smi`).
`benchmarks/fit_hardware.py` fits the planner's power to the rows of FILE (`clock` in `h200_kernels.json`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

LOADS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.35, 0.2)
PAUSES = (0.3, 3.0, 30.0, 300.0)
"""Milliseconds of a pause, at a load of 0.6."""
Work = list[tuple[str, Callable[[], object]]]


def kind_of(name: str) -> str:
    """The planner's kind of a kernel."""
    first = name.split()[0]
    return {"copy": "memory", "attention": "attention", "experts": "experts", "fp8": "fp8"}.get(first, "matmul")


def product(rows: int, columns: int, inner: int) -> Callable[[], object]:
    a, b = (torch.randn(size, inner, device="cuda", dtype=torch.bfloat16) for size in (rows, columns))
    out = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)
    return lambda: torch.mm(a, b.mT, out=out)


def fp8_product(rows: int, columns: int, inner: int, fast: bool) -> Callable[[], object]:
    a, b = (
        torch.randn(size, inner, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn)
        for size in (rows, columns)
    )
    one = torch.ones((), device="cuda")
    return lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)


def experts(way: str, many: int = 2, rows: int = 4096, columns: int = 14336, inner: int = 4096) -> Callable[[], object]:
    x, y = (torch.randn(many * rows, size, device="cuda", dtype=torch.bfloat16) for size in (inner, columns))
    weight = torch.randn(many, columns, inner, device="cuda", dtype=torch.bfloat16)
    ends = torch.arange(1, many + 1, device="cuda", dtype=torch.int32) * rows
    if way == "forward":
        return lambda: torch._grouped_mm(x, weight.transpose(1, 2), ends)
    return lambda: torch._grouped_mm(y, weight, ends) if way == "input" else torch._grouped_mm(y.t(), x, ends)


def attention(backward: bool) -> Callable[[], object]:
    q = torch.randn(1, 32, 8192, 128, device="cuda", dtype=torch.bfloat16, requires_grad=backward)
    k, v = (torch.randn(1, 8, 8192, 128, device="cuda", dtype=torch.bfloat16, requires_grad=backward) for _ in "kv")

    def forward() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    if not backward:
        return forward
    out, grad = forward(), torch.randn_like(q)
    return lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)


def copy() -> Callable[[], object]:
    a, b = (torch.empty(2**27, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    return lambda: b.copy_(a)


def works() -> dict[str, Work]:
    wide, long = ("8192x14336x4096", product(8192, 14336, 4096)), ("8192x4096x14336", product(8192, 4096, 14336))
    small = [
        (f"{m}x{n}x{k}", product(m, n, k)) for m, n, k in ((4096, 3696, 8192), (4096, 8192, 3696), (2048, 3072, 2304))
    ]
    ahead, behind, moved = ("attention", attention(False)), ("attention backward", attention(True)), ("copy", copy())
    return {
        "layer": [wide, wide, ahead, long, moved, moved, wide, wide, behind, long, moved],
        "products": [wide, long],
        "small products": small,
        "attention": [ahead, behind],
        "copies": [moved],
        "experts": [(f"experts {way}", experts(way)) for way in ("forward", "input", "weight")],
        "fp8 products": [
            (f"fp8 {way}", fp8_product(8192, 14336, 4096, way == "forward"))
            for way in ("forward", "backward", "backward")
        ],
    }


@contextmanager
def watched() -> Iterator[list[tuple[float, float, float]]]:
    """Time, clock in MHz and power in W, ten times a second."""
    seen: list[tuple[float, float, float]] = []
    command = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw.instant", "--format=csv,noheader,nounits", "-lms", "100"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            seen.append((time.perf_counter(), *map(float, line.split(","))))  # type: ignore[arg-type]

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        process.terminate()
        thread.join(2)


def played(work: Work, seconds: float, load: float, pause_ms: float, cycles_per_ms: float) -> dict[str, Any]:
    """The work with pauses. One pause follows so many rounds that the load is as wanted."""
    starts = torch.cuda.Event(enable_timing=True)
    starts.record()
    for _, act in work:
        act()
    ends = torch.cuda.Event(enable_timing=True)
    ends.record()
    ends.synchronize()
    once = starts.elapsed_time(ends)
    rounds = 1 if load == 1.0 else max(1, round(pause_ms * load / (1 - load) / once))
    pause = rounds * once * (1 - load) / load
    many = max(2, round(1e3 * seconds / (rounds * once + pause)))
    spans: list[list[tuple[str, torch.cuda.Event, torch.cuda.Event]]] = []
    for number in range(many):
        later = number >= many // 2
        group = []
        for _ in range(rounds):
            for name, act in work:
                pair = [torch.cuda.Event(enable_timing=True) for _ in range(2 * later)]
                if later:
                    pair[0].record()
                act()
                if later:
                    pair[1].record()
                    group.append((name, pair[0], pair[1]))
        if pause:
            torch.cuda._sleep(int(pause * cycles_per_ms))
        if later:
            spans.append(group)
    torch.cuda.synchronize()
    took: dict[str, list[float]] = defaultdict(list)
    for group in spans:
        for name, start, end in group:
            took[name].append(start.elapsed_time(end))
    whole = spans[0][0][1].elapsed_time(spans[-1][0][1]) or 1.0
    busy = sum(start.elapsed_time(end) for group in spans[:-1] for _, start, end in group)
    ms = {name: statistics.median(each) for name, each in took.items()}
    of_round: dict[str, float] = defaultdict(float)
    for name, _ in work:
        of_round[kind_of(name)] += ms[name]
    return dict(load=busy / whole, round_ms=dict(of_round), ms=ms)


def behind_a_rest(act: Callable[[], object], rest: float, cycles_per_ms: float, bins: float = 20.0) -> list[float]:
    """Milliseconds of each call, by how long ago a rest of so many seconds ended: medians of 20 ms each, half a second long."""
    marks = [torch.cuda.Event(enable_timing=True)]
    torch.cuda.synchronize()
    torch.cuda._sleep(int(1e3 * rest * cycles_per_ms))
    marks[0].record()
    while len(marks) < 600:
        act()
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
    torch.cuda.synchronize()
    ends = [marks[0].elapsed_time(mark) for mark in marks]
    found: dict[int, list[float]] = defaultdict(list)
    for before, after in pairwise(ends):
        if after < 500:
            found[int(before // bins)].append(after - before)
    return [round(statistics.median(found[n]), 4) for n in sorted(found)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=1.2)
    parser.add_argument("--works", nargs="*")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in "be")
    torch.cuda._sleep(10**7)
    began.record()
    torch.cuda._sleep(10**7)
    ended.record()
    ended.synchronize()
    cycles = 1e7 / began.elapsed_time(ended)
    rows: list[dict[str, Any]] = []
    with watched() as seen:
        for name, work in works().items():
            if args.works and name not in args.works:
                continue
            for _, act in work:
                act()
            loads = LOADS if name in ("layer", "products") else (1.0, 0.85, 0.5)
            cases = [(load, 3.0) for load in loads] + [(0.6, p) for p in PAUSES if name == "layer"]
            first: dict[str, float] = {}
            for load, pause in cases:
                start = time.perf_counter()
                row = played(work, args.seconds, load, pause, cycles)
                row |= dict(work=name, wanted=load, pause_ms=pause)
                middle = (start + time.perf_counter()) / 2
                during = [s for s in seen if middle < s[0] < time.perf_counter()]
                if during:
                    row["mhz"], row["watts"] = (round(statistics.mean(s[n] for s in during)) for n in (1, 2))
                rows.append(row)
                first = first or row["ms"]
                beside = {k: round(v / first[k], 3) for k, v in row["ms"].items()}
                print(name, load, pause, f"{row['load']:.3f}", row.get("mhz"), row.get("watts"), beside, flush=True)
                if load == 1.0:
                    print("   ", {k: round(v, 4) for k, v in row["ms"].items()}, flush=True)
    for name in ("8192x14336x4096", "attention") if not args.works else ():
        act = dict(works()["layer"])[name]
        for rest in (0.05, 0.2, 1.0):
            rows.append(dict(work=name, rest=rest, behind_ms=behind_a_rest(act, rest, cycles)))
            print("behind a rest", rows[-1], flush=True)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
