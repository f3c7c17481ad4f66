"""The list of tensors that a stage saves, and the small parts that write on it: products, norms, gathered sequences."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction

from shardwise.plan.trainer.rank import SCALE, Place
from shardwise.run.derive import uses_fp8_all_gather, uses_fp8_gemm

PLACE = 4
"""Bytes of a place in a batch of rows: where an expert's end, where a choice lies."""


@dataclass
class Tape:
    """Tensors of a stage by name, and which of them are kept."""

    place: Place
    sizes: dict[str, int | Fraction] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    products: dict[str, int] = field(default_factory=dict)
    """Inputs of the products whose weights' gradients can be put off, with bytes of the results."""
    again: frozenset[str] = frozenset()
    """Parts of the present layer that the backward pass computes again."""
    prefix: str = ""
    discarding: bool = False

    @property
    def narrow(self) -> bool:
        """Whether the arithmetic has 16 bits."""
        return self.place.width < 4

    @property
    def casts(self) -> bool:
        """Whether weights are cast where they are used."""
        return self.narrow and not self.place.shared

    @property
    def moves_rows(self) -> bool:
        """Whether kernels lay rows in the order of their experts (`model/expert_rows.py`)."""
        return self.place.fused and self.place.width < 8

    @property
    def in_parts(self) -> bool:
        """Whether routers multiply in parts, and experts all at once (`model/router_gemm.py`, `model/experts.py`)."""
        return self.place.fused and self.place.run.train.dtype == "bfloat16"

    @property
    def overlaps(self) -> bool:
        """Whether products at the edges of a part are made while their input or result travels (`overlap.py`)."""
        return self.place.sizes["tensor"] > 1 and self.place.run.layout.async_tensor

    def make(self, name: str, numbers: int | Fraction, width: int = 0) -> str:
        """A tensor of the present layer, of so many numbers; gives its name."""
        name = f"{self.prefix}{name}"
        self.sizes[name] = numbers * (width or self.place.width)
        return name

    def keep(self, *names: str) -> None:
        """Keep some tensors for the backward pass."""
        if not self.discarding:
            self.kept.update(names)

    def own(self, name: str, numbers: int | Fraction, width: int = 0) -> None:
        """Keep a tensor that nothing else keeps."""
        self.keep(self.make(name, numbers, width))

    @contextlib.contextmanager
    def part(self, kind: str, *inputs: str) -> Iterator[None]:
        """A part that may be computed again: then its inputs are kept, and nothing inside of it."""
        if self.discarding or kind not in self.again:
            yield
            return
        self.keep(*inputs)
        self.discarding = True
        yield
        self.discarding = False

    @property
    def total(self) -> int | Fraction:
        """Bytes of all that is kept."""
        return sum(self.sizes[name] for name in self.kept)


def linear(
    tape: Tape, x: str, name: str, rows: int, columns: int, inner: int, *, edge: bool = False, whole: bool = True
) -> str:
    """A product with a weight of columns x inner numbers, or with that part of it where it is not the `whole`; at the `edge`
    of a part, it may overlap with tensor traffic."""
    place = tape.place
    if tape.prefix and uses_fp8_gemm(place.run, columns, inner):
        return _eight_bits(tape, x, name, rows, columns, inner, whole=whole)
    tape.keep(x)
    if tape.prefix and not (edge and tape.overlaps):
        tape.products[x] = tape.products.get(x, 0) + rows * columns * place.width
    if tape.casts and not (tape.prefix and place.keeps_compute_copies):
        tape.own(f"{name} weight", columns * inner)
    return tape.make(name, rows * columns)


def _eight_bits(tape: Tape, x: str, name: str, rows: int, columns: int, inner: int, *, whole: bool) -> str:
    """The same in 8 bits (`model/fp8.py`)."""
    place, by_tensor = tape.place, tape.place.run.train.fp8 == "tensorwise"
    ranks = place.sizes["zero"]
    if by_tensor:
        source = f"{x} turned"
        tape.sizes[source] = rows * inner + SCALE
        result = rows * columns + SCALE
    else:
        source, result = x, rows * columns * place.width
    tape.keep(source)
    tape.products[source] = tape.products.get(source, 0) + result
    if not (place.shared and whole and uses_fp8_all_gather(place.run, columns, inner, ranks)):
        tape.own(f"{name} weight turned", columns * inner + SCALE * (1 if by_tensor else inner), 1)
    return tape.make(name, rows * columns)


def norm(tape: Tape, x: str, name: str, rows: int, width: int, *, centered: bool = False) -> str:
    """A norm of rows of so many numbers."""
    wide = tape.place.wide
    with tape.part("norm", x):
        if tape.casts:
            tape.own(f"{name} weight", (2 if centered else 1) * width)
        if centered:
            tape.keep(x)
            tape.own(f"{name} statistics", 2 * rows, wide if tape.place.fused else 0)
        else:
            if tape.place.fused or not tape.narrow:
                tape.keep(x)
            else:
                tape.own(f"{name} widened", rows * width, wide)
            tape.own(f"{name} lengths", rows, wide)
            if not tape.place.fused:
                tape.own(f"{name} unit", rows * width, wide)
    return tape.make(name, rows * width)


def gathered(tape: Tape, x: str, name: str) -> str:
    """A piece of the sequence from every tensor rank."""
    place = tape.place
    return x if place.sizes["tensor"] == 1 else tape.make(name, place.tokens * place.run.model.hidden)
