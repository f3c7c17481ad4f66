"""What the preference objectives have in common. A row holds pairs of documents, alternating a chosen and a rejected one. The loss
is the mean, over all pairs of the global batch, of a term made of their log-probabilities."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shardwise.data.batches import IGNORE_INDEX, Batch
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.objective import Microbatch, document_sums
from shardwise.run import Run
from shardwise.train.objectives.objective import TrainObjective


class Answers(NamedTuple):
    """One answer of each pair [rows, pairs]."""

    logprob: Tensor
    """The trained network's log-probability, summed over the tokens with a target; for a reward model the score."""
    tokens: Tensor
    """The number of tokens with a target; 0 if there is no such answer, and so no pair."""
    reference: Tensor
    """The reference's log-probability; 0 if there is no reference."""
    margin: Tensor
    """The margin of its pair, from the data; 0 if the run does not use margins."""

    @property
    def mean(self) -> Tensor:
        """The mean log-probability of a token."""
        return self.logprob / self.tokens.clamp(min=1)


class PairObjective(TrainObjective):
    """Sums log-probabilities over documents, and pairs the documents."""

    def __init__(self, run: Run, device: torch.device, mesh: Mesh) -> None:
        super().__init__(run, device, mesh)
        self.full_count = run.train.global_batch

    def token_arrays(self, batch: Batch) -> dict[str, np.ndarray]:
        arrays: dict[str, np.ndarray] = {"targets": batch.targets, "slots": batch.slots}
        if self.config.stored:
            assert batch.reference is not None
            arrays["reference"] = batch.reference.astype(self.array_type)
        if self.config.margins:
            assert batch.margins is not None
            arrays["margins"] = batch.margins.astype(self.array_type)
        return arrays

    def count(self, batch: Batch) -> float:
        rows, places = np.nonzero(batch.targets != IGNORE_INDEX)
        documents = np.unique(rows * 2 * batch.tokens.shape[1] + batch.slots[rows, places])
        return len(documents) - len(np.unique(documents // 2))

    @abstractmethod
    def terms(self, chosen: Answers, rejected: Answers) -> tuple[Tensor, list[Tensor]]:
        """The loss of each pair, and its metrics, in the order of `metrics`."""

    def loss(self, microbatch: Microbatch, head: nn.Module, hidden: Tensor, unembedding: Tensor) -> Tensor:
        targets, slots = microbatch["targets"], microbatch["slots"]
        reference, margins = microbatch.get("reference"), microbatch.get("margins")

        def make(logprobs: Tensor) -> Tensor:
            counted = (targets != IGNORE_INDEX).to(logprobs.dtype)
            logprobs = logprobs * counted  # a reward model's scores: only those at the ends of documents
            more = {"reference": reference, "margin": None if margins is None else margins * counted}
            there = [name for name, each in more.items() if each is not None]
            values = [logprobs, counted, *(each for each in more.values() if each is not None)]
            sums = document_sums(torch.stack(values), slots, self.mesh.group("context"))
            sums = sums[..., : sums.shape[-1] // 2 * 2].unflatten(-1, (-1, 2))
            known = dict.fromkeys(more, torch.zeros_like(sums[0])) | dict(zip(there, sums[2:], strict=True))
            known["margin"] = known["margin"] / sums[1].clamp(min=1)  # every token with a target carries it
            chosen, rejected = (
                Answers(sums[0][..., n], sums[1][..., n], known["reference"][..., n], known["margin"][..., n])
                for n in range(2)
            )
            losses, measured = self.terms(chosen, rejected)
            paired = (chosen.tokens > 0) & (rejected.tokens > 0)
            self.measure([torch.where(paired, each, 0).sum() for each in measured])
            return torch.where(paired, losses, 0).sum() / self.mesh.size("context")

        return head(hidden, unembedding, targets, make=make)


def margins(chosen: Tensor, rejected: Tensor) -> list[Tensor]:
    """The metrics of both answers' rewards: each, their margin, and whether the chosen one has more."""
    return [chosen, rejected, chosen - rejected, (chosen > rejected).to(chosen.dtype)]
