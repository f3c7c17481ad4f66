"""Earlier versions of weights, which the next microbatches of an asynchronous pipeline use: `versions/AGE/NAME`, AGE in updates.

The pipeline is drained first, which does not change what is learned. A run that resumes on another layout reads the stored
versions that its schedule needs, and uses the current weights for those that are missing."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shardwise.checkpoint.format import LocalShard
from shardwise.checkpoint.reader import Reader
from shardwise.checkpoint.run_state import State, Updates
from shardwise.parallel.local_parameter import LocalParameter, local_box, replica_index


def _earlier(updates: Updates) -> Iterator[tuple[str, LocalParameter, Tensor]]:
    """This rank's slices of earlier versions: the name in a checkpoint, the parameter, its values."""
    versions = updates.versions
    for number, kept in versions.before.items():
        for each, values in zip(updates.learned, kept, strict=True):
            yield f"versions/{versions.latest - number}/{each.name}", each, values


def version_shards(state: State) -> Iterator[LocalShard]:
    """The shards of earlier versions that this rank writes."""
    for name, each, values in _earlier(state.updates) if state.updates is not None else ():
        if replica_index(each, state.mesh)[1] == 0:
            yield LocalShard(name, each.whole, local_box(each, state.mesh).offset, values)


@torch.no_grad()
def load_versions(state: State, reader: Reader) -> None:
    """Read the earlier versions that this rank needs."""
    if state.updates is None:
        return
    state.updates.restart()
    for name, each, values in _earlier(state.updates):
        if name in reader:
            reader.read_into(values, name, local_box(each, state.mesh).offset)
