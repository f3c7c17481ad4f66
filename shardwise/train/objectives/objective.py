"""An objective as the train step uses it: besides the loss of a microbatch, what it needs of a batch and how it is normalised."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import torch

from shardwise.data.batches import Batch
from shardwise.parallel.objective import Objective
from shardwise.run import Run


class TrainObjective(Objective):
    """Decides targets, masks and weights of tokens, and the normaliser of the loss."""

    def __init__(self, run: Run, device: torch.device) -> None:
        self.auxiliary_weights = torch.tensor([run.train.balance_loss, run.train.router_z_loss], device=device)
        self.full_count: float = run.batch_tokens
        """The count of a global batch in which every token counts. Backward passes divide by it, since they run before the true
        count is known over all ranks; the gradients are corrected as they are clipped."""

    @abstractmethod
    def token_arrays(self, batch: Batch) -> dict[str, np.ndarray]:
        """What `loss` needs of each token, as arrays [rows, sequence]; they are sharded like the tokens."""

    @abstractmethod
    def count(self, batch: Batch) -> float:
        """This batch's share of the normaliser, by which the loss of the global batch is divided."""
