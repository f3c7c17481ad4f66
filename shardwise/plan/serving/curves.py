"""Measured steps of the engine as curves: the factor of measured over modelled time.

Layers were measured in a few shapes. Between the sizes of one shape, the log of the factor is interpolated over the log of the
size; another shape takes the mean of the measured shapes, weighted by the inverse square of its distance to them. So the cost model
sets the form, and the measurements set the level.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
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
TOUCH = 16.0
"""So few keys that attention takes hardly any time."""


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
    linear: Line
    """A prefill step without its attention: over all its tokens."""
    prompt: float
    """Attention of a prompt to itself."""
    each: float
    """Seconds that every prompt of a step adds, however short."""
    after: Line
    """Attention of a chunk to the tokens before it: over the tokens of the chunk."""
    mixed: float
    """Attention of decoding sequences beside prompts, over that of a step without prompts."""

    def decode_log(self, sequences: float, keys: float) -> float:
        """The log of the factor of a decode step."""
        rows = sorted(self.decode)
        logs = [self.decode[row].log(keys) for row in rows]
        return float(np.interp(np.log2(sequences), np.log2(rows), logs))


class Curves:
    """All measurements relative to a cost model: `decode(shape, sequences, keys)`, `linear(shape, tokens)`, `attention(shape,
    prompts, tokens)`, `before(shape, tokens, before)` and `pick(hidden, vocab, rows)` return its seconds on the measured chip."""

    def __init__(
        self, facts: EngineFacts, weights: str, decode: Model, linear: Model, attention: Model, before: Model,
        pick: Model,
    ) -> None:  # fmt: skip
        self.facts = facts
        self._decode, self._linear, self._attention, self._before, self._pick = decode, linear, attention, before, pick
        self._weights = weights

    def _points(self, kind: str) -> list[dict[str, Any]]:
        return self.facts.profile.points(kind, (self._weights,))

    @cached_property
    def _shapes(self) -> dict[Shape, ShapeCurves]:
        return {
            shape: self._curves_of(shape) for shape in dict.fromkeys(_shape(each) for each in self._points("decode"))
        }

    def _curves_of(self, shape: Shape) -> ShapeCurves:
        rows: dict[float, list[tuple[float, float]]] = {}
        for point in (each for each in self._points("decode") if _shape(each) == shape):
            modelled = self._decode(shape, point["sequences"], point["keys"])
            rows.setdefault(point["sequences"], []).append((point["keys"], point["seconds"] / modelled))
        prompts = [point for point in self._points("prompt") if _shape(point) == shape]
        fresh = [point for point in prompts if point["keys"] == point["tokens"]]
        factor, each = self._attention_of(shape, fresh)

        def rest(point: dict[str, Any]) -> float:
            prompts, tokens = point["prompts"], point["tokens"]
            return float(point["seconds"] - prompts * each - factor * self._attention(shape, prompts, tokens))

        totals: dict[float, list[float]] = {}
        for point in fresh:
            total = point["prompts"] * point["tokens"]
            totals.setdefault(total, []).append(rest(point) / self._linear(shape, total))
        linear = Line.of((total, float(np.mean(found))) for total, found in totals.items())
        after = []
        for point in (each for each in prompts if each["keys"] > each["tokens"]):
            count = point["tokens"]
            behind = rest(point) - np.exp(linear.log(count)) * self._linear(shape, count)
            after.append((count, behind / self._before(shape, count, point["keys"] - count)))
        curves = ShapeCurves(
            {row: Line.of(each) for row, each in rows.items()}, linear, factor, each, Line.of(after), 1.0
        )
        return replace(curves, mixed=self._mixed_of(shape, curves))

    def _attention_of(self, shape: Shape, fresh: list[dict[str, Any]]) -> tuple[float, float]:
        """The factor of the attention of prompts, and the seconds that each adds: what one long prompt and many short ones differ
        in that have as many tokens, by least squares of relative errors."""
        alone = {point["tokens"]: point["seconds"] for point in fresh if point["prompts"] == 1}
        differences, terms = [], []
        for point in fresh:
            count, total = point["prompts"], point["prompts"] * point["tokens"]
            if count > 1 and total in alone:
                short, long = self._attention(shape, count, point["tokens"]), self._attention(shape, 1, total)
                differences.append((alone[total] - point["seconds"]) / point["seconds"])
                terms.append(((long - short) / point["seconds"], (1 - count) / point["seconds"]))
        if not terms:
            return 1.0, 0.0
        matrix, wanted = np.array(terms), np.array(differences)
        factor, each = np.linalg.lstsq(matrix, wanted, rcond=None)[0]
        if each < 0:
            factor, each = (matrix[:, 0] @ wanted) / (matrix[:, 0] @ matrix[:, 0]), 0.0
        return max(float(factor), LEAST), float(each)

    def _mixed_of(self, shape: Shape, curves: ShapeCurves) -> float:
        """What decoding sequences add to prompts in all the measured steps, over their attention in steps of their own."""

        def decode(sequences: float, keys: float) -> float:
            return float(np.exp(curves.decode_log(sequences, keys))) * self._decode(shape, sequences, keys)

        added, alone = 0.0, 0.0
        for point in (point for point in self._points("mixed") if _shape(point) == shape):
            sequences, prompts, tokens = point["sequences"], point["prompts"], point["tokens"]
            total = sequences + prompts * tokens
            added += point["seconds"] - float(np.exp(curves.linear.log(total))) * self._linear(shape, total)
            added -= prompts * curves.each + curves.prompt * self._attention(shape, prompts, tokens)
            alone += max(0.0, decode(sequences, point["keys"]) - decode(sequences, TOUCH))
        return max(added / alone, LEAST) if alone else 1.0

    @cached_property
    def _picks(self) -> dict[Shape, Line]:
        found: dict[Shape, list[tuple[float, float]]] = {}
        for point in self._points("pick"):
            modelled = self._pick(point["hidden"], point["vocab"], point["rows"])
            found.setdefault((point["hidden"], point["vocab"]), []).append((point["rows"], point["seconds"] / modelled))
        return {shape: Line.of(each) for shape, each in found.items()}

    def decode(self, shape: Shape, sequences: float, keys: float) -> float:
        """The factor of a decode step, one token per sequence."""
        return self._mean(shape, self._shapes, lambda curves: curves.decode_log(sequences, keys))

    def linear(self, shape: Shape, tokens: float) -> float:
        """The factor of a prefill step without its attention."""
        return self._mean(shape, self._shapes, lambda curves: curves.linear.log(tokens))

    def prompt(self, shape: Shape) -> tuple[float, float]:
        """The factor of the attention of a prompt to itself, and the seconds that every prompt of a step adds to a layer."""
        each = _weighted(shape, {other: curves.each for other, curves in self._shapes.items()})
        return self._mean(shape, self._shapes, lambda curves: float(np.log(curves.prompt))), each

    def mixed(self, shape: Shape) -> float:
        """The factor of the attention of decoding sequences beside prompts."""
        return self._mean(shape, self._shapes, lambda curves: float(np.log(curves.mixed)))

    def after(self, shape: Shape, each: float) -> float:
        """The factor of the attention to earlier tokens."""
        return self._mean(shape, self._shapes, lambda curves: curves.after.log(each))

    def pick(self, hidden: float, vocab: float, rows: float) -> float:
        """The factor of the head and the sampling."""
        return self._mean((hidden, vocab), self._picks, lambda line: line.log(rows))

    def _mean(self, shape: Shape, curves: dict[Shape, Any], log: Callable[[Any], float]) -> float:
        return float(np.exp(_weighted(shape, {other: log(each) for other, each in curves.items()})))


def _shape(point: dict[str, Any]) -> Shape:
    return tuple(float(point[name]) for name in LAYER)


def _weighted(shape: Shape, values: dict[Shape, float]) -> float:
    weights = np.array([1.0 / (_distance(shape, other) + 1e-6) for other in values])
    return float((weights * np.array(list(values.values()))).sum() / weights.sum())


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(float(np.log2(max(a, 1.0) / max(b, 1.0))) ** 2 for a, b in zip(one, other, strict=True))
