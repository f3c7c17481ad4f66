"""What training in 8 bits costs and brings, part by part, on one GPU: each quantising pass beside the bytes it moves, each product
in 16 and in 8 bits, and one whole block forward and backward in bf16, tensor-wise and row-wise, compiled and not.

Prints one JSON line a measurement: medians of CUDA events, after warm-up. Shapes are those of the 1.5B model at 8 x 4096 tokens.

    python benchmarks/gpu/fp8_block.py [--batch 8] [--seq-len 4096] [--repeats 20] [--tiles] [--output lines.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from shapes import need_gpu

from shardwise.model.quantized.formats import E4M3, E5M2
from shardwise.model.quantized.fp8 import scaled_mm, use_fp8
from shardwise.model.quantized.scaled import amax, cast, cast_rows, transpose
from shardwise.model.rope import rope_cos_sin
from shardwise.model.transformer import Block
from shardwise.run import run_from_dict

SHAPE = dict(layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=128256)
TILES = ((32, 128), (64, 64), (64, 128), (128, 64), (128, 128), (64, 256), (256, 64), (128, 256))
Line = dict[str, Any]


def milliseconds(work: Callable[[], Any], repeats: int) -> float:
    """The median time of some work by CUDA events."""
    for _ in range(3):
        work()
    pairs = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def quantising(rows: int, repeats: int, tiles: bool) -> Iterator[Line]:
    """Each pass over the activations and weights of a block."""
    cases: list[tuple[str, int, int, torch.dtype]] = [
        ("hidden", rows, 2048, torch.bfloat16),
        ("ffn", rows, 8192, torch.bfloat16),
        ("keys", rows, 512, torch.bfloat16),
        ("up weight", 8192, 2048, torch.float32),
    ]
    for name, height, width, dtype in cases:
        x = torch.randn(height, width, device="cuda", dtype=dtype)
        top, size = amax(x), x.element_size()
        passes: list[tuple[str, Callable[[], Any], int]] = [
            ("largest", partial(amax, x), size),
            ("cast", partial(cast, x, top, E4M3, True, False), size + 1),
            ("cast, turned too", partial(cast, x, top, E4M3, True, True), size + 2),
            ("cast to e5m2, turned too", partial(cast, x, top, E5M2, True, True), size + 2),
            ("cast rows", partial(cast_rows, x, E4M3), size + 1),
        ]
        if dtype == torch.float32:
            passes.append(("turn rows", partial(transpose, *cast_rows(x, E4M3)), 2))
        elif tiles:
            from shardwise.model.kernels.quantize import cast_fused

            for tile in TILES:
                passes.append((f"tile {tile}", partial(cast_fused, x, top, E4M3, True, True, tile), size + 2))
        for part, work, a_number in passes:
            ms = milliseconds(work, repeats)
            yield dict(part=part, of=name, ms=ms, terabytes_a_second=x.numel() * a_number / ms / 1e9)


def gemms(rows: int, repeats: int) -> Iterator[Line]:
    """The three products of each matrix of a block."""
    one = torch.ones((), device="cuda")
    for name, out, inner in (("q", 2048, 2048), ("k", 512, 2048), ("up", 8192, 2048), ("down", 2048, 8192)):
        steps = {"forward": (rows, out, inner), "for input": (rows, inner, out), "for weight": (out, inner, rows)}
        for step, (m, n, k) in steps.items():
            left, right = (torch.randn(side, k, device="cuda", dtype=torch.bfloat16) for side in (m, n))
            work: dict[str, Callable[[], Any]] = {"bf16": partial(torch.mm, left, right.t())}
            eight = left.to(E4M3 if step == "forward" else E5M2), right.to(E4M3)
            by_rows = left.to(E4M3), right.to(E4M3)
            scales = torch.ones(m, 1, device="cuda"), torch.ones(1, n, device="cuda")
            for fast in (True, False):
                word = " fast" if fast else ""
                work[f"fp8{word}"] = partial(scaled_mm, *eight, (one, one), torch.bfloat16, fast=fast)
                work[f"fp8 by rows{word}"] = partial(scaled_mm, *by_rows, scales, torch.bfloat16, fast=fast)
            ms = {kind: milliseconds(each, repeats) for kind, each in work.items()}
            teraflops = {kind: 2 * m * n * k / each / 1e9 for kind, each in ms.items()}
            yield dict(part="product", of=name, step=step, ms=ms, teraflops=teraflops)


def block(scaling: str, compiled: bool, batch: int, length: int, repeats: int) -> Line:
    """One block forward and backward, with the memory it keeps between the two."""
    run = run_from_dict(dict(model=SHAPE, train=dict(seq_len=length, global_batch=batch, dtype="bfloat16")))
    torch.manual_seed(0)
    torch._dynamo.reset()
    with torch.device("cuda"):
        block = Block(run.model, 0)
        for name, parameter in block.named_parameters():
            torch.nn.init.ones_(parameter) if "norm" in name else torch.nn.init.normal_(parameter, std=0.02)
        x = torch.randn(batch, length, run.model.hidden, dtype=torch.bfloat16, requires_grad=True)
        turn_by = rope_cos_sin(run.model, torch.arange(length)[None], torch.bfloat16)
    if scaling != "none":
        use_fp8(block, scaling)
    forward = torch.compile(block.forward) if compiled else block.forward
    grad = torch.randn_like(x)
    kept = 0

    def step() -> None:
        nonlocal kept
        before = torch.cuda.memory_allocated()
        out = forward(x, turn_by, None)[0]
        kept = torch.cuda.memory_allocated() - before
        out.backward(grad)
        block.zero_grad()
        x.grad = None

    whole = milliseconds(step, repeats)
    ahead = milliseconds(lambda: forward(x, turn_by, None), repeats)
    return dict(
        part="block", scaling=scaling, compiled=compiled, ms=whole, forward_ms=ahead, kept_mib=kept / 2**20
    )  # fmt: skip


def blocks(batch: int, length: int, repeats: int) -> Iterator[Line]:
    """Every way to compute a block."""
    for compiled in (False, True):
        for scaling in ("none", "tensorwise", "rowwise"):
            yield block(scaling, compiled, batch, length, repeats)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tiles", action="store_true", help="try other tiles of the casting kernel too")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    need_gpu()
    rows = args.batch * args.seq_len
    lines: list[Line] = []
    for measured in (
        quantising(rows, args.repeats, args.tiles),
        gemms(rows, args.repeats),
        blocks(args.batch, args.seq_len, args.repeats),
    ):
        for line in measured:
            lines.append(line)
            print(json.dumps(line), flush=True)
    if args.output:
        args.output.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
