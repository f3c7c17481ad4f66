"""The GEMMs of decoding steps in bfloat16, by the algorithm that PyTorch takes and by each that cuBLASLt proposes: microseconds for
the matrices of Llama 3 8B or 1B, for so many rows of input. Matrices take turns, so that none is in the cache.

    python benchmarks/gpu/decode_gemms.py [--preset 8b] [--rows 16,64,128,256,512] [--out FILE]      # about a minute on one GPU
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.model.gemm.cublaslt import LibraryError, Multiplication, Shape

MATRICES = {
    "8b": {
        "qkv": (6144, 4096),
        "out": (4096, 4096),
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
        "head": (128256, 4096),
    },
    "1b": {
        "qkv": (3072, 2048),
        "out": (2048, 2048),
        "gate_up": (16384, 2048),
        "down": (2048, 8192),
        "head": (128256, 2048),
    },
}
ADDS = ("out", "down")
"""Those that add to the residual stream."""
CACHE_BYTES = 200e6
REPEATS = 3


def microseconds(works: Sequence[Callable[[], Any]]) -> float:
    """Of one of several pieces of work that take turns, replayed; the least of some timings."""
    for work in works[:2]:
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for work in works:
            work()
    graph.replay()
    found = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return min(found) / len(works) * 1e3


def measured(name: str, n: int, k: int, rows: int) -> dict[str, Any]:
    """One GEMM by all its algorithms."""
    copies = max(2, min(24, round(CACHE_BYTES / (2 * n * k)) + 1))
    weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(copies)]
    x, out = (torch.randn(rows, size, device="cuda", dtype=torch.bfloat16) for size in (k, n))
    base = out if name in ADDS else None
    if base is not None:
        usual = microseconds([partial(out.addmm_, x, w.t()) for w in weights])
    else:
        usual = microseconds([partial(F.linear, x, w) for w in weights])
    shape = Shape.of(x, weights[0].t(), torch.bfloat16)
    assert shape is not None
    multiplication = Multiplication(shape, 0)
    times = []
    for algorithm in multiplication.proposed():
        try:
            works = [partial(multiplication.run, x, w.t(), out, algorithm, base) for w in weights]
            times.append(microseconds(works))
        except (LibraryError, RuntimeError):
            times.append(float("inf"))
    return {
        "usual": usual, "proposed": times, "best": min(times), "which": times.index(min(times)),
        "read": 2 * n * k / 4.3e6, "tflops": 2 * n * k * rows / min(times) / 1e6,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--preset", choices=MATRICES, default="8b")
    parser.add_argument("--rows", default="16,32,64,96,128,192,256,384,512,1024,2048,8192")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: dict[str, Any] = {}
    print(f"{'rows':>6} {'matrix':8} {'usual':>9} {'best':>9} {'which':>6} {'read':>8}   TFLOP/s")
    for count in map(int, args.rows.split(",")):
        total = [0.0, 0.0]
        for name, (n, k) in MATRICES[args.preset].items():
            if name == "head" and count > 512:
                continue
            found = rows[f"{count} {name}"] = measured(name, n, k, count)
            if name != "head":
                total = [total[0] + found["usual"], total[1] + found["best"]]
            print(
                f"{count:6} {name:8} {found['usual']:9.1f} {found['best']:9.1f} {found['which']:6} {found['read']:8.1f} "
                f"{found['tflops']:9.0f}", flush=True,
            )  # fmt: skip
            torch.cuda.empty_cache()
        print(f"{count:6} {'layer':8} {total[0]:9.1f} {total[1]:9.1f}  {total[0] / total[1]:.3f}", flush=True)
        if args.out:
            args.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
