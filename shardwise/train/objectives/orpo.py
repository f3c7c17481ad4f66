"""ORPO (Hong et al. 2024): the cross-entropy of the wanted answer, and the log of its odds over those of the unwanted one. It needs
no reference."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.train.objectives.pairs import Answers, PairObjective, margins


def odds_ratio_losses(chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log sigmoid of the log odds ratio (eq. 7), of log-probabilities that are means over tokens (eq. 3)."""
    log_odds = (chosen - rejected) - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
    return -F.logsigmoid(log_odds)


class ORPO(PairObjective):
    """Eq. 6; both terms are means over an answer's tokens, then over pairs."""

    def terms(self, chosen: Answers, rejected: Answers) -> tuple[Tensor, list[Tensor]]:
        beta = self.config.beta
        # Where there is no pair the mean is 0, whose odds are infinite.
        there = (chosen.tokens > 0) & (rejected.tokens > 0)
        good, bad = (torch.where(there, each.mean, -1.0 - n) for n, each in enumerate((chosen, rejected)))
        measured = [*margins(beta * good, beta * bad), -good]
        return -good + beta * odds_ratio_losses(good, bad), measured
