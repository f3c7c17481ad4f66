"""The trainer's log-probabilities of answers, on any layout: forward passes through its pipeline, as in an evaluation."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from shardwise.parallel.context import zigzag_positions
from shardwise.parallel.objective import Microbatch, Objective
from shardwise.train.objectives.grpo import AnswerBatch
from shardwise.train.step import TrainState

Floats = NDArray[np.float64]


class Collector(Objective):
    """Stores the log-probabilities of the targets in each microbatch, instead of computing a loss."""

    def __init__(self, temperature: float, device: torch.device) -> None:
        self.auxiliary_weights = torch.zeros(2, device=device)
        self.temperature = temperature

    def loss(self, microbatch: Microbatch, head: nn.Module, hidden: Tensor, unembedding: Tensor) -> Tensor:
        if self.temperature != 1:
            hidden = hidden / self.temperature

        def keep(logprobs: Tensor) -> Tensor:
            microbatch["answers"] = logprobs.detach().clone()
            return logprobs.sum() * 0

        return head(hidden, unembedding, microbatch["targets"], make=keep)


@torch.no_grad()
def answer_logprobs(state: TrainState, batch: AnswerBatch) -> Floats:
    """The log-probabilities of a step's targets, [rows of the global batch, length], on every rank."""
    run, mesh = state.run, state.mesh
    state.refresh()
    for model in state.parallel.models:
        model.eval()
    collector = Collector(run.objective.temperature, state.device)
    microbatches = state.microbatches(batch)
    state.parallel.pipeline.run(microbatches, state._stream(), collector, None)
    length = batch.tokens.shape[1]
    count = len(batch.tokens) * run.layout.data_ranks
    whole = np.zeros((count, length))
    # Tensor ranks all have the same values, so one of them contributes; a rank where no microbatch ends has none.
    rows = state.samples(np.arange(count)).reshape(len(microbatches), -1)
    places = zigzag_positions(length, run.layout.context, mesh.index("context"))
    for mine, microbatch in zip(rows, microbatches, strict=True):
        found = microbatch.get("answers")
        if found is not None and mesh.index("tensor") == 0:
            whole[np.ix_(mine, places)] = found.double().cpu().numpy()
    if run.layout.world == 1:
        return whole
    total = torch.from_numpy(whole).to(state.device)
    dist.all_reduce(total)
    return total.cpu().numpy()
