"""The reference of a run: the weights that training began with, which answers must not move too far away from.

Every rank keeps its own shards of them. For a pass they change places with the parameters, element by element, so that the same
network computes on any layout; it costs the memory of the parameters once, and two passes over them. With adapters nothing is kept:
they are switched off for the pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from shardwise.checkpoint.resume import load_weights
from shardwise.data.tokenizer import Tokenizer
from shardwise.model.adapters import adapters_off
from shardwise.parallel.local_parameter import local
from shardwise.parallel.shard import sharded_modules
from shardwise.train.step import TrainState


class Reference:
    """This rank's shards of the weights that training began with."""

    @torch.no_grad()
    def __init__(self, state: TrainState, tokenizer: Tokenizer, log: Callable[[str], None]) -> None:
        """A state that has made steps already reads them again from where they came from."""
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
        return [local(each.parameter.detach()) for each in self.state.parallel.parameters]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The network computes with the reference inside."""
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
            for module in sharded_modules(model):  # what was gathered before holds the other values
                module.reshard()
