"""A rank of a replica that may leave and rejoin its run (`layout.sync_elastic`), as the loop sees it.

A replica is a run of its own on its share of every batch. The share depends on the replica's number only, not on which others are
present: a sample always goes to the same replica, or to none while that replica is away. A rejoining replica takes all its state
from a member after an exchange: weights, the state of both optimizers, the counters and the guard's history. The member copies its
state aside and sends it in the background. One replica writes metrics, checkpoints and evaluations for all. If it dies another
takes over, which has kept the records since the last exchange.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.checkpoint.state import buffers
from shardwise.parallel.local_parameter import local
from shardwise.parallel.members import Answer, ElasticOuter, Members, Place
from shardwise.run import Run
from shardwise.run.ranks.coordinates import ranks_of_replica
from shardwise.train.faults.guard import History
from shardwise.train.progress.metrics import Metrics, read_metrics
from shardwise.train.step_state import StepState


def run_of_replica(run: Run) -> Run:
    """The run of one replica alone: its layout, and its share of the global batch."""
    batch = run.train.global_batch // run.layout.replicate
    return replace(run, layout=run.layout.one_replica, train=replace(run.train, global_batch=batch))


class Elastic:
    """This rank's side of a run with elastic replicas, which may leave and rejoin."""

    def __init__(self, run: Run, place: Place) -> None:
        self.whole, self.run = run, run_of_replica(run)
        ranks = self.run.layout.world
        self.job = replace(run, layout=self.run.layout, cluster=replace(run.cluster, nodes=1, devices_per_node=ranks))
        """The run that checkpoints describe: the full global batch, on the ranks of one replica."""
        self.place, self.layout = place, run.layout
        self.members = Members(place, max(600.0, 2 * run.train.hang_seconds))
        self.rank = ranks_of_replica(run.layout, place.replica)[place.rank]
        """This rank's number among all ranks of the run."""

    @staticmethod
    def here(run: Run) -> Elastic | None:
        """This process's `Elastic`, read from its environment; None if the run's replicas are not elastic."""
        place = Place.of(os.environ)
        return Elastic(run, place) if place is not None else None

    @property
    def first(self) -> bool:
        """Whether this rank writes for all replicas."""
        return self.members.writes and self.place.rank == 0

    def share(self, indices: np.ndarray) -> np.ndarray:
        """This replica's samples of a global batch."""
        return np.split(indices, self.layout.replicate)[self.place.replica]

    def begin(self, state: StepState) -> bool:
        """Wait until this replica may take part. Returns whether it received another replica's state and continues from it."""
        while (answer := self.members.begin())["source"] >= 0:
            ok = True
            try:
                receive(state, self.members, _name(answer, self.place.replica), answer["source"])
            except (RuntimeError, dist.DistError):  # the sending replica has died
                ok = False
            if self.members.ask("received", ok=ok)["has"]:
                return True
        return False

    def after_step(self, state: StepState, metrics: Metrics | SharedMetrics | None) -> None:
        """If an exchange was just applied, send this replica's state to the joining replicas assigned to it."""
        decided = state.outer.decided if isinstance(state.outer, ElasticOuter) else None
        if decided is None:
            return
        if isinstance(metrics, SharedMetrics):
            metrics.after_exchange(state.step)
        mine = [joiner for joiner, giver in decided["joined"].items() if giver == self.place.replica]
        if not mine:
            return
        described, tensors = packed(state)
        for joiner in mine:
            given = (self.members, _name(decided, int(joiner)), described, tensors)
            threading.Thread(target=_give, args=given, name="giving", daemon=True).start()
        self.members.ask("give")


def _name(decided: Answer, joiner: int) -> str:
    """The store's key prefix for one transfer of state."""
    return f"state/{decided['era']}/{decided['round']}/{joiner}"


def _tensors(state: StepState) -> Iterator[tuple[str, Tensor]]:
    """All tensors of this rank's state, in an order that is the same on the same rank of every replica."""
    assert state.outer is not None
    for n, each in enumerate(state.parallel.parameters):
        if each.entry.frozen:
            continue
        yield f"{n}/weights", local(each.parameter.detach())
        for key, value in sorted(state.optimizer.state_of(n).items()):
            yield f"{n}/optimizer/{key}", value
        for key, value in sorted(state.outer.state_of(n).items()):
            yield f"{n}/outer/{key}", value
    for name, buffer in buffers(state.parallel.models):
        yield f"buffer/{name}", buffer


def packed(state: StepState) -> tuple[str, list[Tensor]]:
    """Returns a description of the state, as JSON, and a copy of its tensors on the host."""
    named = list(_tensors(state))
    copies = [value.detach().to("cpu", copy=True).contiguous() for _, value in named]
    shapes = [(name, list(value.shape), str(value.dtype).removeprefix("torch.")) for name, value in named]
    counters = dict(step=state.step, tokens=state.tokens, history=asdict(state.history))
    return json.dumps(dict(tensors=shapes, **counters)), copies


def _give(members: Members, name: str, described: str, tensors: list[Tensor]) -> None:
    with contextlib.suppress(RuntimeError, dist.DistError):  # the receiving replica has died
        members.store.set(f"{name}/{members.place.rank}", described)
        group = members.give(name)
        for tensor in tensors:
            if tensor.numel():
                group.send([_flat(tensor)], 1, 0).wait()


def _flat(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


@torch.no_grad()
def receive(state: StepState, members: Members, name: str, source: int) -> None:
    """Receive a member's state."""
    assert state.outer is not None
    group = members.take(name, source)
    described = json.loads(members.store.get(f"{name}/{members.place.rank}"))
    found: dict[str, Tensor] = {}
    for key, shape, dtype in described["tensors"]:
        found[key] = torch.empty(shape, dtype=getattr(torch, dtype))
        if found[key].numel():
            group.recv([_flat(found[key])], 0, 0).wait()
    for n, each in enumerate(state.parallel.parameters):
        if each.entry.frozen:
            continue
        local(each.parameter.detach()).copy_(found[f"{n}/weights"])
        start = f"{n}/optimizer/"
        values = {key.removeprefix(start): value for key, value in found.items() if key.startswith(start)}
        if values:
            state.optimizer.set_state(n, {key: v.to(state.device) for key, v in values.items()})
        for key, value in state.outer.state_of(n).items():
            value.copy_(found[f"{n}/outer/{key}"])
    for key, buffer in buffers(state.parallel.models):
        buffer.copy_(found[f"buffer/{key}"])
    state.step, state.tokens = described["step"], described["tokens"]
    state.history = History(**described["history"])


class SharedMetrics:
    """The metrics of a run with elastic replicas. Every replica makes records, and one replica writes its own for all. If another
    replica takes over, it writes those of its own records that the file lacks."""

    def __init__(self, elastic: Elastic, out: Path, log: Callable[[str], None], begun: int | None) -> None:
        """`begun`: the step the run begins with; None on a replica that joins later."""
        self.elastic, self.out, self.log = elastic, out, log
        self.pending: list[dict[str, Any]] = []
        self.before = 0
        self.metrics: Metrics | None = None
        self.repeats = dict(heard=0.0, steps=0, seconds=0.0)
        if begun is not None and elastic.first:
            self.metrics = Metrics(out, elastic.whole, log, begun)
            self.repeats = self.metrics.repeats

    def record(self, **values: Any) -> None:
        """Write a record, or hold it back while another replica is the writer."""
        if "loss" in values:
            values |= dict(replicas=self.elastic.members.count)
        self.pending.append(values)
        if not self.elastic.first:
            return
        if self.metrics is None:
            written = max((r["step"] for r in read_metrics(self.out)), default=0)
            # The newest record is always written by this replica, even if the file already has one of that step.
            self.pending = [r for r in self.pending[:-1] if r["step"] > written] + self.pending[-1:]
            self.metrics = Metrics(self.out, self.elastic.whole, self.log, resumed_step=written)
        for each in self.pending:
            self.metrics.record(**each)
        self.pending = []

    def after_exchange(self, step: int) -> None:
        """Drop the records that the writer has certainly written: those before the last exchange but one."""
        self.pending = [r for r in self.pending if r["step"] > self.before]
        self.before = step

    def close(self) -> None:
        """Close the metrics file, if this replica has opened it."""
        if self.metrics is not None:
            self.metrics.close()
