"""The position of a rank when a model is served, and its slice of each parameter. No torch.

Ranks are ordered as in training (`coordinates.py`). Ranks with one index of `replicate` are a replica: a separate engine. Its
tensor ranks cut the matrices, and its pipeline ranks have one stage each. The last stage is on the first rank: tokens are sampled
there, and the scheduler, which needs them, runs there too. Every rank of a stage sees all tokens of a step, which are few, so data
and context ranks have nothing to divide but experts: shard x context must divide `expert`. Full experts are distributed over
`expert` ranks, which may include tensor ranks, and each expert's columns over the remaining ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shardwise.run.config import ModelConfig
from shardwise.run.parameters import Parameter, shard_bounds, shard_length
from shardwise.run.ranks.coordinates import RankCoordinates
from shardwise.run.sections.layout import LayoutConfig


@dataclass(frozen=True)
class ServingRank:
    """One rank of a serving layout."""

    layout: LayoutConfig
    rank: int

    @cached_property
    def _at(self) -> RankCoordinates:
        return RankCoordinates(self.layout, self.rank)

    @property
    def replica(self) -> int:
        """The index of its replica."""
        return self._at.index("replicate")

    @property
    def stage(self) -> int:
        """The index of its pipeline stage."""
        return self.layout.pipeline - 1 - self._at.index("pipeline")

    @property
    def leader(self) -> int:
        """The rank of its replica that runs the scheduler: the first."""
        return self.replica_ranks[0]

    @property
    def replica_ranks(self) -> list[int]:
        """All ranks of its replica."""
        stage, stages = self.stage_ranks, self._at.members("pipeline")
        return sorted(other + rank - self.rank for other in stages for rank in stage)

    @property
    def stage_ranks(self) -> list[int]:
        """The ranks of its replica with the same stage."""
        count, index = self._at.joint_index("zero", "tensor")
        return list(range(self.rank - index, self.rank - index + count))

    @property
    def tensor_ranks(self) -> list[int]:
        """The ranks that hold the same stage and cut its matrices among them."""
        return self._at.members("tensor")

    @property
    def pipeline_ranks(self) -> list[int]:
        """The ranks at its position in the other stages, and itself, in the order of stages."""
        return self._at.members("pipeline")[::-1]

    @property
    def tensor_index(self) -> int:
        """Its index among the tensor ranks."""
        return self._at.index("tensor")

    @property
    def is_first_of_data(self) -> bool:
        """Whether its index in shard x context is 0; the other ranks duplicate everything except experts."""
        return self._at.index("zero") == 0

    def expert_bounds(self, experts: int) -> tuple[int, int]:
        """The experts it holds, start and stop."""
        ranks, index = self._at.joint_index("zero", "tensor")
        return shard_bounds(experts, self.layout.expert, index // (ranks // self.layout.expert))

    def kv_heads(self, model: ModelConfig) -> int:
        """Key/value heads in its KV cache; latent attention caches one for all heads."""
        if model.attention == "latent":
            return 1
        return max(1, shard_length(model.kv_heads, self.layout.tensor, self.tensor_index))

    def box(self, entry: Parameter) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The box of a parameter that it holds: offset and size."""
        offset, size = [0] * len(entry.shape), list(entry.shape)

        def cut(dim: int, start: int, stop: int) -> None:
            offset[dim], size[dim] = start, stop - start

        tensor, dim = self.layout.tensor, entry.tensor_dim
        if entry.routed:
            assert dim is not None
            cut(0, *self.expert_bounds(entry.shape[0]))
            ranks, index = self._at.joint_index("zero", "tensor")
            each = ranks // self.layout.expert
            cut(dim, *shard_bounds(entry.shape[dim], each, index % each))
        elif entry.replicated_kv(tensor):
            head, rows = self.tensor_index * entry.kv_heads // tensor, entry.shape[0] // entry.kv_heads
            cut(0, head * rows, (head + 1) * rows)
        elif dim is not None:
            cut(dim, *shard_bounds(entry.shape[dim], tensor, self.tensor_index))
        return tuple(offset), tuple(size)
