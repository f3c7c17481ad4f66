"""Records the tensors of a stage by name and size, and which of them are saved for the backward pass; `saved.py` fills it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from shardwise.plan.trainer.rank import PlannedParameter, PlannedRank
from shardwise.run.saved_tensors import ELSEWHERE, quantized_bytes


@dataclass
class Tape:
    """Tensors of a stage by name, and which of them are saved."""

    planned: PlannedRank
    sizes: dict[str, int | Fraction] = field(default_factory=dict)
    saved: set[str] = field(default_factory=set)
    deferred: dict[str, int | Fraction] = field(default_factory=dict)
    """Bytes by name of the inputs and output gradients of GEMMs whose weight gradients can be deferred."""
    parameters: Mapping[str, PlannedParameter] = field(default_factory=dict)
    """The parameters of the current layer, by name."""
    quantized: tuple[str, int] = ("", 0)
    """The tensor that was quantised last, and the count of quantised tensors: consecutive GEMMs quantise their common input once
    (`model/quantized/fp8.py`)."""
    recomputed: frozenset[str] = frozenset()
    """Parts of the current layer that are recomputed in the backward pass."""
    shards: dict[str, str] = field(default_factory=dict)
    """For each sequence gathered over tensor ranks, the shard that is saved instead (`parallel/activations/saving.py`)."""
    made: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The inputs of each rematerialized tensor (`parallel/activations/rematerialize.py`)."""
    away: dict[str, int | Fraction] = field(default_factory=dict)
    """Bytes of tensors that are offloaded (`parallel/activations/swap.py`), if they are saved."""
    few_bits: frozenset[str] = frozenset()
    """Tensors of the current layer that are saved in few bits (`parallel/activations/quantized.py`)."""
    prefix: str = ""
    discarding: bool = False

    @property
    def low_precision(self) -> bool:
        """Whether the compute dtype has 16 bits."""
        return self.planned.width < 4

    @property
    def fused_dispatch(self) -> bool:
        """Whether kernels sort rows by expert (`model/moe/ops.py`)."""
        return self.planned.fused and self.planned.width < 8

    @property
    def fused_gemms(self) -> bool:
        """Whether routers have their own GEMM, and experts a grouped one (`model/moe/router_gemm.py`, `model/moe/layer.py`)."""
        return self.planned.fused and self.planned.run.train.dtype == "bfloat16"

    @property
    def overlaps(self) -> bool:
        """Whether GEMMs at the edges of a part overlap with the tensor collectives beside them (`overlap.py`)."""
        return self.planned.size("tensor") > 1 and self.planned.run.layout.async_tensor

    def make(self, name: str, numel: int | Fraction, width: int = 0) -> str:
        """A tensor of the current layer; returns its name."""
        name = f"{self.prefix}{name}"
        self.sizes[name] = numel * (width or self.planned.width)
        return name

    def save(self, *names: str) -> None:
        """Save some tensors for the backward pass."""
        if not self.discarding:
            for name in (self.shards.get(name, name) for name in names):
                if name in self.made:
                    self.save(*self.made[name])
                else:
                    self.saved.add(name)

    def rematerialized(self, word: str, name: str, *inputs: str) -> None:
        """A tensor that may be rematerialized from its inputs, offloaded, or quantized."""
        if word in self.recomputed:
            self.made[name] = inputs
        elif f"{ELSEWHERE}{word}" in self.recomputed:
            self.away[name] = self.sizes[name]
            self.sizes[name] = 0
        elif word in self.few_bits:
            numel = int(self.sizes[name] // self.planned.width)
            self.sizes[name] = quantized_bytes(numel, self.planned.run.memory.activation_bits)

    def save_new(self, name: str, numel: int | Fraction, width: int = 0) -> None:
        """Save a tensor that nothing else uses."""
        self.save(self.make(name, numel, width))

    def defer(self, source: str, result: str, size: int | Fraction) -> None:
        """The needs of a deferred weight gradient: the GEMM's input, and the gradient of its result, of `size` bytes."""
        self.deferred[source] = self.sizes[source]
        self.deferred[f"{self.prefix}gradient of {result}"] = size

    @contextlib.contextmanager
    def part(self, kind: str, *inputs: str) -> Iterator[None]:
        """A part that may be recomputed: then its inputs are saved, and nothing inside of it."""
        if self.discarding or kind not in self.recomputed:
            yield
            return
        self.save(*inputs)
        self.discarding = True
        yield
        self.discarding = False

    @property
    def totals(self) -> tuple[int | Fraction, int | Fraction, int | Fraction]:
        """Bytes of all saved tensors, of those that are deferred, and of saved ones that are offloaded."""
        saved, away = (sum(sizes.get(name, 0) for name in self.saved) for sizes in (self.sizes, self.away))
        return saved, sum(self.deferred.values()), away
