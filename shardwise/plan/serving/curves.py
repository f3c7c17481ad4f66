"""Measured steps of the engine as curves: the factor of measured over modelled time.

Layers were measured in a few shapes. Between the sizes of one shape, the log of the factor is interpolated over the log of the
size; another shape takes the mean of the measured shapes, weighted by the inverse square of its distance to them. So the cost model
sets the form, and the measurements set the level.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shardwise.hardware.engine_facts import EngineFacts
from shardwise.hardware.profile import LAYER

Shape = tuple[float, ...]
Model = Callable[..., float]
"""Seconds by the cost model, for a shape and sizes."""
LEAST = 0.02
"""Lower limit of a factor: a time measured as the difference of two may come out as zero."""


@dataclass(frozen=True)
class Line:
    """Logarithms of factors over the logarithm of a size."""

    at: tuple[float, ...]
    logs: tuple[float, ...]

    @classmethod
    def of(cls, points: Iterable[tuple[float, float]]) -> Line:
        """From pairs of size and factor."""
        ordered = sorted(points)
        return cls(
            tuple(float(np.log2(size)) for size, _ in ordered),
            tuple(float(np.log(max(factor, LEAST))) for _, factor in ordered),
        )

    def log(self, size: float) -> float:
        """The log of the factor, interpolated between the two nearest sizes; beyond the ends, that of the first or last size."""
        return float(np.interp(np.log2(max(size, 1e-9)), self.at, self.logs))


@dataclass(frozen=True)
class ShapeCurves:
    """The factors of layers of one shape."""

    decode: dict[float, Line]
    """By number of sequences: over the keys of each sequence."""
    together: Line
    """Steps of many short prompts: over all their tokens."""
    alone: Line
    """Steps of one prompt: over its tokens."""
    after: Line
    """Attention of a chunk to the tokens before it: over the tokens of the chunk."""
    short: float
    """Tokens of a short prompt."""

    def decode_log(self, sequences: float, keys: float) -> float:
        """The log of the factor of a decode step."""
        rows = sorted(self.decode)
        logs = [self.decode[row].log(keys) for row in rows]
        return float(np.interp(np.log2(sequences), np.log2(rows), logs))

    def prompt_log(self, tokens: float, each: float) -> float:
        """The log of the factor of a prefill step of `tokens` tokens in chunks of `each`."""
        span = np.log2(max(tokens, 2 * self.short) / self.short)
        share = float(np.clip(np.log2(max(each, 1.0) / self.short) / span, 0.0, 1.0)) if tokens > self.short else 1.0
        return share * self.alone.log(tokens) + (1 - share) * self.together.log(tokens)


class Curves:
    """All measurements relative to a cost model: `decode(shape, sequences, keys)`, `prompt(shape, prompts, tokens)`,
    `before(shape, tokens, before)` and `pick(hidden, vocab, rows)` return its seconds on the measured chip."""

    def __init__(
        self, facts: EngineFacts, weights: str, decode: Model, prompt: Model, before: Model, pick: Model
    ) -> None:
        self.facts = facts
        self._models = decode, prompt, before, pick
        self._weights = weights

    def _points(self, kind: str) -> list[dict[str, Any]]:
        return self.facts.profile.points(kind, (self._weights,))

    @cached_property
    def _shapes(self) -> dict[Shape, ShapeCurves]:
        decode, prompt, before, _ = self._models
        found = {}
        for shape in dict.fromkeys(_shape(point) for point in self._points("decode")):
            rows: dict[float, list[tuple[float, float]]] = {}
            for point in (each for each in self._points("decode") if _shape(each) == shape):
                modelled = decode(shape, point["sequences"], point["keys"])
                rows.setdefault(point["sequences"], []).append((point["keys"], point["seconds"] / modelled))
            prompts = [point for point in self._points("prompt") if _shape(point) == shape]
            fresh = [point for point in prompts if point["keys"] == point["tokens"]]
            factors = [(p, p["seconds"] / prompt(shape, p["prompts"], p["tokens"])) for p in fresh]
            alone = Line.of((p["tokens"], factor) for p, factor in factors if p["prompts"] == 1)
            together = [(p["prompts"] * p["tokens"], factor) for p, factor in factors if p["prompts"] > 1]
            after = []
            for point in (each for each in prompts if each["keys"] > each["tokens"]):
                count = point["tokens"]
                rest = point["seconds"] - np.exp(alone.log(count)) * prompt(shape, 1, count)
                after.append((count, rest / before(shape, count, point["keys"] - count)))
            short = min((p["tokens"] for p in fresh if p["prompts"] > 1), default=1)
            lines = {row: Line.of(each) for row, each in rows.items()}
            found[shape] = ShapeCurves(lines, Line.of(together) if together else alone, alone, Line.of(after), short)
        return found

    @cached_property
    def _picks(self) -> dict[Shape, Line]:
        pick = self._models[3]
        found: dict[Shape, list[tuple[float, float]]] = {}
        for point in self._points("pick"):
            modelled = pick(point["hidden"], point["vocab"], point["rows"])
            found.setdefault((point["hidden"], point["vocab"]), []).append((point["rows"], point["seconds"] / modelled))
        return {shape: Line.of(each) for shape, each in found.items()}

    def decode(self, shape: Shape, sequences: float, keys: float) -> float:
        """The factor of a decode step, one token per sequence."""
        return self._mean(shape, self._shapes, lambda curves: curves.decode_log(sequences, keys))

    def prompt(self, shape: Shape, tokens: float, each: float) -> float:
        """The factor of a prefill step, without the attention to earlier tokens."""
        return self._mean(shape, self._shapes, lambda curves: curves.prompt_log(tokens, each))

    def after(self, shape: Shape, each: float) -> float:
        """The factor of the attention to earlier tokens."""
        return self._mean(shape, self._shapes, lambda curves: curves.after.log(each))

    def pick(self, hidden: float, vocab: float, rows: float) -> float:
        """The factor of the head and the sampling."""
        return self._mean((hidden, vocab), self._picks, lambda line: line.log(rows))

    def _mean(self, shape: Shape, curves: dict[Shape, Any], log: Callable[[Any], float]) -> float:
        weights = np.array([1.0 / (_distance(shape, other) + 1e-6) for other in curves])
        logs = np.array([log(each) for each in curves.values()])
        return float(np.exp((weights * logs).sum() / weights.sum()))


def _shape(point: dict[str, Any]) -> Shape:
    return tuple(float(point[name]) for name in LAYER)


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(float(np.log2(max(a, 1.0) / max(b, 1.0))) ** 2 for a, b in zip(one, other, strict=True))
