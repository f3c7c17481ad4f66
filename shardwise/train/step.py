"""One training step: microbatches forward and backward, gradients clipped, parameters updated.

The loss is the sum over all tokens of the global batch divided by their number, so one batch of 8 and 8 accumulated
batches of 1 give the same gradient. Parameters, gradients and optimizer are float32 for 16-bit arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shardwise.data.batches import Batch
from shardwise.model import Transformer, initialize
from shardwise.model.experts import Router
from shardwise.run import Run, UserError
from shardwise.train.loss_scale import LossScale
from shardwise.train.optimizer import Optimizer


def choose_device(wanted: str) -> torch.device:
    """The device a run asks for, or a sentence when this machine does not have it."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError(
            'train.device: "cuda" was asked for, but PyTorch sees no GPU on this machine; use "auto" or "cpu"'
        )
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


@dataclass
class StepResult:
    """What a step measured; tensors are left on the device until somebody reads them."""

    loss: Tensor
    grad_norm: Tensor
    learning_rate: float
    loss_tokens: int


class Trainee:
    """A model being trained: network, optimizer, loss scale, and how far it has come."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.device = choose_device(run.train.device)
        if self.device.type == "cuda" and run.train.deterministic:
            torch.use_deterministic_algorithms(True)
        self.dtype: torch.dtype = getattr(torch, run.train.dtype)
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        with torch.device("meta"):
            model = Transformer(run.model, dtype=self.dtype).to(wide)
        self.model = model.to_empty(device=self.device)
        initialize(self.model, run.model, run.train.seed)
        self.optimizer = Optimizer(self.model, run.train)
        self.loss_scale = LossScale(run.train.loss_scale if self.dtype == torch.float16 else 1.0)
        self.routers = [m for m in self.model.modules() if isinstance(m, Router)]
        self.auxiliary_weights = torch.tensor([run.train.balance_loss, run.train.router_z_loss], device=self.device)
        self.step = 0
        self.tokens = 0

    def train_step(self, batch: Batch) -> StepResult:
        """One step over this rank's share of the global batch."""
        train = self.run.train
        self.model.train()
        self.optimizer.zero_grad()
        loss_tokens = batch.loss_tokens
        loss = torch.zeros(
            (), dtype=torch.float64 if self.dtype == torch.float64 else torch.float32, device=self.device
        )
        for micro in microbatches(batch, train.microbatch, self.device):
            total, auxiliary = self.model(**micro)
            loss += total.detach()
            if auxiliary is not None:
                total = total + (auxiliary * self.auxiliary_weights.to(auxiliary.dtype)).sum()
            (total * (self.loss_scale.scale / loss_tokens)).backward()
        self.step += 1
        self.tokens += batch.tokens.size
        grad_norm = self._clip()
        if self._usable(grad_norm):
            self.optimizer.step(self.step)
        for router in self.routers:
            router.rebalance(train.balance_rate)
        return StepResult(loss / loss_tokens, grad_norm, self.optimizer.learning_rate(self.step), loss_tokens)

    def _clip(self) -> Tensor:
        """Take the loss scale out of the gradients and shorten them to the allowed norm; gives the norm before that."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if self.dtype == torch.float16:
            torch._foreach_mul_(gradients, 1 / self.loss_scale.scale)
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.run.train.clip:
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), self.run.train.clip, norm)
        return norm

    def _usable(self, grad_norm: Tensor) -> bool:
        """False for float16 gradients that overflowed; only float16 waits for the answer."""
        if self.dtype != torch.float16:
            return True
        finite = bool(grad_norm.isfinite())
        self.loss_scale.update(finite)
        return finite

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> float:
        """Mean loss over the tokens of a batch, in microbatches."""
        self.model.eval()
        micros = microbatches(batch, self.run.train.microbatch, self.device)
        return sum(self.model(**micro).result.item() for micro in micros) / batch.loss_tokens


def microbatches(batch: Batch, size: int, device: torch.device) -> Iterator[dict[str, Tensor | None]]:
    """The batch in pieces of `size` sequences, as the network's keyword arguments, on the device."""

    def piece(array: np.ndarray | None, start: int) -> Tensor | None:
        if array is None:
            return None
        tensor = torch.from_numpy(array[start : start + size])
        return tensor.to(device, non_blocking=True)

    for start in range(0, len(batch.tokens), size):
        yield dict(
            tokens=piece(batch.tokens, start),
            targets=piece(batch.targets, start),
            positions=piece(batch.positions, start),
            documents=piece(batch.documents, start),
        )
