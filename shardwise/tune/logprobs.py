"""The log-probabilities of answers by the network in training, on any layout, and by the reference of a GRPO run: the weights that
training began with, from which the policy must not move too far away.

Both are forward passes through the pipeline, as in an evaluation. Every rank keeps its own shards of the reference. For its passes
they are swapped with the parameters in place, so that the same network computes on any layout. This costs the memory of the
parameters once more, and two passes over them. With adapters nothing is kept: the adapters are switched off for the pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from shardwise.checkpoint.resume import load_weights
from shardwise.checkpoint.state import buffers
from shardwise.data.tokenizer import Tokenizer
from shardwise.model.adapters import adapters_off
from shardwise.parallel.context import zigzag_positions
from shardwise.parallel.local_parameter import local
from shardwise.parallel.shard import sharded_modules
from shardwise.train.batches.reference import collect
from shardwise.train.objectives.grpo import AnswerBatch
from shardwise.train.step import TrainState


@torch.no_grad()
def answer_logprobs(state: TrainState, batch: AnswerBatch) -> NDArray[np.float64]:
    """The log-probabilities of a step's targets, [rows of the global batch, length], on every rank."""
    run, mesh = state.run, state.mesh
    state.refresh()
    microbatches = state.microbatches(batch)
    collect(state.parallel, microbatches, state._stream(), "answers", run.objective.temperature)
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


class Reference:
    """This rank's shards of the weights that training began with."""

    @torch.no_grad()
    def __init__(self, state: TrainState, tokenizer: Tokenizer, log: Callable[[str], None]) -> None:
        """A resumed train state, whose step is not 0, reads the initial weights again from their source."""
        self.state = state
        self.kept: list[Tensor] = []
        if state.run.adapter.used:  # the reference is the network without its adapters
            return
        now = [values.clone() for values in self._values()]
        if state.step:
            load_weights(state, tokenizer, log)
        self.kept = [values.clone() for values in self._values()]
        for values, before in zip(self._values(), now, strict=True):
            values.copy_(before)

    def _values(self) -> list[Tensor]:
        """The parameters, and the routers' selection biases, which decide what a network computes too."""
        parameters = [local(each.parameter.detach()) for each in self.state.parallel.parameters]
        return parameters + [buffer for _, buffer in buffers(self.state.parallel.models)]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside this context the network computes with the reference weights."""
        if self.state.run.adapter.used:
            with adapters_off(*self.state.parallel.models):
                yield
            return
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for values, other in zip(self._values(), self.kept, strict=True):
            before = values.clone()
            values.copy_(other)
            other.copy_(before)
        for model in self.state.parallel.models:
            for module in sharded_modules(model):  # gathered parameters still hold the other values
                module.reshard()
