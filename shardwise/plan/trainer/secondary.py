"""Secondary shards (`parallel/shard.py`): how many ranks a parameter has them over, and their bytes."""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.plan.trainer.rank import PlannedParameter, PlannedRank


def secondary_ranks(planned: PlannedRank, parameter: PlannedParameter) -> int:
    """How many ranks a layer's parameter has secondary shards over; 1 if it has none."""
    lay = planned.run.layout
    if not parameter.entry.routed:
        return lay.secondary_shard
    return 1 if parameter.shard_dim(planned.size(parameter.group)) else lay.expert_secondary_shard


def secondary_bytes(planned: PlannedRank, parameters: Iterable[PlannedParameter]) -> int:
    """Bytes of the secondary shards of parameters that were gathered for a forward pass."""
    if planned.run.layout.secondary_shard <= 1:  # most runs; a search calls this for thousands of layers
        return 0
    ranks = ((p, planned.size(p.group), secondary_ranks(planned, p)) for p in parameters)
    return sum(p.shard_numel(every) * every // few for p, every, few in ranks if few > 1) * planned.width
