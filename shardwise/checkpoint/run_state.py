"""What checkpoints need of a run in progress; the trainer has it, and stands above."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from shardwise.parallel.apply import Parallel
from shardwise.parallel.asynchronous import Versions
from shardwise.parallel.compress.exchange import Exchange
from shardwise.parallel.local_parameter import LocalParameter
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.outer import Outer
from shardwise.run import Run


class OptimizerState(Protocol):
    """The optimizer's tensors, by the index of their parameter."""

    def state_of(self, index: int) -> dict[str, Tensor]: ...

    def set_state(self, index: int, values: dict[str, Tensor]) -> None: ...


class LossScale(Protocol):
    """The loss scale of float16, and the number of good steps in a row."""

    scale: float
    good: int


class Updates(Protocol):
    """Updates the weights of an asynchronous pipeline; `train.asynchronous.Updates` is one."""

    learned: list[LocalParameter]
    versions: Versions

    def restart(self) -> None:
        """Continue from the current train state."""


class Network(Protocol):
    """A rank's part of a network, on its mesh."""

    run: Run
    mesh: Mesh
    device: torch.device
    parallel: Parallel


class State(Network, Protocol):
    """The state of a run in progress that a checkpoint saves and restores. `train.step.TrainState` is one."""

    job: Run
    """The run that a checkpoint describes: `run`, or, for one replica of an elastic run, the full run on this replica's ranks."""
    step: int
    tokens: int
    kept: dict[str, Tensor]
    """Other tensors of a run, the same on every rank."""
    exchange: Exchange | None
    outer: Outer | None

    @property
    def full_count(self) -> float:
        """What the loss of a batch is divided by in which every token counts."""

    @property
    def updates(self) -> Updates | None: ...

    @property
    def optimizer(self) -> OptimizerState: ...

    @property
    def loss_scale(self) -> LossScale: ...

    def drain(self) -> None:
        """Finish the passes that an asynchronous pipeline has in flight."""
