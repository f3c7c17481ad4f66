"""The GEMMs of packed weights on a GPU, each kernel in several shapes, beside cuBLAS in bfloat16: microseconds and terabytes a
second of what is read of the matrix, for the matrices of Llama-3-8B.

    python benchmarks/gpu/weight_only.py [--kinds int4,int8,fp8] [--rows 1,2,4,8,16,64,256] [--seconds 90]

Kernels are compiled first, by several processes at once. Every result is compared with the dequantised product.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.model.kernels.dequantize import dequantize_int4
from shardwise.model.kernels.gemm.skinny import skinny_gemm_reference
from shardwise.model.kernels.gemm.weight_only import SHAPES, Shape, weight_only_gemm
from shardwise.model.kernels.gemm.weight_only_tiles import TILES, Tile, TileScratch, tile_rows, tiled_gemm
from shardwise.model.kernels.quantize import fp8_rows
from shardwise.model.quantized.matrix import QuantizedMatrix
from shardwise.model.quantized.rounding import round_matrix
from shardwise.run.weights import QUANTIZED
from shardwise.torch_private import scaled_mm

MATRICES = {
    "qkv": (6144, 4096, "norm"),
    "out": (4096, 4096, "residual"),
    "gate_up": (28672, 4096, "gated"),
    "down": (4096, 14336, "residual"),
}
SKINNY = [(1, 0), (1, 4), (1, 8), (1, 16), (2, 0), (2, 2), (2, 8), (4, 0), (4, 4)]
TILED = {
    16: [(64, 128, 4, 4, 528), (64, 256, 4, 3, 528), (64, 128, 4, 5, 1056), (128, 128, 8, 3, 264), (64, 256, 4, 4, 264)],
    64: [(64, 128, 4, 4, 264), (128, 128, 8, 4, 264), (64, 256, 4, 3, 264), (128, 256, 8, 3, 132), (64, 256, 4, 4, 132)],
    128: [(128, 64, 8, 4, 132), (128, 128, 8, 4, 132), (128, 128, 4, 4, 132)],
}  # fmt: skip


@dataclass
class Case:
    """One GEMM with several copies of its matrix, so that none is in the cache when it is read."""

    name: str
    kind: str
    rows: int
    what: str
    x: Tensor
    norm: tuple[Tensor, float] | None
    residual: Tensor | None
    gated: str
    matrices: list[QuantizedMatrix]


def made_case(name: str, kind: str, rows: int, copies: int) -> Case:
    n, k, what = MATRICES[name]
    torch.manual_seed(0)
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02
    first = round_matrix(weight, QUANTIZED[kind], torch.bfloat16)
    assert first is not None
    matrices = [first] + [first.map_rows(torch.clone) for _ in range(copies - 1)]
    norm = (torch.rand(k, device="cuda", dtype=torch.bfloat16) + 0.5, 1e-5) if what != "residual" else None
    residual = torch.randn(rows, n, device="cuda", dtype=torch.bfloat16) if what == "residual" else None
    return Case(name, kind, rows, what, x, norm, residual, "silu" if what == "gated" else "", matrices)


def variants(case: Case, scratch: TileScratch) -> Iterator[tuple[str, Callable[[QuantizedMatrix], Tensor]]]:
    """Names and functions; those of tiles norm first, by PyTorch."""
    x, kind = case.x, case.kind

    def normed() -> Tensor:
        return x if case.norm is None else F.rms_norm(x, x.shape[-1:], *case.norm)

    if case.rows <= 4:
        shapes = SKINNY if case.rows == 1 else [astuple(SHAPES[kind])]
        for each in shapes:
            shape = Shape(*each)

            def skinny(m: QuantizedMatrix, shape: Shape = shape) -> Tensor:
                parts = m.packed, m.scale, m.zero, kind
                return weight_only_gemm(x, *parts, case.norm, case.residual, case.gated, shape)

            yield f"skinny {each}", skinny
    if case.rows >= 2:
        tiled = TILED.get(tile_rows(case.rows), [])
        if case.rows not in (16, 64, 256):
            tiled = [astuple(TILES[kind, tile_rows(case.rows)])]
        for each in tiled:
            tile = Tile(*each)

            def tiles(m: QuantizedMatrix, tile: Tile = tile) -> Tensor:
                parts = m.packed, m.scale, m.zero, kind
                if kind != "fp8":
                    return tiled_gemm(normed(), *parts, scratch, case.residual, case.gated, tile)
                values, scale = fp8_rows(x, case.norm)
                return tiled_gemm(values, *parts, scratch, case.residual, case.gated, tile, scale, torch.bfloat16)

            yield f"tiles {each}", tiles
    if case.rows >= 16:
        if kind == "fp8":

            def scaled(m: QuantizedMatrix) -> Tensor:
                values, scale = fp8_rows(x, case.norm)
                return scaled_mm(
                    values, m.packed.t(), scale, m.scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True
                )

            yield "scaled_mm", scaled
        else:

            def unpacked(m: QuantizedMatrix) -> Tensor:
                if kind == "int4":
                    return F.linear(normed(), dequantize_int4(m.packed, m.scale, m.zero, torch.bfloat16))
                return (F.linear(normed(), m.packed.to(x.dtype)) * m.scale.t()).to(x.dtype)

            yield "dequantize, cuBLAS", unpacked


def microseconds(function: Callable[[int], object], calls: int = 20) -> float:
    """Of one call, from a recorded graph of several."""
    for n in range(3):
        function(n)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for n in range(calls):
            function(n)
    best = float("inf")
    for _ in range(4):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) / calls * 1e3)
    return best


def _nth(function: Callable[[QuantizedMatrix], Tensor], matrices: list[QuantizedMatrix], n: int) -> Tensor:
    return function(matrices[n % len(matrices)])


def compile_one(cell: tuple[str, str, int]) -> None:
    """Run each variant of a case once, in a process of its own; what it compiles stays on disk."""
    case = made_case(*cell, copies=1)
    scratch = TileScratch(torch.device("cuda"))
    for _, function in variants(case, scratch):
        try:
            function(case.matrices[0])
        except Exception:
            continue


def measure(cell: tuple[str, str, int], scratch: TileScratch) -> None:
    name, kind, rows = cell
    n, k, _ = MATRICES[name]
    case = made_case(name, kind, rows, copies=max(2, min(12, int(3e8 / (n * k * 0.5)))))
    first = case.matrices[0]
    plain = [first.dequantized() for _ in range(max(2, min(6, int(4e8 / (n * k * 2)))))]
    base = microseconds(lambda i: F.linear(case.x, plain[i % len(plain)]))
    print(
        f"{kind} {name} [{n}, {k}], {rows} rows: cuBLAS bf16 {base:.1f} us, {2 * n * k / base / 1e6:.2f} TB/s",
        flush=True,
    )
    wanted = skinny_gemm_reference(case.x, plain[0], case.norm, case.residual, case.gated).float()
    alone = skinny_gemm_reference(case.x, plain[0], case.norm).float()
    for label, function in variants(case, scratch):
        try:
            found = function(first).float()
            right = alone if found.shape != wanted.shape or label in ("scaled_mm", "dequantize, cuBLAS") else wanted
            error = float((found - right).norm() / right.norm())
            took = microseconds(partial(_nth, function, case.matrices))
        except Exception as e:
            print(f"    {label:34} {str(e).splitlines()[0][:90]}", flush=True)
            continue
        wrong = "  WRONG" if error > 0.05 else ""
        rate = first.stored_bytes / took / 1e6
        print(
            f"    {label:34} {took:8.1f} us  {rate:5.2f} TB/s  {base / took:5.2f} x bf16  error {error:.4f}{wrong}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", default="int4,fp8,int8")
    parser.add_argument("--rows", default="1,2,4,16,64,256")
    parser.add_argument("--matrices", default=",".join(MATRICES))
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--processes", type=int, default=12)
    args = parser.parse_args()
    begin = time.monotonic()
    rows = [int(each) for each in args.rows.split(",")]
    cells = list(itertools.product(args.matrices.split(","), args.kinds.split(","), rows))
    cells.sort(key=lambda cell: (cell[2], args.kinds.split(",").index(cell[1])))
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        waiting = pool.map_async(compile_one, cells, chunksize=1)
        waiting.wait(args.seconds * 0.6)
        pool.terminate()
    print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
    scratch = TileScratch(torch.device("cuda"))
    for cell in cells:
        if time.monotonic() - begin > args.seconds:
            print(f"no time left for {cell} and what follows")
            break
        measure(cell, scratch)


if __name__ == "__main__":
    main()
