"""The position of a rank in a layout: its index along every axis and grouping, and the ranks of its groups. No torch.

Ranks are ordered as pipeline x replicate x shard x context x tensor, the axis with the most communication innermost, so a group is
a size and a stride. Besides the axes there are groupings of them:
- `zero` is shard x context: the ranks over which parameters, gradients and optimizer state are sharded. A context rank sees other
  tokens, so for parameters it is one more data rank.
- `secondary` are neighbours among these, from which ZeRO-3 gathers in the backward pass; `between_secondary` has one rank of each.
  `expert_secondary` are those of them with the same experts.
- `expert` and `expert_shard` regroup the same ranks as expert_shard x expert, the experts innermost.
- `sequence` is context x tensor, the ranks that hold slices of one sequence; `world` is all ranks, `replica` those of one replica
  (with a pipeline they have no constant stride: `replica_members`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardwise.run.sections.layout import LayoutConfig

GROUPS = ("pipeline", "replicate", "shard", "context", "tensor", "zero", "expert_shard", "expert", "sequence", "world")


SPANS: dict[str, Callable[[LayoutConfig], tuple[Any, Any]]] = {
    "tensor": lambda lay: (lay.tensor, 1),
    "context": lambda lay: (lay.context, lay.tensor),
    "shard": lambda lay: (lay.shard, lay.tensor * lay.context),
    "zero": lambda lay: (lay.shard * lay.context, lay.tensor),
    "secondary": lambda lay: (lay.secondary_shard, lay.tensor),
    "expert_secondary": lambda lay: (lay.expert_secondary_shard, lay.tensor * lay.expert),
    "between_secondary": lambda lay: (lay.shard * lay.context // lay.secondary_shard, lay.tensor * lay.secondary_shard),
    "expert": lambda lay: (lay.expert, lay.tensor),
    "expert_shard": lambda lay: (lay.shard * lay.context // lay.expert, lay.tensor * lay.expert),
    "sequence": lambda lay: (lay.context * lay.tensor, 1),
    "replicate": lambda lay: (lay.replicate, lay.tensor * lay.context * lay.shard),
    "pipeline": lambda lay: (lay.pipeline, lay.tensor * lay.context * lay.shard * lay.replicate),
    "world": lambda lay: (lay.world, 1),
    "replica": lambda lay: (lay.world // lay.replicate, 1),
}


def group_span(layout: LayoutConfig, group: str) -> tuple[Any, Any]:
    """A group's size and the stride between its ranks. Sizes of the layout may be arrays, one entry per layout."""
    return SPANS[group](layout)


@dataclass(frozen=True)
class RankCoordinates:
    """One rank of a layout."""

    layout: LayoutConfig
    rank: int

    def size(self, group: str) -> int:
        """Ranks in a group."""
        return group_span(self.layout, group)[0]

    def index(self, group: str) -> int:
        """This rank's index in its group."""
        size, stride = group_span(self.layout, group)
        return self.rank // stride % size

    def members(self, group: str) -> list[int]:
        """The ranks of this rank's group, in order."""
        size, stride = group_span(self.layout, group)
        first = self.rank - self.index(group) * stride
        return list(range(first, first + size * stride, stride))

    def replica_members(self) -> list[int]:
        """The ranks of this rank's replica, in order."""
        return ranks_of_replica(self.layout, self.index("replicate"))

    def joint_index(self, *groups: str) -> tuple[int, int]:
        """(ranks, index) of this rank in the product of several groups, the last one innermost."""
        ranks, index = 1, 0
        for group in groups:
            ranks, index = ranks * self.size(group), index * self.size(group) + self.index(group)
        return ranks, index


def ranks_of_replica(layout: LayoutConfig, replica: int) -> list[int]:
    """The ranks of a replica, in order."""
    return [r for r in range(layout.world) if RankCoordinates(layout, r).index("replicate") == replica]
