"""How long a step of the engine takes: the matrices once for all its tokens, attention for each kind of them, and the host.

Costs are those of `cost.py`. A played load asks for tens of thousands of steps, so parts are computed on a grid, eight sizes to
each doubling, and kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import log2

from shardwise.plan.serving.cost import Serving, Shape, layer_cost, weight_gemm_seconds
from shardwise.plan.serving.cost import pass_cost as whole_pass

GRID = 8
"""Sizes to each doubling."""
FEW = 512
"""Tokens up to which a step mostly reads matrices, as decoding does."""


def on_grid(value: float) -> float:
    """The nearest size of the grid."""
    return 2.0 ** (round(log2(max(1.0, value)) * GRID) / GRID)


@dataclass(frozen=True)
class StepTime:
    """The time of steps of one engine, with its fitted constants."""

    serving: Serving
    constants: Mapping[str, float]
    _kept: dict[tuple[str, float, float], float] = field(default_factory=dict, compare=False)

    def seconds(self, decodes: int, keys: int, chunks: list[tuple[int, int]], sampled: int) -> float:
        """A step of so many decoding sequences with so many tokens among them, and of chunks of prompts: tokens before, and new.
        The next token of `sampled` sequences is picked."""
        tokens = decodes + sum(count for _, count in chunks)
        total = self._linear(tokens) + self._head(sampled)
        if decodes:
            total += self._decode(decodes, keys / decodes)
        for before, count in chunks:
            total += self._prompt(count) * (1 + 2 * before / count)
        graph = not chunks and self.serving.engine.graphs
        kernels = self._kernels
        device = total + (self.constants["gap"] * kernels if graph else 0.0)
        host = self.constants["launch"] * self.serving.engine.launch * kernels
        busy = device if graph else (device**4 + host**4) ** 0.25
        return busy + self.constants["step"] * self.serving.engine.step

    @cached_property
    def _kernels(self) -> float:
        return whole_pass(self.serving, Shape(1, 1, 1, True)).kernels

    def _weighed(self, tokens: float, attention: bool, shape: Shape) -> float:
        s, total = self.serving, 0.0
        for routed, count in ((False, s.model.layers - s.routed_layers), (True, s.routed_layers)):
            if count:
                cost = layer_cost(s, shape, routed=routed)
                kinds = {k: v for k, v in cost.seconds.items() if (k == "attention") == attention}
                total += count * sum(self.constants[kind] * value for kind, value in kinds.items())
                if not attention:
                    total += count * self.constants["wait"] * s.engine.wait * cost.waits
        return total

    def _linear(self, tokens: float) -> float:
        """Everything but attention and the head."""
        size = on_grid(tokens)
        key = ("linear", size, 0.0)
        if key not in self._kept:
            shape = Shape(size, 1, 1, True) if size <= FEW else Shape(1, size, size, False)
            self._kept[key] = self._weighed(size, False, shape)
        return self._kept[key] * tokens / size if size > FEW else self._kept[key]

    def _head(self, rows: float) -> float:
        if not rows:
            return 0.0
        size, s = on_grid(rows), self.serving
        key = ("head", size, 0.0)
        if key not in self._kept:
            seconds = weight_gemm_seconds(s.chip, size, s.model.vocab / s.tensor, s.model.hidden, s.head_weights)
            self._kept[key] = self.constants["read"] * seconds
        return self._kept[key]

    def _decode(self, sequences: float, keys: float) -> float:
        """Attention of single tokens."""
        size, length = on_grid(sequences), on_grid(keys)
        key = ("decode", size, length)
        if key not in self._kept:
            self._kept[key] = self._weighed(size, True, Shape(size, 1, length, True))
        return self._kept[key] * (sequences * keys) / (size * length)

    def _prompt(self, count: float) -> float:
        """Attention of a prompt to itself."""
        size = on_grid(count)
        key = ("prompt", size, 0.0)
        if key not in self._kept:
            self._kept[key] = self._weighed(size, True, Shape(1, size, size, False))
        return self._kept[key] * (count / size) ** 2
