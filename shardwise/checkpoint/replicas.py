"""What replicas have of their own, in a checkpoint.

Of replicas that rarely speak everything but the first one's is in `replica/NUMBER/…`, by the names that the first one's has, and
what the outer optimizer keeps in `outer/NAME/KEY`, with what is underway. With another number of replicas, each goes on as one of
those that were.

What compressed gradients have not sent yet is in `unsent/REPLICA/NAME/KEY`, shaped like a parameter, and in `factor/RANK/NAME`,
where PowerSGD's next step starts from. A run goes on bit for bit on the same layout. On another one shards find their places as
parameters do. With another number of replicas each takes an equal share of what all of them together had not sent, so nothing is
lost; and factors start anew, which the error feedback makes up for in a few steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from shardwise.checkpoint.format import RUN_FILE, LocalShard
from shardwise.checkpoint.reader import Reader
from shardwise.parallel.apply import Parallel
from shardwise.parallel.local_parameter import local, local_box, replica_index
from shardwise.parallel.mesh import Mesh
from shardwise.run import AXES, Run, read_run

FACTOR = "factor"


class Exchange(Protocol):
    """What replicas keep, by the index of a parameter."""

    def state_of(self, index: int) -> dict[str, Tensor]: ...


class Outer(Exchange, Protocol):
    """The same of replicas that rarely speak."""

    def restart(self) -> None: ...

    def settle(self) -> dict[int, Tensor]: ...

    def receive(self, arriving: dict[int, Tensor]) -> None: ...


class Compressing(Protocol):
    """A run in progress, as far as this file needs it."""

    run: Run
    mesh: Mesh
    parallel: Parallel

    @property
    def exchange(self) -> Exchange | None: ...

    @property
    def outer(self) -> Outer | None: ...


def own_prefix(mesh: Mesh) -> str:
    """Before the names of what this rank's replica has for itself."""
    apart = mesh.layout.sync_every > 1 and mesh.index("replicate")
    return f"replica/{mesh.index('replicate')}/" if apart else ""


def prefix_read(state: Compressing, reader: Reader) -> str:
    """Before the names of what this rank's replica goes on with."""
    before = read_run(reader.folder / RUN_FILE).layout
    number = state.mesh.index("replicate") % before.replicate
    return f"replica/{number}/" if before.sync_every > 1 and number else ""


def outer_shards(state: Compressing) -> Iterator[LocalShard]:
    """What this rank writes of the outer optimizer."""
    mesh = state.mesh
    if state.outer is None:
        return
    arriving = state.outer.settle()
    if mesh.index("replicate"):
        return
    for n, each in enumerate(state.parallel.parameters):
        if replica_index(each, mesh)[1] == 0 and not each.copy_of_other_stage:
            kept = state.outer.state_of(n) | ({"arriving": arriving[n]} if n in arriving else {})
            for key, values in sorted(kept.items()):
                yield LocalShard(f"outer/{each.name}/{key}", each.whole, local_box(each, mesh).offset, values)


@torch.no_grad()
def load_outer(state: Compressing, reader: Reader) -> None:
    """Read what the outer optimizer keeps; where replicas spoke in every step before, it begins with the weights."""
    if state.outer is None:
        return
    state.outer.restart()
    arriving = {}
    for n, each in enumerate(state.parallel.parameters):
        kept = state.outer.state_of(n)
        for key in (*kept, "arriving") if kept else ():
            if (name := f"outer/{each.name}/{key}") in reader:
                part = torch.empty_like(local(each.parameter.detach()))
                reader.read_into(part, name, local_box(each, state.mesh).offset)
                if key in kept:
                    kept[key].copy_(part)
                else:
                    arriving[n] = part
    state.outer.receive(arriving)


def unsent_shards(state: Compressing) -> Iterator[LocalShard]:
    """What this rank writes."""
    mesh = state.mesh
    for n, each in enumerate(state.parallel.parameters if state.exchange is not None else ()):
        assert state.exchange is not None
        replica = mesh.index("replicate")
        copies, copy = replica_index(each, mesh)
        first = copy == replica * (copies // mesh.size("replicate"))  # of those in this replica
        for key, values in sorted(state.exchange.state_of(n).items()):
            if key == FACTOR:
                yield LocalShard(f"{FACTOR}/{mesh.rank}/{each.name}", tuple(values.shape), (0,) * values.ndim, values)
            elif first and not each.copy_of_other_stage:
                where = local_box(each, mesh).offset
                yield LocalShard(f"unsent/{replica}/{each.name}/{key}", each.whole, where, values)


@torch.no_grad()
def load_unsent(state: Compressing, reader: Reader) -> None:
    """Read what this rank keeps; nothing where the run had not kept it."""
    if state.exchange is None:
        return
    before, mesh = read_run(reader.folder / RUN_FILE).layout, state.mesh
    same = all(getattr(before, axis) == getattr(state.run.layout, axis) for axis in AXES)
    replicas = [mesh.index("replicate")] if before.replicate == mesh.size("replicate") else range(before.replicate)
    for n, each in enumerate(state.parallel.parameters):
        for key, values in state.exchange.state_of(n).items():
            name = f"{FACTOR}/{mesh.rank}/{each.name}"
            if key == FACTOR and same and name in reader:
                values.copy_(reader.get(name))
            if key == FACTOR:
                continue
            found = [f"unsent/{replica}/{each.name}/{key}" for replica in replicas]
            values.zero_()
            for name in (name for name in found if name in reader):
                part = torch.empty_like(local(each.parameter.detach()))
                reader.read_into(part, name, local_box(each, mesh).offset)
                values.add_(part, alpha=1.0 if len(replicas) == 1 else 1 / mesh.size("replicate"))
