"""What compressed gradients have not sent yet, in a checkpoint: `unsent/REPLICA/NAME/KEY` shaped like a parameter, of each replica
its own, and `factor/RANK/NAME`, where PowerSGD's next step starts from.

A run goes on bit for bit on the same layout. On another one shards find their places as parameters do. With another number of
replicas each takes an equal share of what all of them together had not sent, so nothing is lost; and factors start anew, which
the error feedback makes up for in a few steps.
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
    """What replicas that compress keep, by the index of a parameter."""

    def state_of(self, index: int) -> dict[str, Tensor]: ...


class Compressing(Protocol):
    """A run in progress, as far as this file needs it."""

    run: Run
    mesh: Mesh
    parallel: Parallel

    @property
    def exchange(self) -> Exchange | None: ...


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
