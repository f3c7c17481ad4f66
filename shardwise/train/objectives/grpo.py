"""Group relative policy optimization (GRPO): answers with a higher reward than others to the same prompt become likelier.

The term of a token is PPO's clipped surrogate with the advantage of its answer (Shao et al. 2024, equation 3), with a separate
upper clip (DAPO, Yu et al. 2025, equation 10), plus `kl_beta` times an estimate of the KL divergence from a reference that is never
negative (Schulman 2020, "k3": r - 1 - log r with r = reference / policy). The variants differ in a token's weight and in the
normaliser of the sum:

    variant   weight of a token             normaliser
    grpo      1 / tokens of its answer      answers                (equation 3)
    dr_grpo   1 / most tokens of an answer  answers                (Liu et al. 2025, section 3.2)
    dapo      1                             tokens of all answers  (Yu et al. 2025, equation 12)

The engine that sampled the answers may give a token another probability than the trainer, because of rounding or because its
weights are older. So the term is multiplied by the ratio of trainer to engine probability, capped at `importance_cap` (truncated
importance sampling, Ionides 2008; for this mismatch Yao et al. 2025). If answers are used for one update only, the probabilities
before the update are those of this very pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shardwise.data.batches import Batch
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.objective import Microbatch
from shardwise.run import Run
from shardwise.train.objectives.objective import TrainObjective

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class AnswerBatch(Batch):
    """Rows of one prompt and one answer each. Targets are the answer's tokens; the arrays [rows, length] hold values at them."""

    advantages: Floats | None = None
    weights: Floats | None = None
    """The weight of each token."""
    drawn: Floats | None = None
    """The engine's log-probabilities of its sampled tokens."""
    old: Floats | None = None
    """The trainer's log-probabilities before the first update; None: those of this pass."""
    reference: Floats | None = None
    """The reference's log-probabilities, if there is one."""
    answers: int | None = None
    """The number of answers with targets in these rows, if rows are packed with several; None: a row is one answer."""
    per_token: float = 1.0
    """The objective's count over the global batch divided by its tokens: the factor that turns a metric's sum over tokens, which
    is later divided by the count, into a mean over tokens."""


ARRAYS = ("advantages", "weights", "drawn", "old", "reference")


class Terms(NamedTuple):
    """Of each token: the loss, whether it was clipped, the KL estimate, and the trainer's logprob minus the engine's."""

    loss: Tensor
    clipped: Tensor
    divergence: Tensor
    mismatch: Tensor


@dataclass(frozen=True)
class Clip:
    """The constants of a term."""

    low: float
    high: float
    beta: float
    cap: float

    @classmethod
    def of(cls, run: Run) -> Clip:
        """The constants that a run sets."""
        asked = run.objective
        high = asked.epsilon_high or (0.28 if asked.variant == "dapo" else asked.epsilon)
        return cls(asked.epsilon, high, asked.kl_beta, asked.importance_cap)


def terms(
    logprobs: Tensor, advantages: Tensor, drawn: Tensor, old: Tensor | None, reference: Tensor | None, clip: Clip
) -> Terms:
    """The terms of tokens, before weighting."""
    before = logprobs.detach() if old is None else old
    ratio = (logprobs - before).exp()
    bounded = ratio.clamp(1 - clip.low, 1 + clip.high)
    loss = -torch.minimum(ratio * advantages, bounded * advantages)
    clipped = ((ratio < 1 - clip.low) & (advantages < 0)) | ((ratio > 1 + clip.high) & (advantages > 0))
    mismatch = before - drawn
    if clip.cap:
        loss = loss * mismatch.exp().clamp(max=clip.cap)
    divergence = torch.zeros_like(loss)
    if reference is not None:
        log_ratio = reference - logprobs
        divergence = log_ratio.exp() - log_ratio - 1
        loss = loss + clip.beta * divergence
    return Terms(loss, clipped, divergence, mismatch)


class Grpo(TrainObjective):
    """Learns from answers with rewards. Its metrics are means over the tokens of all answers."""

    def __init__(self, run: Run, device: torch.device, mesh: Mesh) -> None:
        super().__init__(run, device, mesh)
        self.by_tokens = run.objective.variant == "dapo"
        self.full_count = run.batch_tokens if self.by_tokens else run.train.global_batch
        self.clip = Clip.of(run)
        self.scale = torch.ones((), dtype=self.measured.dtype, device=device)

    def token_arrays(self, batch: Batch) -> dict[str, np.ndarray]:
        assert isinstance(batch, AnswerBatch)
        self.scale.fill_(batch.per_token)
        found = {name: getattr(batch, name) for name in ARRAYS}
        arrays = {name: array.astype(self.array_type) for name, array in found.items() if array is not None}
        return {"targets": batch.targets} | arrays

    def count(self, batch: Batch) -> float:
        if self.by_tokens:
            return batch.loss_tokens
        answers = batch.answers if isinstance(batch, AnswerBatch) else None
        return int((batch.targets >= 0).any(axis=1).sum()) if answers is None else answers

    def loss(self, microbatch: Microbatch, head: nn.Module, hidden: Tensor, unembedding: Tensor) -> Tensor:
        if self.config.temperature != 1:
            hidden = hidden / self.config.temperature
        return head(hidden, unembedding, microbatch["targets"], make=partial(self._make, microbatch))

    def _make(self, microbatch: Microbatch, logprobs: Tensor) -> Tensor:
        advantages, drawn = microbatch["advantages"], microbatch["drawn"]
        made = terms(logprobs, advantages, drawn, microbatch.get("old"), microbatch.get("reference"), self.clip)
        counted = microbatch["targets"] >= 0
        with torch.no_grad():
            off = made.mismatch
            kinds = (made.divergence, made.clipped, off.abs(), off.exp() - off - 1)
            sums = [torch.where(counted, each, 0).sum(dtype=self.measured.dtype) for each in kinds]
            self.measured += torch.stack(sums) * self.scale
        return torch.where(counted, made.loss * microbatch["weights"], 0).sum()


def random_answers(run: Run, tokens: NDArray[np.int64]) -> AnswerBatch:
    """A batch with every array that a step of this run needs, from rows that are one token longer than its sequences; every token
    belongs to an answer."""
    values = np.full((len(tokens), tokens.shape[1] - 1), -1.0)
    return AnswerBatch(
        tokens[:, :-1].copy(),
        tokens[:, 1:].copy(),
        advantages=values,
        weights=-values,
        drawn=values,
        old=values if run.objective.minibatches * run.objective.iterations > 1 else None,
        reference=values if run.objective.kl_beta else None,
    )


def weights_of(run: Run, lengths: NDArray[np.int64]) -> Floats:
    """The token weight of answers with these lengths."""
    match run.objective.variant:
        case "grpo":
            return 1.0 / np.maximum(lengths, 1)
        case "dr_grpo":
            return np.full(len(lengths), 1.0 / run.objective.completion_tokens)
        case _:
            return np.ones(len(lengths))
