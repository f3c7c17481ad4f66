"""DPO (Rafailov et al. 2023): the chosen answer should gain more log-probability over the reference than the rejected one. The
hinge loss of SLiC (Zhao et al. 2023) or the squared loss of IPO (Azar et al. 2024) can replace the logistic loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.train.objectives.pairs import Answers, PairObjective, margins


def dpo_losses(margin: Tensor, kind: str, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """The losses, given `margin`: the chosen answer's log-ratio to the reference minus the rejected answer's. DPO's eq. 7, with
    label smoothing Mitchell's (2023, eq. 3); the hinge at 1 / beta; IPO's eq. 17, whose log-ratios are means over an answer's
    tokens."""
    match kind:
        case "hinge":
            return torch.relu(1 - beta * margin)
        case "ipo":
            return (margin - 1 / (2 * beta)) ** 2
        case _:
            return -F.logsigmoid(beta * margin) * (1 - label_smoothing) - F.logsigmoid(-beta * margin) * label_smoothing


class DPO(PairObjective):
    """Rewards are beta times the log-ratio to the reference. If a pair has its own margin, its rewards should differ by that margin
    (ODPO, Amini et al. 2024)."""

    def terms(self, chosen: Answers, rejected: Answers) -> tuple[Tensor, list[Tensor]]:
        c = self.config
        ratios = [each.logprob - each.reference for each in (chosen, rejected)]
        if c.loss == "ipo":
            ratios = [r / each.tokens.clamp(min=1) for r, each in zip(ratios, (chosen, rejected), strict=True)]
        good, bad = ratios
        losses = dpo_losses(good - bad - chosen.margin / c.beta, c.loss, c.beta, c.label_smoothing)
        return losses, margins(c.beta * good, c.beta * bad)
