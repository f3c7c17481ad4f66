"""The reference of a GRPO run: the weights that training began with, from which the policy must not move too far away.

Every rank keeps its own shards of them. For a forward pass they are swapped with the parameters in place, so that the same network
computes on any layout. This costs the memory of the parameters once more, and two passes over them. With adapters nothing is kept:
the adapters are switched off for the pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from shardwise.checkpoint.resume import load_weights
from shardwise.checkpoint.state import buffers
from shardwise.data.tokenizer import Tokenizer
from shardwise.model.adapters import adapters_off
from shardwise.parallel.local_parameter import local
from shardwise.parallel.shard import sharded_modules
from shardwise.train.step import TrainState


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
            with contextlib.ExitStack() as stack:
                for model in self.state.parallel.models:
                    stack.enter_context(adapters_off(model))
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
