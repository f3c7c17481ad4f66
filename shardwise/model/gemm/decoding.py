"""GEMMs of captured decode steps by the fastest algorithm that cuBLASLt proposes. PyTorch takes its first proposal. With the few
rows of such a step a GEMM is too short for that to be the best, since one wave of tiles more or less decides.

Algorithms are timed over the matrices of the layers themselves, one after another, as a step reads them: none is in the cache
then. The choice is stored for the next process. Sums may be added in another order than PyTorch's, which nothing here relies on:
`serve.invariant` has GEMMs of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.files import cache_folder
from shardwise.model.device import recover_from_capture
from shardwise.model.gemm.cublaslt import Algorithm, LibraryError, Multiplication, Shape, library, version
from shardwise.model.gemm.tuned import Choices, Chosen

READ_BYTES = 2**28
"""Bytes of matrices that a timing reads, several times the size of a cache."""
REPLAYED = 2
"""Timings, of which the shorter counts."""


@dataclass(frozen=True)
class Kind:
    """Matrices of one shape that a step multiplies, one layer after the other; and whether the residual stream is added."""

    matrices: Sequence[Tensor]
    adds: bool = False


class DecodingGemms:
    """The algorithms for steps of some sizes, by rows, shape of the matrix, and whether another tensor is added."""

    def __init__(self) -> None:
        self.chosen: dict[tuple[int, int, int, bool], Chosen] = {}

    def __call__(self, x: Tensor, matrix: Tensor, residual: Tensor | None = None, adds: bool = True) -> Tensor | None:
        """Rows times a matrix [out, in], written to the residual stream if one is given, or added to it. Returns None where the
        GEMM is left to PyTorch."""
        found = self.chosen.get((len(x), *matrix.shape, residual is not None and adds))
        if found is None or not (x.is_contiguous() and matrix.is_contiguous()):
            return None
        out = x.new_empty(len(x), len(matrix)) if residual is None else residual
        found[0].run(x, matrix.t(), out, found[1], residual if adds else None)
        return out

    def tune(self, kinds: Sequence[Kind], sizes: Sequence[int]) -> None:
        """Find the algorithms for these numbers of rows, unless they are known already."""
        device = kinds[0].matrices[0].device
        if library() is None or torch.version.hip is not None:
            return
        name = torch.cuda.get_device_name(device).replace(" ", "-")
        choices = Choices(device.index, cache_folder("products") / f"serving-{name}-{version()}.json")
        found: dict[Shape, Algorithm | None] = {}
        asked = [(kind, rows, shape) for kind in kinds for rows in sizes if (shape := _shape(kind, rows)) is not None]
        for kind, rows, shape in asked:
            if shape.name not in choices.known and shape not in found:
                found[shape] = fastest(kind, rows, shape)
        if found:
            choices.keep(found)
            torch.cuda.empty_cache()
        for kind, rows, shape in asked:
            with contextlib.suppress(LibraryError):
                if choices.known.get(shape.name) is not None and (made := choices.of(shape)) is not None:
                    self.chosen[rows, *kind.matrices[0].shape, kind.adds] = made


def _shape(kind: Kind, rows: int) -> Shape | None:
    matrix = kind.matrices[0]
    return Shape.of(matrix.new_empty(rows, matrix.shape[1]), matrix.t(), matrix.dtype, kind.adds)


def fastest(kind: Kind, rows: int, shape: Shape) -> Algorithm | None:
    """The algorithm that takes the least time; None where that is PyTorch's."""
    first = kind.matrices[0]
    count = max(2, -(-READ_BYTES // (first.numel() * first.itemsize)))
    matrices = [kind.matrices[n % len(kind.matrices)] for n in range(count)]
    numbers = torch.Generator(first.device).manual_seed(0)
    x = torch.randn(rows, first.shape[1], device=first.device, generator=numbers).to(first.dtype)
    out = torch.zeros(rows, len(first), dtype=first.dtype, device=first.device)
    best, least = None, replayed_seconds([partial(_usual, x, matrix, out, kind.adds) for matrix in matrices])
    try:
        multiplication = Multiplication(shape, first.device.index)
        proposed = multiplication.proposed()
    except LibraryError:
        return None
    for algorithm in proposed:
        base = out if kind.adds else None
        try:
            if not is_right(multiplication, algorithm, x, first, kind.adds):
                continue
            works = [partial(multiplication.run, x, matrix.t(), out, algorithm, base) for matrix in matrices]
            seconds = replayed_seconds(works)
        except (LibraryError, RuntimeError):
            continue
        if seconds < least:
            best, least = algorithm, seconds
    return best


def is_right(multiplication: Multiplication, algorithm: Algorithm, x: Tensor, matrix: Tensor, adds: bool) -> bool:
    """Whether an algorithm's result is that of float32 to rounding, whatever its workspace held before."""
    wanted = x.float() @ matrix.float().t() + float(adds)
    out = torch.ones_like(wanted, dtype=x.dtype)
    torch.full((algorithm.workspace,), 255, dtype=torch.uint8, device=x.device)  # what the allocator hands out next
    multiplication.run(x, matrix.t(), out, algorithm, out if adds else None)
    return bool((out.float() - wanted).abs().max() <= 2**-7 * wanted.abs().max())


def _usual(x: Tensor, matrix: Tensor, out: Tensor, adds: bool) -> None:
    if adds:
        out.addmm_(x, matrix.t())
    else:
        torch.mm(x, matrix.t(), out=out)


def replayed_seconds(works: Sequence[Callable[[], Any]], pool: Any = None) -> float:
    """Seconds of a CUDA graph of all the work, since launching it one by one may take longer."""
    pool = pool or torch.cuda.graph_pool_handle()
    current, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(current)  # memory that was handed out may still be read by what was launched before
    with torch.cuda.stream(stream):
        works[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            for work in works:
                work()
    except BaseException:
        recover_from_capture(current, pool)
        raise
    found = []
    for _ in range(REPLAYED + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1e-3)
    return min(found[1:])
