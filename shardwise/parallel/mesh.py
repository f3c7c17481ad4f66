"""Which ranks belong together. A mesh lays the ranks of a layout out as pipeline x replicate x shard x context x tensor, the
fastest-talking axis innermost, and holds a process group for every axis of more than one rank.

Two more groupings follow from these. `zero` is shard x context: the ranks that parameters, gradients and optimizer are
spread over (a context rank sees other tokens, so for parameters it is one more data rank). `expert` regroups the same ranks
into expert_shard x expert, the experts innermost.
"""

from __future__ import annotations

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.run import LayoutConfig

ORDER = ("pipeline", "replicate", "shard", "context", "tensor")
EXPERT_ORDER = ("pipeline", "replicate", "expert_shard", "expert", "tensor")


def new_group(members: list[int], axis: str) -> dist.ProcessGroup:
    """A group that only its members know of, so that a rank makes as many as it has axes, however large the world. Every axis
    has its own, also where two have the same members: so a message can always be blamed on an axis."""
    return dist.new_group(members, group_desc=axis, use_local_synchronization=True)


class Mesh:
    """This rank's place in a layout, and its process groups by axis. A group of one rank is None."""

    def __init__(self, layout: LayoutConfig, device_type: str = "cpu") -> None:
        self.layout = layout
        self.device_type = device_type
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        here = dist.get_world_size() if dist.is_initialized() else 1
        if here != layout.world:
            raise RuntimeError(f"the layout needs {layout.world} ranks, and {here} are here")
        self._ranks = np.arange(layout.world).reshape([getattr(layout, axis) for axis in ORDER])
        dispatch = layout.shard * layout.context // layout.expert
        self._expert_ranks = self._ranks.reshape(
            layout.pipeline, layout.replicate, dispatch, layout.expert, layout.tensor
        )
        self._groups: dict[str, dist.ProcessGroup | None] = {}
        self._meshes: dict[tuple[str, ...], DeviceMesh] = {}
        zero = self._ranks.reshape(layout.pipeline, layout.replicate, layout.shard * layout.context, layout.tensor)
        for axis, ranks, dim in (
            *((axis, self._ranks, ORDER.index(axis)) for axis in ORDER),
            ("zero", zero, 2),
            ("expert_shard", self._expert_ranks, 2),
            ("expert", self._expert_ranks, 3),
            ("sequence", self._ranks.reshape(*self._ranks.shape[:3], -1), 3),
            ("pipeline_back", self._ranks, 0),
        ):
            self._groups[axis] = self._make_group(axis, ranks, dim)

    def _make_group(self, axis: str, ranks: np.ndarray, dim: int) -> dist.ProcessGroup | None:
        size = ranks.shape[dim]
        if size == 1:
            return None
        lines = np.moveaxis(ranks, dim, -1).reshape(-1, size)
        members = lines[np.argwhere(lines == self.rank)[0][0]].tolist()
        return new_group(members, axis)

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The process group of an axis, `zero`, `expert_shard`, or `sequence` (context x tensor); None when alone."""
        return self._groups[axis]

    def size(self, axis: str) -> int:
        """Ranks along an axis."""
        group = self._groups[axis]
        return 1 if group is None else dist.get_world_size(group)

    def index(self, axis: str) -> int:
        """This rank's place along an axis."""
        group = self._groups[axis]
        return 0 if group is None else dist.get_rank(group)

    @property
    def data_index(self) -> int:
        """Which share of the batch this rank reads."""
        return self.index("replicate") * self.layout.shard + self.index("shard")

    def pipeline_ranks(self) -> list[int]:
        """The global ranks of this rank's pipeline, stage by stage."""
        place = np.argwhere(self._ranks == self.rank)[0]
        return self._ranks[(slice(None), *place[1:])].tolist()

    def sharding(self, axis: str) -> DeviceMesh:
        """The device mesh for `fully_shard`: replicate x `axis` (zero or expert_shard), or `axis` alone."""
        names = ("replicate", axis) if self.size("replicate") > 1 else (axis,)
        if names not in self._meshes:
            groups = [self._groups[name] or self._alone() for name in names]
            sizes = [self.size(name) for name in names]
            ranks = self._expert_ranks if axis == "expert_shard" else self._ranks
            dispatch = ranks.reshape(self.layout.pipeline, self.layout.replicate, self.size(axis), -1)
            place = np.argwhere(dispatch == self.rank)[0]
            members = dispatch[place[0], :, :, place[3]].reshape(sizes)
            self._meshes[names] = DeviceMesh.from_group(
                groups if len(groups) > 1 else groups[0], self.device_type, members.tolist(), mesh_dim_names=names
            )
        return self._meshes[names]

    def _alone(self) -> dist.ProcessGroup:
        """A group of this rank only: `fully_shard` wants a sharding dimension even where only copies are kept."""
        if "alone" not in self._groups:
            self._groups["alone"] = new_group([self.rank], "alone")
        alone = self._groups["alone"]
        assert alone is not None
        return alone

    def axes_by_group(self) -> dict[str, str]:
        """The axis of each of this rank's process groups, by the group's name."""
        groups = [(axis, group) for axis, group in self._groups.items() if group is not None]
        if dist.is_initialized() and dist.group.WORLD is not None:
            groups.append(("world", dist.group.WORLD))
        return {group.group_name: axis for axis, group in groups}
