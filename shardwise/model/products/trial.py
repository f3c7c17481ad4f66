"""Which algorithm is fastest for a product, found by trying.

The library proposes by rules, first what should be fastest on a chip that runs at its full clock. A chip that multiplies large
matrices without pause draws all the power it may have and slows its clock, and then the algorithm that uses least energy wins. So
algorithms are timed back to back, on a chip that has been kept busy for as long as it takes to come to that, and each beside
PyTorch's choice before and after it, since clocks drift. Only those that give what PyTorch gives to the last bit take part: sums in
another order would make a run depend on which of them was a microsecond faster on some day.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.model.products.cublaslt import Algorithm, LibraryError, Multiplication, Shape

BUSY = 700.0
"""Milliseconds after which a chip at work has settled on a clock."""
TURN = 45.0
"""Milliseconds for which one is timed. Power and clock follow a change with some delay, and less than that says little."""
ROUNDS = (8, 3, 3)
"""How many take part in each round."""
WORTH = 0.99
"""What part of the time of PyTorch's choice another may take at most."""

Launch = Callable[[], Any]


class Trial:
    """The algorithms for products of one shape, with operands to try them on."""

    def __init__(self, shape: Shape, device: int) -> None:
        self.multiplication = Multiplication(shape, device)
        self.left = _operand(shape.rows, shape.depth, shape.left_turned, shape.left_step, shape.dtype, device)
        self.right = _operand(shape.depth, shape.columns, shape.right_turned, shape.right_step, shape.dtype, device)
        self.out = torch.empty(shape.rows, shape.columns, dtype=shape.out_dtype, device=self.left.device)

    def usual(self) -> None:
        """Multiply by PyTorch's choice."""
        if self.out.dtype == self.left.dtype:
            torch.mm(self.left, self.right, out=self.out)
        else:
            torch.mm(self.left, self.right, out_dtype=self.out.dtype, out=self.out)

    def by(self, algorithm: Algorithm) -> Launch:
        """Multiplies by another."""
        return lambda: self.multiplication.run(self.left, self.right, self.out, algorithm)

    def keep_busy(self) -> None:
        """Multiply until the chip's clock has settled."""
        timed(self.usual, BUSY)

    def fastest(self) -> Algorithm | None:
        """The algorithm to take, or nothing where PyTorch's choice is as good."""
        parts: dict[Algorithm, list[float]] = {algorithm: [] for algorithm in self._right()}
        before = timed(self.usual, TURN)
        for places in ROUNDS:
            ranked = sorted(parts, key=lambda one: statistics.mean(parts[one] or [0.0]))
            parts = {algorithm: parts[algorithm] for algorithm in ranked[:places]}
            for algorithm, mine in parts.items():
                time = timed(self.by(algorithm), TURN)
                after = timed(self.usual, TURN)
                mine.append(2 * time / (before + after))
                before = after
        best = min(parts, key=lambda one: statistics.mean(parts[one]), default=None)
        return best if best is not None and statistics.mean(parts[best]) < WORTH else None

    def _right(self) -> list[Algorithm]:
        """Proposals that give PyTorch's bits, the library's favourite first."""
        self.usual()
        wanted = _sums(self.out)
        found: list[Algorithm] = []
        for algorithm in self.multiplication.proposed():
            try:
                self.by(algorithm)()
            except LibraryError:
                continue
            if all(torch.equal(a, b) for a, b in zip(_sums(self.out), wanted, strict=True)):
                found.append(algorithm)
        return found


def _operand(rows: int, columns: int, turned: bool, step: int, dtype: torch.dtype, device: int) -> Tensor:
    """Random numbers that lie as those of the network do; not of the generator that a run draws from."""
    if turned:
        return _operand(columns, rows, False, step, dtype, device).mT
    generator = torch.Generator(torch.device("cuda", device)).manual_seed(rows + columns)
    whole = torch.empty(rows, step, dtype=dtype, device=generator.device)
    return whole.normal_(generator=generator)[:, :columns]


def _sums(x: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of a matrix's bits by row and by column, to compare it without holding it twice."""
    bits = x.view(torch.int16 if x.element_size() == 2 else torch.int32)
    return bits.sum(0, dtype=torch.int64), bits.sum(1, dtype=torch.int64)


def timed(launch: Launch, milliseconds: float) -> float:
    """Milliseconds of one of as many as fill the time."""
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
