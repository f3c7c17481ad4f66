"""Asynchronous pipelines, PipeDream and PipeDream-2BW (`schedules/asynchronous.py` says which weights a microbatch uses).

A step runs all its forward passes here, and as many backward passes as the rank is not behind: those of the microbatches that went
forward first, of the step before at the beginning. Weights are updated between two passes, as soon as a step's gradients are whole.
Memory: the latest weights and some versions before them, each as large as the parameters. Traffic is that of 1F1B.

Data ranks of a stage are equally far behind, so they update together, and add up gradients as in any pipeline. Versions are sharded
as the parameters are (`shard.py`). Passes alternate between versions, so each gathers what it uses, whatever ZeRO's stage: as much
traffic as with ZeRO-3.

`drain` runs the backward passes that are left. It changes nothing of what is learned, since the version that a microbatch uses
follows from its number, and is done before weights are looked at: for an evaluation, a checkpoint, the end.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.parallel.mesh import Mesh
from shardwise.parallel.objective import Microbatch, Objective
from shardwise.parallel.p2p import irecv
from shardwise.parallel.pipeline import P2PChannel, Pipeline
from shardwise.parallel.shard import sharded_modules
from shardwise.schedules import Action, Message, Schedule, version_of, versions_kept
from shardwise.torch_private import local_shard, sharded_parameters


class Stream(P2PChannel):
    """What this rank exchanges with its neighbours over all steps: activations from one, gradients from the other, in order."""

    def __init__(self, schedule: Schedule, mesh: Mesh, like: Tensor) -> None:
        super().__init__(schedule, mesh, like)
        self.expected = {}

    def post(self, message: Message, sender: int) -> None:
        if message not in self.arriving:
            buffer = torch.empty_like(self.like)
            work = irecv(buffer, self.ranks[sender], group=self._group(sender, self.me))
            self.arriving[message] = (buffer, work)


class Versions:
    """The weights of this rank, the latest and some before."""

    def __init__(self, parameters: list[nn.Parameter], models: Iterable[nn.Module]) -> None:
        self.parameters = parameters
        modules = (m for model in models for m in sharded_modules(model))
        self.sharded = {each.shard: each.memory for m in modules for each in sharded_parameters(m)}
        self.aliases: list[Tensor] = []
        """What the optimizer updates, in the memory of the parameters."""
        self.latest = 0
        """Updates so far."""
        self.before: dict[int, list[Tensor]] = {}
        """Earlier versions by the number of updates behind them."""

    def advance(self, oldest: int) -> None:
        """Put the latest by, as far as versions from `oldest` on are needed: an update follows, in memory of its own."""
        self.forget(oldest)
        if self.latest >= oldest:
            self.before[self.latest] = self.now()
            self._point([_copied(values) for values in self.before[self.latest]])
        self.latest += 1

    def forget(self, oldest: int) -> None:
        """Drop the versions before one."""
        self.before = {number: kept for number, kept in self.before.items() if number >= oldest}

    def now(self) -> list[Tensor]:
        """The weights that the network has, of this rank's shards."""
        return [local_shard(p).data for p in self.parameters]

    def copied(self) -> list[Tensor]:
        """The same, in memory of their own."""
        return [_copied(values) for values in self.now()]

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
        """While it is open, the network has that version."""
        if number == self.latest:
            yield
            return
        now = self.now()
        self._use(self.before[number])
        try:
            yield
        finally:
            self._use(now)

    def restart(self, latest: int, before: dict[int, list[Tensor]]) -> None:
        """Go on after so many updates, with these versions before the latest."""
        self.latest, self.before = latest, before


def _copied(shard: Tensor) -> Tensor:
    """A shard in memory of its own, with the padding that it is gathered with."""
    return _whole(shard).clone().as_strided(shard.shape, shard.stride(), shard.storage_offset())


def _whole(shard: Tensor) -> Tensor:
    """All that is in the memory of a shard."""
    return shard.as_strided((shard.untyped_storage().nbytes() // shard.element_size(),), (1,), 0)


class AsynchronousPipeline(Pipeline):
    """Runs this rank's part of an asynchronous pipeline."""

    versions: Versions
    update: Callable[[], None]
    """Called when the gradients of a step are whole; what it returns from, the next step has."""

    def attach(self, versions: Versions, update: Callable[[], None], clear: Callable[[], None]) -> None:
        """What holds the weights, what updates them, and what drops gradients that were used."""
        self.versions, self.update, self.clear = versions, update, clear
        self.used = True  # whether an update has used the gradients that stand
        self.behind = self.mesh.size("pipeline") - 1 - self.mesh.index("pipeline")
        self.flying: deque[int] = deque()  # microbatches between their passes, counted over all steps
        self.number = 0  # of the next one that goes forward
        self.microbatches: Any = {}
        self.stream: Stream | None = None

    def version(self, number: int) -> int:
        """The version that a microbatch uses here."""
        return version_of(self.schedule.name, self.behind, self.schedule.microbatches, number)

    @property
    def kept(self) -> int:
        """Versions kept beside the latest."""
        return versions_kept(self.schedule.name, self.behind, self.schedule.microbatches)

    def restart(self, step: int) -> None:
        """Go on after so many steps."""
        self.number = step * self.schedule.microbatches

    def run(
        self, microbatches: list[Microbatch], like: Tensor, objective: Objective, factor: Tensor | float | None
    ) -> Tensor:
        """The forward passes of a step, and the backward passes of those microbatches that are due."""
        if factor is None:
            self.drain()
            return super().run(microbatches, like, objective, factor)
        if self.stream is None:
            self.stream = Stream(self.schedule, self.mesh, like)
        if not self.flying:
            self.microbatches = {}
        self.channel, self.local, self.handover = self.stream, {}, None
        self.loss = torch.zeros(
            (), dtype=torch.float64 if like.dtype == torch.float64 else torch.float32, device=like.device
        )
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
        """The backward passes that are left, and their update."""
        while self.flying:
            self._back()
        if self.stream is not None:
            self.stream.close()

    def _back(self) -> None:
        """The backward pass of the microbatch that has waited longest; behind the last one of a step, the update."""
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
