"""KTO (Ethayarajh et al. 2024): an answer labelled desirable should gain log-probability over the reference, an undesirable one
should lose. The zero point is the model's general KL from the reference, estimated as the mean log-ratio of answers paired with
other answers' prompts (`data/mismatch.py`) over the whole global batch, so that it is the same on every layout. A step has four
forward passes: reference and model on the mismatched rows, the reference on the step's rows, and the step's own.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from shardwise.data.batches import IGNORE_INDEX, Batch
from shardwise.data.mismatch import mismatched
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.objective import Microbatch, document_sums
from shardwise.run import Run
from shardwise.train.objectives.objective import TrainObjective


def kto_losses(ratios: Tensor, wanted: Tensor, kl: Tensor, beta: float, weights: tuple[float, float]) -> Tensor:
    """Eq. 8 without its constants, given log-ratios to the reference; `weights` are those of desirable and undesirable answers."""
    gain = torch.where(wanted, ratios - kl, kl - ratios)
    good, bad = ratios.new_tensor(weights)
    return torch.where(wanted, good, bad) * (1 - torch.sigmoid(beta * gain))


class KTO(TrainObjective):
    """Learns from single answers, not pairs; rewards are beta times the log-ratio to the reference."""

    def __init__(self, run: Run, device: torch.device, mesh: Mesh) -> None:
        super().__init__(run, device, mesh)
        self.full_count = run.train.global_batch
        self.kl = torch.zeros((), dtype=self.measured.dtype, device=device)

    def token_arrays(self, batch: Batch) -> dict[str, np.ndarray]:
        labels = np.ones(batch.tokens.shape, np.int8) if batch.labels is None else batch.labels
        return {"targets": batch.targets, "slots": batch.slots, "labels": labels}

    def beside(self, batch: Batch) -> Batch | None:
        return mismatched(batch)

    def count(self, batch: Batch) -> float:
        rows, places = np.nonzero(batch.targets != IGNORE_INDEX)
        return len(np.unique(rows * batch.tokens.shape[1] + batch.slots[rows, places]))

    def strayed(self, microbatch: Microbatch) -> Tensor:
        """This rank's sum of the log-ratios of mismatched answers, and its share of their number."""
        targets, slots = microbatch["targets"], microbatch["slots"]
        policy, reference = microbatch["policy"], microbatch["reference"]
        counted = (targets != IGNORE_INDEX).to(policy.dtype)
        tokens = document_sums(counted[None], slots, self.mesh.group("context"))[0]
        return torch.stack(((policy - reference).sum(), (tokens > 0).sum() / self.mesh.size("context")))

    def set_strayed(self, total: Tensor) -> None:
        """Set the KL estimate from `total`: the sum of log-ratios and the number of answers, over all ranks."""
        self.kl.copy_((total[0] / total[1].clamp(min=1)).clamp(min=0))

    def loss(self, microbatch: Microbatch, head: nn.Module, hidden: Tensor, unembedding: Tensor) -> Tensor:
        targets, slots, labels = microbatch["targets"], microbatch["slots"], microbatch["labels"]
        reference, c = microbatch["reference"], self.config

        def make(logprobs: Tensor) -> Tensor:
            counted = (targets != IGNORE_INDEX).to(logprobs.dtype)
            values = torch.stack((logprobs, counted, reference, counted * labels))
            policy, tokens, base, good = document_sums(values, slots, self.mesh.group("context"))
            ratios, there, wanted = policy - base, tokens > 0, good > 0
            losses = kto_losses(ratios, wanted, self.kl, c.beta, (c.desirable_weight, c.undesirable_weight))
            rewards, one = c.beta * ratios, there.to(ratios.dtype)
            measured = [rewards * wanted, rewards * ~wanted, one * wanted, one * self.kl]
            self.measure([torch.where(there, each, 0).sum() for each in measured])
            return torch.where(there, losses, 0).sum() / self.mesh.size("context")

        return head(hidden, unembedding, targets, make=make)

    def shown(self, measured: dict[str, float]) -> dict[str, float]:
        share = measured["desirable"]
        good, bad = (
            measured["rewards_chosen"] / (share or 1.0),
            measured["rewards_rejected"] / (1 - share if share < 1 else 1.0),
        )
        return measured | dict(rewards_chosen=good, rewards_rejected=bad, reward_margin=good - bad)
