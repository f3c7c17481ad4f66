"""Pretraining: the cross-entropy of the next token, averaged over all tokens of the global batch that have a target."""

from __future__ import annotations

import numpy as np
from torch import Tensor, nn

from shardwise.data.batches import Batch
from shardwise.parallel.objective import Microbatch
from shardwise.train.objectives.objective import TrainObjective


class Pretrain(TrainObjective):
    """Targets are those of the data. A token whose target is `IGNORE_INDEX` has no loss; all others have the same weight."""

    def token_arrays(self, batch: Batch) -> dict[str, np.ndarray]:
        return {"targets": batch.targets}

    def count(self, batch: Batch) -> float:
        return batch.loss_tokens

    def loss(self, microbatch: Microbatch, head: nn.Module, hidden: Tensor, unembedding: Tensor) -> Tensor:
        return head(hidden, unembedding, microbatch["targets"])
