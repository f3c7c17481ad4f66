"""Counts the memory that a rank needs to start: every allocation between nothing and a train state, on a dry rank of any layout.

On a CPU, and for parameters that are offloaded, this is memory of the host. On a GPU the same tensors are the device's, and the
host holds none of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.measure.dry import dry_rank
from shardwise.measure.memory import Storages, parameters_of, unique_bytes
from shardwise.run import Run


@dataclass(frozen=True)
class StartMemory:
    """Bytes of one rank."""

    shards: int
    """Of the parameters that it holds."""
    peak: int
    """The most that was allocated at once, these included."""


def start_memory(run: Run, rank: int) -> StartMemory:
    """What one rank of a run would allocate to start, without allocating it."""
    run = replace(run, train=replace(run.train, device="cpu"))
    storages = Storages()
    with dry_rank(run, rank, storages) as train_state:
        return StartMemory(unique_bytes(parameters_of(train_state)), storages.peak)
