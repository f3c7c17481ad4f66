"""Attention of long sequences, as a training step runs it: forward and backward again and again, until the chip is as warm and as
slow as it stays. Kernel timings are of short bursts, and a chip at its limit of power is slower than that after some tenths of a
second. Writes seconds of each pass in the first burst and of the last ones, beside what the plan's curves say.

    python benchmarks/gpu/long_attention.py --output attention.json [--seconds 1.0]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from shapes import need_gpu
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.hardware import attention_seconds, find_chip
from shardwise.hardware.attention import Direction

HEADS = [(32, 8, 64), (12, 12, 64), (12, 4, 128), (32, 8, 128), (16, 16, 128)]
"""Query heads, heads of keys and values, elements of a head."""
LENGTHS = [4096, 16384, 32768, 65536, 131072]


def measure(heads: int, kv_heads: int, head_dim: int, length: int, seconds: float) -> dict[str, Any]:
    """Seconds of forward and backward over one sequence."""

    def made(many: int) -> torch.Tensor:
        return torch.randn(1, many, length, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    q, k, v = made(heads), made(kv_heads), made(kv_heads)
    marks: list[list[torch.cuda.Event]] = []
    began = time.perf_counter()
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        while len(marks) < 5 or time.perf_counter() - began < seconds:
            three = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            three[0].record()
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
            three[1].record()
            torch.autograd.grad(out, (q, k, v), out)
            three[2].record()
            marks.append(three)
            if len(marks) % 4 == 0:
                torch.cuda.synchronize()
    torch.cuda.synchronize()
    result: dict[str, Any] = dict(heads=heads, kv_heads=kv_heads, head_dim=head_dim, length=length, repeats=len(marks))
    chip = find_chip("h200-sxm")
    ways: tuple[Direction, Direction] = ("forward", "backward")
    for n, way in enumerate(ways):
        taken = [three[n].elapsed_time(three[n + 1]) / 1e3 for three in marks[1:]]
        planned = attention_seconds(
            chip, 1, heads, length, length, head_dim, kernel="flash3", direction=way, kv_heads=kv_heads
        )
        last = statistics.median(taken[len(taken) // 2 :])
        result[way] = dict(first=min(taken[:3]), last=last, planned=float(planned))
    return result


def main() -> int:
    """Measure all shapes and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("attention.json"))
    parser.add_argument("--seconds", type=float, default=1.0, help="for each shape")
    args = parser.parse_args()
    need_gpu()
    rows = []
    for shape in HEADS:
        for length in LENGTHS:
            rows.append(measure(*shape, length, args.seconds))
            print(rows[-1], flush=True)
            args.output.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
