"""What the parts of a step need of the train state. `step.py` makes it out of these parts, so they do not import it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from shardwise.checkpoint.run_state import State
from shardwise.data.batches import Batch
from shardwise.model.moe.layer import Router
from shardwise.parallel.observer import Observers
from shardwise.train.faults.guard import History
from shardwise.train.objectives.objective import TrainObjective
from shardwise.train.optimizers.optimizer import Optimizer


class StepState(State, Protocol):
    """The train state as the parts of a step see it."""

    observers: Observers
    objective: TrainObjective
    routers: list[Router]
    history: History
    tuner: Any

    @property
    def optimizer(self) -> Optimizer: ...

    def passes(self, batch: Batch) -> Tensor:
        """Run the forward and backward passes of a step; returns the loss."""

    def start_all_reduce(self, share: Tensor) -> Callable[[], Tensor]:
        """Start a sum over all ranks; returns a function that waits for it."""
