"""Compares the options of several choices at once, by the times of steps for which each choice draws a random option.

Every step tells something about every choice, so that a dozen choices need few more steps than one. Effects are estimated by least
squares, together with the slow drift of a chip that grows warmer. Steps during which something else happened (an evaluation, a
checkpoint) are left out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DRIFT = 32
"""Steps in a row over which the drift is taken to be constant."""
SURE = 1.5
"""Standard errors by which an option must seem better than the default to replace it."""
STRANGE = 5.0
"""Median deviations from the median of its neighbours beyond which a step is left out."""


@dataclass(frozen=True)
class Outcome:
    """The best option of each choice, and the time they save, in the unit of the times: the sum of their effects, which is too
    optimistic where the best of several was taken."""

    options: tuple[int, ...]
    saves: float


class Experiment:
    """Draws options for steps; 0 is the default option of each choice."""

    def __init__(self, options: Sequence[int], seed: int = 0) -> None:
        self.options = tuple(options)
        self.generator = random.Random(seed)
        self.ahead: list[list[int]] = [[] for _ in self.options]
        self.drawn: list[tuple[int, ...]] = []

    def draw(self) -> tuple[int, ...]:
        """Options for the next step. Each option of a choice comes equally often."""
        for ahead, count in zip(self.ahead, self.options, strict=True):
            if not ahead:
                ahead.extend(self.generator.sample(range(count), count))
        self.drawn.append(tuple(ahead.pop() for ahead in self.ahead))
        return self.drawn[-1]

    def outcome(self, times: Sequence[float]) -> Outcome:
        """The best options by the times of the steps drawn so far."""
        columns = [(choice, option) for choice, count in enumerate(self.options) for option in range(1, count)]
        nothing = Outcome((0,) * len(self.options), 0.0)
        if not columns or not len(times):
            return nothing
        y, drawn = np.array(times, dtype=float), np.array(self.drawn)
        stretch = np.arange(len(y)) // DRIFT
        middles = np.array([np.median(y[stretch == one]) for one in range(stretch[-1] + 1)])[stretch]
        deviation = np.median(np.abs(y - middles))
        kept = np.abs(y - middles) <= STRANGE * deviation
        y, drawn, stretch = y[kept], drawn[kept], stretch[kept]
        drift = (stretch[:, None] == np.unique(stretch)[None, :]).astype(float)
        chosen = np.stack([drawn[:, choice] == option for choice, option in columns], axis=1).astype(float)
        x = np.concatenate([drift, chosen], axis=1)
        if len(y) <= x.shape[1]:
            return nothing
        solution, *_ = np.linalg.lstsq(x, y, rcond=None)
        noise = float(((y - x @ solution) ** 2).sum()) / (len(y) - x.shape[1])
        errors = np.sqrt(noise * np.diag(np.linalg.pinv(x.T @ x)))
        effects, errors = solution[drift.shape[1] :], errors[drift.shape[1] :]
        best, saves = [0] * len(self.options), 0.0
        for choice in range(len(self.options)):
            mine = [n for n, (owner, _) in enumerate(columns) if owner == choice]
            n = min(mine, key=lambda n: float(effects[n]), default=-1)
            if n >= 0 and effects[n] < -SURE * errors[n]:
                best[choice] = columns[n][1]
                saves -= float(effects[n])
        return Outcome(tuple(best), saves)
