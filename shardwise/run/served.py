"""Where a rank stands when a model is served, and what it holds of each parameter. No torch.

Ranks lie as in training (`coordinates.py`). Those of one index of `replicate` are a replica: an engine of its own. Its tensor ranks
cut the matrices and its pipeline ranks have a stage each, the last stage on the first rank: tokens are picked there, and that is
where the scheduler wants to know them. Every rank of a stage sees all tokens, a few in each step, so data and context ranks have
nothing to divide but experts: there are as many of shard x context as `expert` takes. Whole experts are dealt out over `expert`
ranks, among the tensor ranks too, and each expert's columns over what ranks are left.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shardwise.run.config import ModelConfig
from shardwise.run.coordinates import RankCoordinates
from shardwise.run.parameters import Parameter, shard_bounds, shard_length
from shardwise.run.sections.layout import LayoutConfig


@dataclass(frozen=True)
class ServingRank:
    """One rank of a layout that serves."""

    layout: LayoutConfig
    rank: int

    @cached_property
    def _at(self) -> RankCoordinates:
        return RankCoordinates(self.layout, self.rank)

    @property
    def replica(self) -> int:
        """Which replica it belongs to."""
        return self._at.index("replicate")

    @property
    def stage(self) -> int:
        """Its stage of the pipeline."""
        return self.layout.pipeline - 1 - self._at.index("pipeline")

    @property
    def leader(self) -> int:
        """The rank of its replica that schedules: the first."""
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
        """The ranks that hold the same stage, and the same experts' worth of it but for the cut of its matrices."""
        return self._at.members("tensor")

    @property
    def pipeline_ranks(self) -> list[int]:
        """The ranks that stand where it stands, stage by stage."""
        return self._at.members("pipeline")[::-1]

    @property
    def tensor_index(self) -> int:
        """Which of the tensor ranks it is."""
        return self._at.index("tensor")

    @property
    def is_first_of_data(self) -> bool:
        """Whether it is of the first ranks of shard x context: the others repeat what is not an expert."""
        return self._at.index("zero") == 0

    def expert_bounds(self, experts: int) -> tuple[int, int]:
        """The experts that it holds, start and stop."""
        ranks, index = self._at.joint_index("zero", "tensor")
        return shard_bounds(experts, self.layout.expert, index // (ranks // self.layout.expert))

    def kv_heads(self, model: ModelConfig) -> int:
        """Key/value heads that it keeps; latent attention keeps one for all."""
        if model.attention == "latent":
            return 1
        return max(1, shard_length(model.kv_heads, self.layout.tensor, self.tensor_index))

    def box(self, entry: Parameter) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The box of a parameter that it holds: where it begins, and its size."""
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
