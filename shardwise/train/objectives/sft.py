"""Supervised tuning: the cross-entropy of answers, the mean over all their tokens in the global batch. What is an answer, the data
says; of preferences, the wanted ones are learned."""

from __future__ import annotations

import numpy as np

from shardwise.data.batches import IGNORE_INDEX, Batch
from shardwise.train.objectives.pretrain import Pretrain


class SFT(Pretrain):
    """As pretraining, of targets that are wanted."""

    def token_arrays(self, batch: Batch) -> dict[str, np.ndarray]:
        return {"targets": _wanted(batch)}

    def count(self, batch: Batch) -> float:
        return int(np.count_nonzero(_wanted(batch) != IGNORE_INDEX))


def _wanted(batch: Batch) -> np.ndarray:
    return batch.targets if batch.labels is None else np.where(batch.labels > 0, batch.targets, IGNORE_INDEX)
