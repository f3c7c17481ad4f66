"""An objective as the train step uses it: besides the loss of a microbatch, what it needs of a batch, how it is normalised, and
what it measures on the way."""

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
    """Decides targets, masks and weights of tokens, and the normaliser of the loss."""

    def __init__(self, run: Run, device: torch.device, mesh: Mesh) -> None:
        self.config, self.mesh = run.objective, mesh
        dtype = torch.float64 if run.train.dtype == "float64" else torch.float32
        self.weights = torch.tensor([run.train.balance_loss, run.train.router_z_loss], dtype=dtype, device=device)
        self.auxiliary_weights = self.weights.clone()
        self.has_auxiliary = run.model.experts > 0 and bool(run.train.balance_loss or run.train.router_z_loss)
        self.batch_tokens = run.batch_tokens
        self.full_count: float = run.batch_tokens
        """The count of a global batch in which everything counts. Backward passes divide by it, since they run before the true
        count is known over all ranks; the gradients are corrected as they are clipped."""
        self.metrics = FACTS[run.objective.kind].metrics
        self.measured = torch.zeros(len(self.metrics), dtype=dtype, device=device)
        """Sums over the documents of this rank's share of a step, by metric; each is divided by the count like the loss."""

    @abstractmethod
    def token_arrays(self, batch: Batch) -> dict[str, np.ndarray]:
        """What `loss` needs of each token, as arrays [rows, sequence]; they are sharded like the tokens."""

    @abstractmethod
    def count(self, batch: Batch) -> float:
        """This batch's share of the normaliser, by which the loss of the global batch is divided."""

    def beside(self, batch: Batch) -> Batch | None:
        """Rows that the network only passes forward, before the step's own."""
        return None

    def strayed(self, microbatch: Microbatch) -> Tensor:
        """What is added up of such rows, over all of a step, before the others."""
        raise NotImplementedError

    def set_strayed(self, total: Tensor) -> None:
        """What that sum over all ranks is."""
        raise NotImplementedError

    def shown(self, measured: dict[str, float]) -> dict[str, float]:
        """What people see of the metrics, each divided by the count."""
        return measured

    def begin(self) -> None:
        """Called before the passes of a step or of an evaluation."""
        self.measured.zero_()

    def measure(self, sums: Sequence[Tensor]) -> None:
        """Add sums over documents to what is measured; every context rank has the same ones, and takes its share."""
        self.measured += torch.stack([each.detach() for each in sums]) / self.mesh.size("context")

    def weigh_auxiliary(self, count: Tensor) -> None:
        """Make auxiliary losses a mean over all tokens of the batch: what is divided by the count in the end, all tokens or a few
        documents, must not change what experts weigh."""
        self.auxiliary_weights.copy_(self.weights * (count / self.batch_tokens))
