"""SimPO (Meng et al. 2024): the chosen answer's mean log-probability per token should exceed the rejected one's by a margin. It
needs no reference."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from shardwise.train.objectives.pairs import Answers, PairObjective, margins


def simpo_losses(chosen: Tensor, rejected: Tensor, beta: float, gamma: float, label_smoothing: float = 0.0) -> Tensor:
    """Eq. 6, given mean log-probabilities; label smoothing counts a share of the pairs as swapped."""
    logits = beta * (chosen - rejected) - gamma
    return -F.logsigmoid(logits) * (1 - label_smoothing) - F.logsigmoid(-logits) * label_smoothing


class SimPO(PairObjective):
    """Rewards are beta times the mean log-probability."""

    def terms(self, chosen: Answers, rejected: Answers) -> tuple[Tensor, list[Tensor]]:
        c = self.config
        losses = simpo_losses(chosen.mean, rejected.mean, c.beta, c.gamma, c.label_smoothing)
        return losses, margins(c.beta * chosen.mean, c.beta * rejected.mean)
