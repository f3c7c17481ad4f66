"""An objective as the train step uses it. Besides the loss of a microbatch it defines the arrays it needs from a batch, the
normaliser of the loss, and its metrics."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shardwise.data.batches import Batch
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.objective import Microbatch, Objective
from shardwise.run import Run
from shardwise.run.sections.objective import FACTS


class TrainObjective(Objective):
    """Defines the targets, masks and weights of tokens, and the normaliser of the loss."""

    def __init__(self, run: Run, device: torch.device, mesh: Mesh) -> None:
        self.config, self.mesh = run.objective, mesh
        exact = run.train.dtype == "float64"
        dtype = torch.float64 if exact else torch.float32
        self.array_type = np.float64 if exact else np.float32
        self.weights = torch.tensor([run.train.balance_loss, run.train.router_z_loss], dtype=dtype, device=device)
        self.auxiliary_weights = self.weights.clone()
        self.has_auxiliary = run.model.experts > 0 and bool(run.train.balance_loss or run.train.router_z_loss)
        self.batch_tokens = run.batch_tokens
        self.full_count: float = run.batch_tokens
        """The count of a global batch in which every token (or answer) counts."""
        self.narrow = run.train.dtype == "float16"
        self.metrics = FACTS[run.objective.kind].metrics
        self.measured = torch.zeros(len(self.metrics), dtype=dtype, device=device)
        """The metrics' sums over the documents of this rank's share of a step; like the loss, each is divided by the count."""

    @property
    def divisor(self) -> float:
        """What backward passes divide the loss by. The true count over all ranks is not known then, so the gradients are divided as
        they are clipped. But float16 has too narrow a range for the gradients of a sum over all tokens."""
        return self.full_count if self.narrow else 1.0

    @abstractmethod
    def token_arrays(self, batch: Batch) -> dict[str, np.ndarray]:
        """The per-token values that `loss` needs, as arrays [rows, sequence]; they are sharded like the tokens."""

    @abstractmethod
    def count(self, batch: Batch) -> float:
        """This batch's share of the normaliser that the global batch's loss is divided by."""

    def beside(self, batch: Batch) -> Batch | None:
        """Further rows that only run forward, before the step's own rows; None: there are none."""
        return None

    def strayed(self, microbatch: Microbatch) -> Tensor:
        """The sums over such rows, which are collected over the whole step before its own rows run."""
        raise NotImplementedError

    def set_strayed(self, total: Tensor) -> None:
        """Receive these sums, added over all ranks."""
        raise NotImplementedError

    def shown(self, measured: dict[str, float]) -> dict[str, float]:
        """The metrics as they are displayed, given the sums divided by the count."""
        return measured

    def begin(self) -> None:
        """Called before the passes of a step or of an evaluation."""
        self.measured.zero_()

    def measure(self, sums: Sequence[Tensor]) -> None:
        """Add sums over documents to the metrics. Every context rank has the same sums, and adds its share of them."""
        self.measured += torch.stack([each.detach() for each in sums]) / self.mesh.size("context")

    def weigh_auxiliary(self, count: Tensor) -> None:
        """Make auxiliary losses a mean over all tokens of the batch: whether the count is of all tokens or of a few documents must
        not change the weight of the auxiliary losses."""
        self.auxiliary_weights.copy_(self.weights * (count / self.batch_tokens))
