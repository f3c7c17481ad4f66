"""Supervised fine-tuning: the cross-entropy of answers, averaged over all their tokens in the global batch. The data marks the
answers; in preference data only the desirable ones are learned."""

from __future__ import annotations

import numpy as np

from shardwise.data.batches import IGNORE_INDEX, Batch
from shardwise.train.objectives.pretrain import Pretrain


class SFT(Pretrain):
    """As pretraining, but only with the targets of desirable answers."""

    def token_arrays(self, batch: Batch) -> dict[str, np.ndarray]:
        return {"targets": _wanted(batch)}

    def count(self, batch: Batch) -> float:
        return int(np.count_nonzero(_wanted(batch) != IGNORE_INDEX))


def _wanted(batch: Batch) -> np.ndarray:
    return batch.targets if batch.labels is None else np.where(batch.labels > 0, batch.targets, IGNORE_INDEX)
