"""GEMMs and attention at a chip's highest clock, as the planner's kernels are: each call behind a rest of twice its time.

    python benchmarks/gpu/cool_kernels.py [--out FILE]

GEMMs of layers and heads, of whole models and of tensor ranks, forward and for both gradients: in bfloat16, in fp8 with one scale a
matrix and with one a row, with and without fast accumulation, and of experts; and cuDNN's causal attention. Medians of single
calls; between them the caches are overwritten. `benchmarks/fit_hardware.py` fits the planner's constants to the rows of FILE
(`cool` in `h200_kernels.json`).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

TOKENS = (2048, 4096, 8192, 16384)
MATRICES = (
    (6144, 4096), (4096, 4096), (14336, 4096), (4096, 14336),  # rows and columns of weights: Llama 3 8B
    (7168, 5120), (5120, 5120), (17408, 5120), (5120, 17408), (34816, 5120),  # Qwen3 14B
    (1280, 5120), (5120, 1280), (6912, 5120), (5120, 6912),  # Qwen2.5 32B, a quarter
    (10240, 8192), (8192, 8192), (28672, 8192), (8192, 28672),  # Llama 3 70B
    (1024, 8192), (8192, 1024), (3584, 8192), (8192, 3584), (7168, 8192), (8192, 7168),  # and parts of it
    (2048, 16384), (16384, 2048), (6656, 16384), (16384, 6656),  # Llama 3 405B, an eighth
    (24576, 1536), (32768, 512), (16384, 7168), (7168, 16384), (2048, 7168),  # DeepSeek-V3
    (4096, 2048), (2048, 2048), (768, 2048), (2048, 4096),  # Qwen3 30B-A3B
    (32064, 4096), (128256, 4096), (75968, 5120), (151936, 2048), (16032, 8192),  # heads
)  # fmt: skip
EXPERTS = (
    (1, 14336, 4096),
    (2, 14336, 4096),
    (8, 768, 2048),
    (16, 768, 2048),
    (32, 2048, 7168),
    (8, 2048, 7168),
    (2, 8192, 6144),
)
"""Experts of a rank, and rows and columns of theirs."""
ATTENTION = (
    (32, 32, 128, 128), (32, 8, 128, 128), (16, 2, 128, 128), (8, 1, 128, 128), (40, 8, 128, 128), (64, 8, 128, 128),
    (16, 16, 64, 64), (32, 32, 96, 96), (16, 16, 256, 256), (8, 1, 256, 256), (32, 32, 192, 128), (128, 128, 192, 128),
    (32, 32, 136, 128), (32, 32, 160, 160),
)  # fmt: skip
"""Heads, heads of keys and values, width of keys and of values."""
LENGTHS = ((4, 1024), (1, 2048), (2, 2048), (1, 4096), (2, 4096), (1, 8192), (1, 16384), (1, 32768), (1, 65536))
"""Sequences and their tokens."""
LONGEST = 40.0
"""Estimated milliseconds of a call beyond which it is left out."""
TIMES, REST = 5, 2.0
MOST = 20e9
"""Bytes of a GEMM's matrices, beyond which it is left out."""
LAYOUTS = ("TN", "NN", "NT")
"""Of cuBLAS: of a layer's GEMM, and of those for the gradients of its input and its weight."""


class Cool:
    """Times single calls behind rests."""

    def __init__(self) -> None:
        self.flushed = torch.empty(2**26, device="cuda", dtype=torch.int32)
        torch.cuda._sleep(10**7)
        self.cycles = 1e7 / self._span(lambda: torch.cuda._sleep(10**7))

    def _span(self, act: Callable[[], object]) -> float:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in "be")
        began.record()
        act()
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended)

    def seconds(self, act: Callable[[], object]) -> float:
        act()
        once, took = self._span(act), []
        for _ in range(TIMES):
            self.flushed.zero_()
            torch.cuda._sleep(int(REST * once * self.cycles))
            took.append(self._span(act))
        return 1e-3 * statistics.median(took)


def random(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, device="cuda", dtype=torch.bfloat16)


def gemm(m: int, n: int, k: int, layout: str) -> Callable[[], object]:
    """m x k by k x n. The layout is cuBLAS', which multiplies the transposes."""
    left = random(k, m).t() if layout == "NT" else random(m, k)
    right = random(n, k).t() if layout == "TN" else random(k, n)
    return lambda: torch.mm(left, right)


def fp8_gemm(m: int, n: int, k: int, scaling: str, fast: bool) -> Callable[[], object]:
    left, right = (random(size, k).to(torch.float8_e4m3fn) for size in (m, n))
    one = [(size, 1) if scaling == "rowwise" else () for size in (m, n)]
    scales = [torch.ones(size, device="cuda") for size in one]
    by_column = scales[1].t() if scaling == "rowwise" else scales[1]
    return lambda: torch._scaled_mm(
        left, right.t(), scales[0], by_column, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def of_layer(tokens: int, rows: int, columns: int) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Layout and sizes of a layer's three GEMMs."""
    yield from zip(LAYOUTS, ((tokens, rows, columns), (tokens, columns, rows), (columns, rows, tokens)), strict=True)


def attention(
    batch: int, length: int, heads: int, kv_heads: int, width: int, values: int, backward: bool
) -> Callable[[], object]:
    def states(count: int, columns: int) -> torch.Tensor:
        x = torch.randn(batch, length, count, columns, device="cuda", dtype=torch.bfloat16)
        return x.transpose(1, 2).requires_grad_(backward)

    q, k, v = states(heads, width), states(kv_heads, width), states(kv_heads, values)

    def forward() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    if not backward:
        return forward
    out = forward()
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)


def cases() -> Iterator[tuple[dict[str, Any], Callable[[], Callable[[], object]]]]:
    """What is measured, and a function that makes its matrices."""
    for tokens, (rows, columns) in product(TOKENS, MATRICES):
        if 2 * (tokens * (rows + columns) + rows * columns) > MOST:
            continue
        for layout, (m, n, k) in of_layer(tokens, rows, columns):
            sizes = dict(m=m, n=n, k=k)
            yield dict(kind="gemm", **sizes, layout=layout, dtype="bfloat16"), partial(gemm, m, n, k, layout)
            if tokens not in (4096, 8192) or max(rows, columns) > 40_000:
                continue
            for scaling in ("tensorwise", "rowwise"):
                for fast in (True, False):
                    yield (
                        dict(kind="fp8", **sizes, layout=layout, scaling=scaling, fast=fast),
                        partial(fp8_gemm, m, n, k, scaling, fast),
                    )
    for tokens, (experts, rows, columns) in product(TOKENS, EXPERTS):
        ends = torch.arange(1, experts + 1, device="cuda", dtype=torch.int32) * (tokens // experts)
        for way in LAYOUTS:
            yield (
                dict(kind="grouped", experts=experts, tokens=tokens, n=rows, k=columns, layout=way),
                partial(grouped, tokens, experts, rows, columns, ends, way),
            )
    for (heads, kv_heads, width, values), (batch, length) in product(ATTENTION, LENGTHS):
        for backward in (False, True):
            flops = batch * heads * length**2 * (width + values) * (2.5 if backward else 1.0)
            if flops / 500e9 > LONGEST:
                continue
            sizes = dict(batch=batch, heads=heads, kv_heads=kv_heads, queries=length, head_dim=width, v_dim=values)
            yield (
                dict(kind="attention", **sizes, direction="backward" if backward else "forward"),
                partial(attention, batch, length, heads, kv_heads, width, values, backward),
            )


def grouped(tokens: int, experts: int, rows: int, columns: int, ends: torch.Tensor, way: str) -> Callable[[], object]:
    x, y, weight = random(tokens, columns), random(tokens, rows), random(experts, rows, columns)
    if way == "TN":
        return lambda: torch._grouped_mm(x, weight.transpose(1, 2), ends)
    if way == "NN":
        return lambda: torch._grouped_mm(y, weight, ends)
    return lambda: torch._grouped_mm(y.t(), x, ends)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--kinds", nargs="*", default=["gemm", "fp8", "grouped", "attention"])
    args = parser.parse_args()
    cool, rows = Cool(), []
    for what, make in cases():
        if what["kind"] not in args.kinds:
            continue
        try:
            rows.append(what | dict(seconds=float(f"{cool.seconds(make()):.4g}")))
        except RuntimeError as error:
            print("left out", what, str(error).splitlines()[0])
    print(torch.cuda.get_device_name(), len(rows), "kernels")
    if args.out:
        args.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
