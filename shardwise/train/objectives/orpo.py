"""ORPO (Hong et al. 2024): the cross-entropy of the chosen answer, plus a loss on the log odds ratio of the chosen over the
rejected answer. It needs no reference."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.train.objectives.pairs import Answers, PairObjective, margins


def odds_ratio_losses(chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log sigmoid of the log odds ratio (eq. 7), given log-probabilities that are means over tokens (eq. 3)."""
    # A certain answer has log-probability 0, or a little more by rounding, and infinite odds.
    chosen, rejected = (x.clamp(max=-torch.finfo(x.dtype).eps) for x in (chosen, rejected))
    return -F.logsigmoid((chosen - rejected) - (log1mexp(chosen) - log1mexp(rejected)))


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, by the more accurate of two formulas (Maechler 2012, eq. 7)."""
    near = x > -math.log(2)
    # Each formula sees only values in its own range, so that neither puts a NaN into the other's gradient.
    return torch.where(
        near, torch.log(-torch.expm1(torch.where(near, x, -1.0))), torch.log1p(-torch.exp(torch.where(near, -1.0, x)))
    )


class ORPO(PairObjective):
    """Eq. 6; both terms are means over an answer's tokens, and then over pairs."""

    def terms(self, chosen: Answers, rejected: Answers) -> tuple[Tensor, list[Tensor]]:
        beta = self.config.beta
        # Without a pair the mean log-probability is 0, whose odds are infinite; finite values replace it.
        there = (chosen.tokens > 0) & (rejected.tokens > 0)
        good, bad = (torch.where(there, each.mean, -1.0 - n) for n, each in enumerate((chosen, rejected)))
        measured = [*margins(beta * good, beta * bad), -good]
        return -good + beta * odds_ratio_losses(good, bad), measured
