"""ORPO (Hong et al. 2024): the cross-entropy of the wanted answer, and the log of its odds over those of the unwanted one. It needs
no reference."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.train.objectives.pairs import Answers, PairObjective, margins


def odds_ratio_losses(chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log sigmoid of the log odds ratio (eq. 7), of log-probabilities that are means over tokens (eq. 3)."""
    return -F.logsigmoid((chosen - rejected) - (log1mexp(chosen) - log1mexp(rejected)))


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) of what is below 0, the more exact of two ways (Maechler 2012, eq. 7)."""
    near = x > -math.log(2)
    # Each way sees only what it is for, so that neither spoils the other's gradient.
    return torch.where(
        near, torch.log(-torch.expm1(torch.where(near, x, -1.0))), torch.log1p(-torch.exp(torch.where(near, -1.0, x)))
    )


class ORPO(PairObjective):
    """Eq. 6; both terms are means over an answer's tokens, then over pairs."""

    def terms(self, chosen: Answers, rejected: Answers) -> tuple[Tensor, list[Tensor]]:
        beta = self.config.beta
        # Where there is no pair the mean is 0, whose odds are infinite.
        there = (chosen.tokens > 0) & (rejected.tokens > 0)
        good, bad = (torch.where(there, each.mean, -1.0 - n) for n, each in enumerate((chosen, rejected)))
        measured = [*margins(beta * good, beta * bad), -good]
        return -good + beta * odds_ratio_losses(good, bad), measured
