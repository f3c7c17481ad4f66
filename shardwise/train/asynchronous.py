"""One training step of an asynchronous pipeline: as in `step.py`, but no rank waits for another.

Each rank updates its weights between its passes, as soon as it has a step's gradients (`parallel/asynchronous.py`). The token
count is all-reduced while the passes run. Loss and gradient norm are all-reduced after the passes, and only a reader of the result
waits for them. The norm is that of the gradients each rank last updated with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from shardwise.data.batches import Batch
from shardwise.parallel.asynchronous import AsynchronousPipeline, Versions
from shardwise.parallel.gradients import reduce_partial_gradients
from shardwise.torch_private import preserved_versions
from shardwise.torch_private.fully_shard import local_shard
from shardwise.train.batches.microbatches import on_device
from shardwise.train.progress.result import StepResult
from shardwise.train.step_state import StepState


class LateResult(StepResult):
    """The result of a step that other ranks may still be computing."""

    def __init__(self, step: int, learning_rate: float, wait: Callable[[], Tensor]) -> None:
        self.step, self.learning_rate, self._wait, self._arrived = step, learning_rate, wait, None

    @cached_property
    def _values(self) -> Tensor:  # type: ignore[override]
        return self._wait()

    @property
    def loss(self) -> Tensor:  # type: ignore[override]
        return self._values[0]

    @property
    def grad_norm(self) -> Tensor:  # type: ignore[override]
        return self._values[1]

    @property
    def stop(self) -> Tensor:  # type: ignore[override]
        return self._values[2]

    @property
    def measured(self) -> Tensor | None:  # type: ignore[override]
        return self._values[3:] if len(self._values) > 3 else None


class Updates:
    """The weight updates of an asynchronous pipeline. A rank makes each one as soon as it has the gradients."""

    def __init__(self, state: StepState, pipeline: AsynchronousPipeline) -> None:
        self.learned = [h for h in state.parallel.parameters if not h.entry.frozen]
        self.state, self.pipeline = state, pipeline
        self.versions = Versions([h.parameter for h in self.learned], state.parallel.models)
        shards = zip(state.optimizer.shards, state.parallel.parameters, strict=True)
        self.versions.aliases = [shard for shard, h in shards if not h.entry.frozen]
        self.due: deque[tuple[int, Callable[[], Tensor]]] = deque()  # steps not yet updated, with their token counts
        self.square = torch.zeros((), dtype=torch.float64, device=state.device)
        pipeline.attach(self.versions, self.update, state.optimizer.zero_grad)

    def update(self) -> None:
        """Update this rank's weights with the gradients of a step."""
        state, (step, counted) = self.state, self.due.popleft()
        with state.observers.phase("gradients"):
            reduce_partial_gradients(state.parallel.parameters, state.mesh)
        factor = state.objective.divisor / counted()[0].clamp(min=1)
        with state.observers.phase("clip"):
            self.square = state.optimizer.squared_norm(state.device) * factor**2
        # Autograd has saved the unsharded parameters for passes in flight, which must still see the old values.
        saved = tuple(p for p in self.versions.parameters if local_shard(p) is p)
        with state.observers.phase("optimizer"), preserved_versions(saved):
            state.optimizer.step(step, factor)

    def restart(self) -> None:
        """Resume at the train state's step. Earlier weight versions are not available, so the current weights stand in for them."""
        step = self.state.step
        self.pipeline.restart(step)
        self.versions.restart(step, self.pipeline.version(step * self.pipeline.schedule.microbatches))

    def train_step(self, batch: Batch, stop: bool) -> StepResult:
        """One step of an asynchronous pipeline."""
        state, layout, objective = self.state, self.state.run.layout, self.state.objective
        share = objective.count(batch) * layout.data_ranks / layout.world
        counted = state.start_all_reduce(
            on_device(torch.tensor([share, float(stop)], dtype=torch.float64), state.device)
        )
        state.step += 1
        state.tokens += state.run.batch_tokens if batch.step_tokens is None else batch.step_tokens
        self.due.append((state.step, counted))
        loss = state.passes(batch)
        own = torch.cat((loss[None], objective.measured)).double() / layout.tensor
        sums = state.start_all_reduce(torch.cat((self.square[None], own)))

        def wait() -> Tensor:
            found, count = sums(), counted()
            over = found[1:] / count[0].clamp(min=1)
            return torch.cat((over[:1], found[:1].sqrt(), count[1:2], over[1:]))

        return LateResult(state.step, state.optimizer.learning_rate(state.step), wait)
