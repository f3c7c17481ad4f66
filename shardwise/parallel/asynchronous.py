"""Asynchronous pipelines, PipeDream and PipeDream-2BW (which weights a microbatch uses: `schedules/one_forward_one_backward.py`).

A step runs all its forward passes. On a rank d stages before the last, each is followed by one backward pass once more than d
microbatches are in flight. The oldest microbatch goes backward first, so a step begins with backward passes of the step before.
Weights are updated between two passes, as soon as a step's gradients are complete. Memory: the latest weights and some earlier
versions, each as large as the parameters. Traffic is that of 1F1B.

Data ranks of a stage are equally far behind, so they update together, and sum gradients as in any pipeline. Versions are sharded
like the parameters (`shard.py`). Passes alternate between versions, so each pass gathers its weights, whatever the ZeRO stage: the
traffic is that of ZeRO-3.

`drain` runs the remaining backward passes. It does not change what is learned, since a microbatch's version follows from its
number. It runs before weights are read: for an evaluation, a checkpoint, the end.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.parallel.objective import Microbatch, Objective
from shardwise.parallel.pipeline import P2PChannel, Pipeline
from shardwise.parallel.shard import sharded_modules
from shardwise.schedules import Action, version_of, versions_kept
from shardwise.torch_private.fully_shard import local_shard, sharded_parameters


class Versions:
    """This rank's weights: the latest version and some earlier ones."""

    def __init__(self, parameters: list[nn.Parameter], models: Iterable[nn.Module]) -> None:
        self.parameters = parameters
        modules = (m for model in models for m in sharded_modules(model))
        self.sharded = {each.shard: each.memory for m in modules for each in sharded_parameters(m)}
        self.aliases: list[Tensor] = []
        """The tensors that the optimizer updates, in the memory of the parameters."""
        self.latest = 0
        """Number of updates so far."""
        self.before: dict[int, list[Tensor]] = {}
        """Earlier versions, by the number of updates they include."""

    def advance(self, oldest: int) -> None:
        """Keep the latest version if versions from `oldest` on are needed; the update that follows then gets its own memory."""
        self.before = {number: kept for number, kept in self.before.items() if number >= oldest}
        if self.latest >= oldest:
            self.before[self.latest] = self.now()
            self._point([_copied(values) for values in self.before[self.latest]])
        self.latest += 1

    def now(self) -> list[Tensor]:
        """The network's current weights: this rank's shards."""
        return [local_shard(p).data for p in self.parameters]

    def _use(self, weights: list[Tensor]) -> None:
        for parameter, values in zip(self.parameters, weights, strict=True):
            shard = local_shard(parameter)
            if shard in self.sharded:
                self.sharded[shard]().data = _whole(values)
            shard.data = values

    def _point(self, weights: list[Tensor]) -> None:
        self._use(weights)
        for alias, values in zip(self.aliases, weights, strict=True):
            alias.data = values

    @contextlib.contextmanager
    def using(self, number: int) -> Iterator[None]:
        """While this context is open, the network has version `number`."""
        if number == self.latest:
            yield
            return
        now = self.now()
        self._use(self.before[number])
        try:
            yield
        finally:
            self._use(now)

    def restart(self, latest: int, oldest: int) -> None:
        """Continue after `latest` updates. Copies of the current weights stand in for earlier versions, from `oldest` on."""
        self.latest = latest
        self.before = {number: [_copied(values) for values in self.now()] for number in range(oldest, latest)}


def _copied(shard: Tensor) -> Tensor:
    """A copy of a shard, with the padding that it is gathered with."""
    return _whole(shard).clone().as_strided(shard.shape, shard.stride(), shard.storage_offset())


def _whole(shard: Tensor) -> Tensor:
    """All of a shard's memory, as a flat tensor."""
    return shard.as_strided((shard.untyped_storage().nbytes() // shard.element_size(),), (1,), 0)


class AsynchronousPipeline(Pipeline):
    """Runs this rank's stage of an asynchronous pipeline."""

    versions: Versions
    update: Callable[[], None]
    """Called when the gradients of a step are complete; the next step has the updated weights."""

    def attach(self, versions: Versions, update: Callable[[], None], clear: Callable[[], None]) -> None:
        """Set the holder of the weights, the function that updates them, and the function that drops used gradients."""
        self.versions, self.update, self.clear = versions, update, clear
        self.used = True  # whether an update has used the current gradients
        self.behind = self.mesh.size("pipeline") - 1 - self.mesh.index("pipeline")
        self.flying: deque[int] = deque()  # microbatches between forward and backward pass, counted over all steps
        self.number = 0  # of the next microbatch that goes forward
        self.microbatches: Any = {}
        self.stream: P2PChannel | None = None  # activations come from one neighbour, gradients from the other, in order

    def version(self, number: int) -> int:
        """The version that a microbatch uses on this rank."""
        return version_of(self.schedule.name, self.behind, self.schedule.microbatches, number)

    @property
    def kept(self) -> int:
        """Number of versions kept besides the latest."""
        return versions_kept(self.schedule.name, self.behind, self.schedule.microbatches)

    def restart(self, step: int) -> None:
        """Continue after this many steps."""
        self.number = step * self.schedule.microbatches

    def run(
        self, microbatches: list[Microbatch], like: Tensor, objective: Objective, factor: Tensor | float | None
    ) -> Tensor:
        """Run the forward passes of a step, and the backward passes that are due."""
        if factor is None:
            self.drain()
            return super().run(microbatches, like, objective, factor)
        if self.stream is None:
            self.stream = P2PChannel(self.mesh, like, None)
        if not self.flying:
            self.microbatches = {}
        self.channel, self.local, self.handover = self.stream, {}, None
        self.loss = torch.zeros((), dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
        self.objective, self.factor = objective, factor
        self.executed, self.times = [], []
        for microbatch in microbatches:
            self.microbatches[self.number] = microbatch
            self.flying.append(self.number)
            self._do("F", self.number)
            self.number += 1
            if len(self.flying) > self.behind:
                self._back()
        return self.loss

    def input_of(self, action: Action) -> Tensor:
        return self.stages[action.stage].inputs[self.number]

    def batches(self) -> Iterable[Microbatch]:
        return list(self.microbatches.values())

    def drain(self) -> None:
        """Run the remaining backward passes, and their update."""
        while self.flying:
            self._back()
        if self.stream is not None:
            self.stream.close()

    def _back(self) -> None:
        """Run the backward pass of the oldest microbatch in flight; after the last one of a step, the update."""
        number = self.flying.popleft()
        if self.used:
            self.clear()
            self.used = False
        last = number % self.schedule.microbatches == self.schedule.microbatches - 1
        self._do("B", number, last)
        del self.microbatches[number]
        if last:
            self._do("U", number)

    def _do(self, kind: Any, number: int, last: bool = False) -> None:
        (stage,) = self.stages
        start = time.perf_counter()
        listed = Action(kind, stage, number % self.schedule.microbatches)
        with self.observers.action(listed):
            self.channel.let_go()
            if kind == "U":
                self.versions.advance(self.version(self.flying[0] if self.flying else self.number))
                self.update()
                self.used = True
            else:
                with self.versions.using(self.version(number)):
                    self._execute(Action(kind, stage, number), last)
        self.executed.append(listed)
        self.times.append((start, time.perf_counter()))
