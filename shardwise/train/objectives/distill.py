"""Distillation (Hinton et al. 2015): the student learns the probabilities that a teacher gives to the next token.

The teacher provides its top-k tokens and their log-probabilities. The loss compares both models' probabilities of these tokens one
by one, and those of all other tokens as one sum. So the KL divergence is over k + 1 outcomes: it is never more than the divergence
over the whole vocabulary (the data processing inequality), and equals it if k is the vocabulary size. Forward KL is learning from
soft targets. MiniLLM (Gu et al. 2024) argues for reverse KL when a small student cannot cover everything the teacher would say. A
temperature softens both distributions, and the divergence is multiplied by its square, which keeps the gradients' magnitude
(Hinton et al. 2015, section 2).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from shardwise.data.batches import Batch
from shardwise.model.logprobs import IGNORE_INDEX
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.objective import Microbatch
from shardwise.run import Run
from shardwise.run.sections.objective import targets_of
from shardwise.train.objectives.orpo import log1mexp
from shardwise.train.objectives.sft import SFT


def divergences(student: Tensor, teacher: Tensor, whole: bool, reverse: bool) -> Tensor:
    """KL divergence of log-probabilities [..., k] of the same tokens; unless they are the `whole` vocabulary, the remaining tokens
    are one more outcome."""
    if not whole:
        student, teacher = (torch.cat((each, _rest(each)), dim=-1) for each in (student, teacher))
    first, second = (student, teacher) if reverse else (teacher, student)
    return (first.exp() * (first - second)).sum(-1)


def _rest(logprobs: Tensor) -> Tensor:
    """The log-probability of all other tokens together; clamped, since rounding must not make their probability negative."""
    within = logprobs.logsumexp(-1, keepdim=True)
    return log1mexp(within.clamp(max=-torch.finfo(within.dtype).eps))


class Distill(SFT):
    """The targets at each position are the data's own token, for `nll`, and the teacher's tokens."""

    def __init__(self, run: Run, device: torch.device, mesh: Mesh) -> None:
        super().__init__(run, device, mesh)
        self.stored = run.objective.stored
        self.asked = targets_of(run.objective, run.model.vocab) - 1
        self.whole = self.asked == run.model.vocab

    def token_arrays(self, batch: Batch) -> dict[str, np.ndarray]:
        arrays = super().token_arrays(batch)
        if not self.stored:
            return arrays
        assert batch.teacher_tokens is not None
        assert batch.teacher_logprobs is not None
        tokens, said = (each[..., : self.asked] for each in (batch.teacher_tokens, batch.teacher_logprobs))
        return arrays | {"teacher_tokens": tokens, "teacher_logprobs": said.astype(self.array_type)}

    def loss(self, microbatch: Microbatch, head: nn.Module, hidden: Tensor, unembedding: Tensor) -> Tensor:
        targets, tokens, said = (microbatch[name] for name in ("targets", "teacher_tokens", "teacher_logprobs"))
        c = self.config
        counted = targets != IGNORE_INDEX
        every = torch.where(counted[..., None], torch.cat((targets[..., None], tokens), dim=-1), IGNORE_INDEX)

        def make(logprobs: Tensor) -> Tensor:
            found = divergences(logprobs[..., 1:], said, self.whole, c.divergence == "reverse")
            divergence, own = torch.where(counted, found, 0).sum(), logprobs[..., 0].sum()
            self.measured += torch.stack([divergence.detach(), -own.detach()])
            return c.temperature**2 * divergence - c.cross_entropy * own

        return head(hidden / c.temperature if c.temperature != 1 else hidden, unembedding, every, make=make)
