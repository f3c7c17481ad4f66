"""Replicas that rarely speak as a loop over them in one process: each an ordinary run on its rows, and the outer step in NumPy."""

from __future__ import annotations

import copy
from dataclasses import replace

import cases
import compress_reference
import numpy as np

from shardwise.run import LayoutConfig, Run
from shardwise.train.step import TrainState

Weights = dict[str, np.ndarray]


def read(train_state: TrainState) -> Weights:
    return {h.name: h.parameter.detach().numpy().copy() for h in train_state.parallel.parameters}


def write(train_state: TrainState, weights: Weights) -> None:
    for h in train_state.parallel.parameters:
        if h.name in weights:
            h.parameter.detach().numpy()[...] = weights[h.name]


def fragment(name: str, count: int) -> int:
    return int(name.split(".")[1]) % count if name.startswith("layers.") else 0


class Loop:
    """All replicas of a run, one after the other."""

    def __init__(self, run: Run) -> None:
        self.lay = run.layout
        self.rows = run.train.global_batch // self.lay.replicate
        alone = replace(
            run, layout=LayoutConfig(), train=replace(run.train, global_batch=self.rows, microbatch=self.rows)
        )
        self.size, self.steps = run.train.global_batch, run.train.steps
        self.replicas = [TrainState(alone) for _ in range(self.lay.replicate)]
        self.anchor = read(self.replicas[0])
        self.momentum = {name: np.zeros_like(value) for name, value in self.anchor.items()}
        self.underway: dict[int, tuple[int, Weights]] = {}
        whole = replace(run.train, microbatch=self.size)
        self.as_one = TrainState(replace(run, layout=LayoutConfig(), train=whole)) if self.lay.compress_warmup else None

    def mean(self, changes: list[Weights]) -> Weights:
        names = list(changes[0])
        if self.lay.compress == "none":
            return {name: sum(c[name] for c in changes) / len(changes) for name in names}
        shapes = [changes[0][name].shape for name in names]
        added = compress_reference.Replicas(self.lay.compress, len(changes), shapes).step(
            [[c[name] for name in names] for c in changes]
        )
        return {name: total / len(changes) for name, total in zip(names, added, strict=True)}

    def apply(self, gradients: Weights, last: bool) -> None:
        lay = self.lay
        for name, g in gradients.items():
            if lay.outer_optimizer == "average":
                self.anchor[name] = self.anchor[name] - g
            else:
                self.momentum[name] = lay.outer_momentum * self.momentum[name] + g
                self.anchor[name] = self.anchor[name] - lay.outer_lr * (g + lay.outer_momentum * self.momentum[name])
        for replica in self.replicas:
            own = read(replica)
            mix = lay.sync_mix if lay.sync_overlap and not last else 0.0
            write(replica, {name: mix * own[name] + (1 - mix) * self.anchor[name] for name in gradients})

    def part(self) -> None:
        """Every replica goes on by itself from where all came to together."""
        assert self.as_one is not None
        self.anchor = read(self.as_one)
        for replica in self.replicas:
            write(replica, self.anchor)
            replica.step = self.as_one.step
            for own, shared in zip(replica.optimizer.parts, self.as_one.optimizer.parts, strict=True):
                own.load_state_dict(copy.deepcopy(shared.state_dict()))

    def step(self, number: int) -> list[float]:
        """A step, counted from 1; the losses of the replicas."""
        lay, losses = self.lay, []
        if self.as_one is not None and number <= lay.compress_warmup:
            loss = self.as_one.train_step(cases.batch(number - 1, True, self.size)).loss.item()
            if number == lay.compress_warmup:
                self.part()
            return [loss] * lay.replicate
        for index, replica in enumerate(self.replicas):
            rows = np.arange(self.size)[index * self.rows : (index + 1) * self.rows]
            batch = cases.take(cases.batch(number - 1, True, self.size), rows)
            losses.append(replica.train_step(batch).loss.item())
        last = number == self.steps
        for f in range(lay.sync_fragments):
            if last and f in self.underway:
                self.apply(self.underway.pop(f)[1], last)
            if last or (number - f * lay.sync_every // lay.sync_fragments) % lay.sync_every == 0:
                mine = [name for name in self.anchor if fragment(name, lay.sync_fragments) == f]
                changes = [{n: self.anchor[n] - read(r)[n] for n in mine} for r in self.replicas]
                self.underway[f] = (number + lay.sync_overlap, self.mean(changes))
            if f in self.underway and (last or number >= self.underway[f][0]):
                self.apply(self.underway.pop(f)[1], last)
        return losses


def simulated(run: Run) -> tuple[list[list[float]], list[Weights]]:
    """Losses by step and replica, and the weights of every replica behind the last step."""
    loop = Loop(run)
    losses = [loop.step(number) for number in range(1, run.train.steps + 1)]
    return losses, [read(replica) for replica in loop.replicas]
