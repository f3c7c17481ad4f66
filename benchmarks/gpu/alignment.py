"""What a product loses whose dimensions do not fill the GPU's vectors and lines: widths that are no multiple of 128 or of 16 bytes.

Each width is compared with the next larger one that is aligned, by seconds for an operation, so that tiles that are partly empty
count on both sides alike. Widths such as 1800 (hidden 14400 over 8 ranks) and heads of 108 were really trained with.

    python benchmarks/gpu/alignment.py [--output alignment.json]      # half a minute on one GPU
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
from shapes import need_gpu

ROWS = 4096
WIDTHS = (1792, 1800, 1808, 1824, 1856, 5376, 5400, 7168, 7200, 7201, 7204, 7232)
HEADS = (64, 72, 80, 96, 100, 104, 108, 110, 112, 120, 128)


def milliseconds(a: torch.Tensor, b: torch.Tensor, times: int = 9) -> float:
    """The median of one product by CUDA events."""
    taken = []
    for n in range(times + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.matmul(a, b)
        end.record()
        end.synchronize()
        if n >= 3:
            taken.append(start.elapsed_time(end))
    return statistics.median(taken)


def main() -> int:
    """Measure, print a table and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    need_gpu()
    rows = []

    def measure(kind: str, dtype: torch.dtype, a: tuple[int, ...], b: tuple[int, ...], width: int) -> None:
        x, y = (torch.randn(*shape, device="cuda", dtype=dtype) for shape in (a, b))
        taken = milliseconds(x, y)
        flops = 2.0 * a[-1] * b[-1] * a[-2] * (a[0] if len(a) == 3 else 1)
        row = dict(
            kind=kind, dtype=str(dtype).removeprefix("torch."), width=width, ms=taken, tflops=flops / taken / 1e9
        )
        rows.append(row)
        print(f"{kind:10} {row['dtype']:9} {width:5}: {taken:.3f} ms, {row['tflops']:.0f} TFLOP/s", flush=True)

    for dtype in (torch.bfloat16, torch.float16):
        for width in WIDTHS:
            measure("columns", dtype, (ROWS, 14336), (14336, width), width)
            measure("inner", dtype, (ROWS, width), (width, 14336), width)
            measure("rows", dtype, (width, ROWS), (ROWS, 14336), width)
        for width in HEADS:
            measure("scores", dtype, (64, 2048, width), (64, width, 2048), width)
            measure("values", dtype, (64, 2048, 2048), (64, 2048, width), width)
    if args.output:
        args.output.write_text(json.dumps(dict(device=torch.cuda.get_device_name(), rows=rows), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
