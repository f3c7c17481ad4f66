"""The candidate algorithms for a GEMM: those that return PyTorch's result to the last bit, and are not much slower in a short
timing. Sums in another order would make a run depend on which algorithm was a microsecond faster on some day.

A short timing is not enough to choose by: it sees the chip at its full clock, or at the clock that the previous kernel has left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.model.gemm.cublaslt import Algorithm, LibraryError, Multiplication, Shape
from shardwise.torch_private import scaled_mm

GLANCE = 4.0
"""Milliseconds for which each algorithm is timed, twice."""
SLOWER = 1.1
"""How much slower than the best an algorithm may seem and still be a candidate."""
MOST = 6
"""The most candidates; each further one makes all of them harder to tell apart."""


class Candidates:
    """The algorithms for GEMMs of one shape, with operands to try them on."""

    def __init__(self, shape: Shape, device: int) -> None:
        self.multiplication = Multiplication(shape, device)
        self.fast = shape.fast
        self.left = _operand(shape.rows, shape.depth, shape.left_transposed, shape.left_step, shape.left_dtype, device)
        self.right = _operand(
            shape.depth, shape.columns, shape.right_transposed, shape.right_step, shape.right_dtype, device
        )
        self.out = torch.empty(shape.rows, shape.columns, dtype=shape.out_dtype, device=self.left.device)
        self.base: Tensor | None = None
        if shape.adds:
            self.base = _operand(shape.rows, shape.columns, False, shape.columns, shape.out_dtype, device)

    def found(self) -> list[Algorithm]:
        """The candidates, the fastest in a short timing first."""
        times = [(min(timed(self._by(one), GLANCE) for _ in range(2)), one) for one in self._exact()]
        times.sort(key=lambda pair: pair[0])
        return [one for time, one in times[:MOST] if time < SLOWER * times[0][0]]

    def _exact(self) -> list[Algorithm]:
        """Proposals that return PyTorch's bits. Where PyTorch has no such GEMM, the other proposals that return the first one's
        bits."""
        proposed = self.multiplication.proposed()
        if self.base is not None:
            self._by(proposed.pop(0))()
        elif self.left.element_size() == 1:
            one = self.multiplication.one
            self.out = scaled_mm(self.left, self.right, one, one, out_dtype=self.out.dtype, use_fast_accum=self.fast)
        elif self.out.dtype == self.left.dtype:
            torch.mm(self.left, self.right, out=self.out)
        else:
            torch.mm(self.left, self.right, out_dtype=self.out.dtype, out=self.out)
        wanted = _sums(self.out)
        exact: list[Algorithm] = []
        for algorithm in proposed:
            try:
                self._by(algorithm)()
            except LibraryError:
                continue
            if all(torch.equal(a, b) for a, b in zip(_sums(self.out), wanted, strict=True)):
                exact.append(algorithm)
        return exact

    def _by(self, algorithm: Algorithm) -> Callable[[], Any]:
        return lambda: self.multiplication.run(self.left, self.right, self.out, algorithm, self.base)


def _operand(rows: int, columns: int, transposed: bool, step: int, dtype: torch.dtype, device: int) -> Tensor:
    """Random values in the memory layout of the network's operands; not drawn from the run's generator."""
    if transposed:
        return _operand(columns, rows, False, step, dtype, device).mT
    generator = torch.Generator(torch.device("cuda", device)).manual_seed(rows + columns)
    drawn = torch.bfloat16 if dtype.itemsize == 1 else dtype
    whole = torch.empty(rows, step, dtype=drawn, device=generator.device)
    return whole.normal_(generator=generator).to(dtype)[:, :columns]


def _sums(x: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of a matrix's bits by row and by column, to compare it without holding it twice."""
    bits = x.view(torch.int16 if x.element_size() == 2 else torch.int32)
    return bits.sum(0, dtype=torch.int64), bits.sum(1, dtype=torch.int64)


def timed(launch: Callable[[], Any], milliseconds: float) -> float:
    """Mean milliseconds of a launch, over as many launches as fill the time."""
    start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    start.record()
    launch()
    middle.record()
    middle.synchronize()
    times = max(2, int(milliseconds / start.elapsed_time(middle)))
    middle.record()
    for _ in range(times):
        launch()
    end.record()
    end.synchronize()
    return middle.elapsed_time(end) / times
