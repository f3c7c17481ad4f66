"""The process groups of a rank: one for every axis or grouping of more than one rank. `run/ranks/coordinates.py` defines their
members."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.run import LayoutConfig
from shardwise.run.ranks.coordinates import GROUPS, RankCoordinates

PIPELINE_GROUPS = ("pipeline_back", "tied", "mirror")
"""More groups whose traffic counts as the pipeline's: messages back to the previous stage, the two ends of a tied embedding, two
ranks that hold the same stages."""


class Mesh:
    """This rank's coordinates in a layout, and its process groups by name. A group of one rank is None."""

    def __init__(self, layout: LayoutConfig, device_type: str = "cpu") -> None:
        self.layout = layout
        self.device_type = device_type
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.coordinates = RankCoordinates(layout, self.rank)
        here = dist.get_world_size() if dist.is_initialized() else 1
        if here != layout.world:
            raise RuntimeError(f"the layout needs {layout.world} ranks, and {here} are here")
        self._groups: dict[str, dist.ProcessGroup | None] = {}
        self._meshes: dict[tuple[str, ...], DeviceMesh] = {}
        for name in GROUPS:
            if name != "world":
                self.add_group(name, self.coordinates.members(name))
        self.add_group("pipeline_back", self.coordinates.members("pipeline"))
        if layout.sync_every > 1:
            self.add_group("replica", self.coordinates.replica_members())
        if layout.secondary_shard > 1:
            for name in ("secondary", "between_secondary", *(("expert_secondary",) if layout.expert > 1 else ())):
                self.add_group(name, self.coordinates.members(name))

    def add_group(self, name: str, members: list[int]) -> None:
        """Create a group that only its members know of, so that a rank creates one per axis, however large the world. Every name
        has its own group, even where two have the same members: so a message can always be attributed to an axis."""
        self._groups[name] = new_group(members, name) if self.rank in members else None

    def group(self, name: str) -> dist.ProcessGroup | None:
        """The process group of an axis or grouping; None when this rank is alone in it."""
        return self._groups.get(name)

    @property
    def through_host(self) -> bool:
        """Whether collectives of GPU tensors go through the host, over gloo, which lacks some of them."""
        return self.device_type == "cuda" and dist.is_initialized() and dist.get_backend() == "gloo"

    def size(self, axis: str) -> int:
        """Number of ranks in this rank's group."""
        return self.coordinates.size(axis)

    def index(self, axis: str) -> int:
        """This rank's index in its group."""
        return self.coordinates.index(axis)

    @property
    def speaking(self) -> str:
        """The group whose ranks agree on every step: all ranks, or those of one replica where replicas rarely communicate."""
        return "replica" if self.layout.sync_every > 1 else "world"

    @property
    def data_index(self) -> int:
        """Which share of the batch this rank reads."""
        return self.coordinates.joint_index("replicate", "shard")[1]

    def pipeline_ranks(self) -> list[int]:
        """The global ranks of this rank's pipeline, stage by stage."""
        return self.coordinates.members("pipeline")

    def sharding(self, axis: str) -> DeviceMesh:
        """The device mesh for `fully_shard`: replicate x `axis` (zero or expert_shard), or `axis` alone."""
        return self._device_mesh(("replicate", axis) if self.layout.sharding_replicas > 1 else (axis,))

    def secondary(self, axis: str) -> DeviceMesh:
        """The device mesh for secondary shards of parameters sharded over an axis: secondary groups x ranks of a group."""
        alike = axis == "zero" or self.layout.expert == 1
        return self._device_mesh(("between_secondary", "secondary" if alike else "expert_secondary"))

    def _device_mesh(self, names: tuple[str, ...]) -> DeviceMesh:
        """The device mesh of one group, or of the ranks of a group with a group each."""
        if names not in self._meshes:
            groups = [self._groups[name] or self._alone() for name in names]
            members: list[int] | list[list[int]] = self.coordinates.members(names[-1])
            if len(names) > 1:
                first = self.coordinates.members(names[0])
                members = [RankCoordinates(self.layout, rank).members(names[1]) for rank in first]
            self._meshes[names] = DeviceMesh.from_group(
                groups if len(groups) > 1 else groups[0], self.device_type, members, mesh_dim_names=names
            )
        return self._meshes[names]

    def _alone(self) -> dist.ProcessGroup:
        """A group of this rank only: `fully_shard` wants a sharding dimension even where there are only replicas."""
        alone = self._groups.get("alone") or dist.new_group(
            [self.rank], group_desc="alone", use_local_synchronization=True
        )
        self._groups["alone"] = alone
        return alone

    def axes_by_group(self) -> dict[str, str]:
        """The axis or grouping of each of this rank's process groups, by the group's name in PyTorch."""
        groups = {axis: group for axis, group in self._groups.items() if group is not None and axis != "alone"}
        if dist.is_initialized() and dist.group.WORLD is not None:
            groups["world"] = dist.group.WORLD
        return {group.group_name: "pipeline" if axis in PIPELINE_GROUPS else axis for axis, group in groups.items()}


def new_group(members: Sequence[int], name: str) -> dist.ProcessGroup | None:
    """A group that only its members know of; None for one rank."""
    if len(members) == 1:
        return None
    return dist.new_group(list(members), group_desc=name, use_local_synchronization=True)
