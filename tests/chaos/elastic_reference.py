"""Replicas that come and go as a loop over them in one process: each an ordinary run on its rows, the outer step in NumPy, and who
took part in which exchange as a run has recorded it."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np

from shardwise.data.open import open_data
from shardwise.run import LayoutConfig, Run
from shardwise.train.step import TrainState

Weights = dict[str, np.ndarray]


def read(state: TrainState) -> Weights:
    return {h.name: h.parameter.detach().numpy().copy() for h in state.parallel.parameters}


def write(state: TrainState, weights: Weights) -> None:
    for h in state.parallel.parameters:
        h.parameter.detach().numpy()[...] = weights[h.name]


class Loop:
    """All replicas of a run, one after the other. No fragments, nothing underway, nothing compressed."""

    def __init__(self, run: Run) -> None:
        self.lay, self.size = run.layout, run.train.global_batch
        self.rows = self.size // self.lay.replicate
        train = replace(run.train, global_batch=self.rows, microbatch=self.rows)
        self.alone = replace(run, layout=LayoutConfig(), train=train, cluster=replace(run.cluster, devices_per_node=1))
        self.replicas = {n: TrainState(self.alone) for n in range(self.lay.replicate)}
        self.samples = open_data(self.alone).train
        self.anchor = read(self.replicas[0])
        self.momentum = {name: np.zeros_like(value) for name, value in self.anchor.items()}

    def step(self, number: int) -> dict[int, float]:
        """A step of all that are there, counted from 1; their losses."""
        losses = {}
        for n, replica in self.replicas.items():
            first = (number - 1) * self.size + n * self.rows
            losses[n] = replica.train_step(self.samples.take(np.arange(first, first + self.rows))).loss.item()
        return losses

    def exchange(self, added: list[int], joined: dict[int, int]) -> None:
        """Some replicas take part, and others join behind it, each as a copy of one of them."""
        ends = [read(self.replicas[n]) for n in added]
        for name, anchor in self.anchor.items():
            g = sum(anchor - end[name] for end in ends) / len(ends)
            self.momentum[name] = self.lay.outer_momentum * self.momentum[name] + g
            self.anchor[name] = anchor - self.lay.outer_lr * (g + self.lay.outer_momentum * self.momentum[name])
        stayed = {n: self.replicas[n] for n in added}
        for replica in stayed.values():
            write(replica, self.anchor)
        for joiner, giver in joined.items():
            stayed[joiner] = clone(stayed[giver], self.alone)
        self.replicas = stayed


def clone(state: TrainState, run: Run) -> TrainState:
    other = TrainState(run)
    write(other, read(state))
    other.step, other.tokens = state.step, state.tokens
    for own, theirs in zip(other.optimizer.parts, state.optimizer.parts, strict=True):
        own.load_state_dict(copy.deepcopy(theirs.state_dict()))
    return other


def simulated(run: Run, exchanges: list[dict[str, Any]]) -> tuple[dict[int, dict[int, float]], Weights]:
    """Losses by step and replica up to the last exchange, and the weights behind it."""
    loop, losses, number = Loop(run), {}, 0
    for each in exchanges:
        while number < each["step"]:
            number += 1
            losses[number] = loop.step(number)
        loop.exchange(each["added"], {int(joiner): giver for joiner, giver in each["joined"].items()})
    return losses, loop.anchor
