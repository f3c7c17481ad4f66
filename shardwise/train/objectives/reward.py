"""Reward models: a score at the last token of an answer, which should be higher for the chosen one of a pair (Bradley & Terry 1952,
as Ouyang et al. 2022 use it, eq. 1), by a margin if the pair has one (Touvron et al. 2023, eq. 2)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from shardwise.train.objectives.pairs import Answers, PairObjective, margins


def reward_losses(chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0, center: float = 0.0) -> Tensor:
    """The losses, given the scores of pairs; `center` times their squared sum keeps scores around 0 (Eisenstein et al. 2023,
    eq. 2)."""
    return -F.logsigmoid(chosen - rejected - margin) + center * (chosen + rejected) ** 2


class Reward(PairObjective):
    """Only the last token of a document has a target: that is where the score counts."""

    def terms(self, chosen: Answers, rejected: Answers) -> tuple[Tensor, list[Tensor]]:
        c = self.config
        losses = reward_losses(chosen.logprob, rejected.logprob, c.margin + chosen.margin, c.center)
        return losses, margins(chosen.logprob, rejected.logprob)
