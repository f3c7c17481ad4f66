"""The state in a checkpoint that differs between replicas.

When replicas synchronize rarely (`sync_every` > 1), the state of every replica but the first is in `replica/NUMBER/…`, under the
same names as the first one's. The state of the outer optimizer is in `outer/NAME/KEY`, including exchanges in flight. With another
number of replicas, each continues from one of the stored replicas.

The residuals that gradient compression has not sent yet are in `residual/REPLICA/NAME/KEY`, shaped like a parameter;
`factor/RANK/NAME` is the factor that PowerSGD's next step starts from. On the same layout a run continues bit for bit. On another
layout, each rank finds its shards as it does for parameters. With another number of replicas, each takes an equal share of the sum
of all residuals, so nothing is lost; and factors start anew, as with another `compress_rank`, which error feedback makes up for in
a few steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch

from shardwise.checkpoint.format import RUN_FILE, LocalShard
from shardwise.checkpoint.reader import Reader
from shardwise.checkpoint.run_state import State
from shardwise.parallel.local_parameter import local, local_box, replica_index
from shardwise.parallel.mesh import Mesh
from shardwise.run import AXES, read_run

FACTOR = "factor"
RESIDUAL, DIVIDED = "residual", "unsent"
"""Residuals are in the scale of gradients; those of older checkpoints had been divided by the count of a full batch."""


def own_prefix(mesh: Mesh) -> str:
    """The prefix of the names of state that belongs to this rank's replica alone."""
    apart = mesh.layout.sync_every > 1 and mesh.index("replicate")
    return f"replica/{mesh.index('replicate')}/" if apart else ""


def prefix_read(state: State, reader: Reader) -> str:
    """The prefix of the names of the state that this rank's replica resumes from."""
    before = read_run(reader.folder / RUN_FILE).layout
    number = state.mesh.index("replicate") % before.replicate
    return f"replica/{number}/" if before.sync_every > 1 and number else ""


def outer_shards(state: State) -> Iterator[LocalShard]:
    """The shards of the outer optimizer that this rank writes."""
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
def load_outer(state: State, reader: Reader) -> None:
    """Read the state of the outer optimizer; if replicas synchronized in every step before, it starts from the weights."""
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


def unsent_shards(state: State) -> Iterator[LocalShard]:
    """The residuals and factors that this rank writes."""
    mesh = state.mesh
    for n, each in enumerate(state.parallel.parameters if state.exchange is not None else ()):
        assert state.exchange is not None
        replica = mesh.index("replicate")
        copies, copy = replica_index(each, mesh)
        first = copy == replica * (copies // mesh.size("replicate"))  # of the holders in this replica
        for key, values in sorted(state.exchange.state_of(n).items()):
            if key == FACTOR:
                yield LocalShard(f"{FACTOR}/{mesh.rank}/{each.name}", tuple(values.shape), (0,) * values.ndim, values)
            elif first and not each.copy_of_other_stage:
                where = local_box(each, mesh).offset
                yield LocalShard(f"{RESIDUAL}/{replica}/{each.name}/{key}", each.whole, where, values)


@torch.no_grad()
def load_unsent(state: State, reader: Reader) -> None:
    """Read this rank's residuals and factors; residuals that the checkpoint lacks are zero."""
    if state.exchange is None:
        return
    before, mesh = read_run(reader.folder / RUN_FILE).layout, state.mesh
    same = all(getattr(before, axis) == getattr(state.run.layout, axis) for axis in AXES)
    replicas = [mesh.index("replicate")] if before.replicate == mesh.size("replicate") else range(before.replicate)
    for n, each in enumerate(state.parallel.parameters):
        for key, values in state.exchange.state_of(n).items():
            name = f"{FACTOR}/{mesh.rank}/{each.name}"
            if key == FACTOR and same and name in reader and reader.shape(name) == tuple(values.shape):
                values.copy_(reader.get(name))
            if key == FACTOR:
                continue
            mean = 1.0 if len(replicas) == 1 else 1 / mesh.size("replicate")
            values.zero_()
            for replica, (kind, scale) in product(replicas, ((RESIDUAL, 1.0), (DIVIDED, state.full_count))):
                name = f"{kind}/{replica}/{each.name}/{key}"
                if name in reader:
                    part = torch.empty_like(local(each.parameter.detach()))
                    reader.read_into(part, name, local_box(each, mesh).offset)
                    values.add_(part, alpha=scale * mean)
