"""A parameter as this rank holds it: which slice it is, which other ranks hold the same slice, and the full parameter gathered from
the slices where needed.

All of it follows from the table of parameters (`run/parameters.py`), from how `fully_shard` shards, and from the mesh. So ranks
agree without a message on which rank reads and writes what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.model.compute_copy import ComputeCopy
from shardwise.run.parameters import Cut, Parameter
from shardwise.run.ranks.boxes import Box, box_of
from shardwise.torch_private import is_persistent

if TYPE_CHECKING:  # reading weights imports this file, and device meshes take half a second to import
    from shardwise.parallel.mesh import Mesh


def leaves(model: nn.Module) -> list[tuple[str, nn.Module, str, Tensor]]:
    """Every parameter and every saved buffer, with its full name, the module that holds it, and its name in that module."""
    return [
        (f"{path}.{leaf}" if path else leaf, owner, leaf, tensor)
        for path, owner in model.named_modules()
        for leaf, tensor in (*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False))
        if is_persistent(owner, leaf)
    ]


def allocate_buffers(model: nn.Module, device: torch.device | str) -> None:
    """Give buffers that are still on the meta device zeros on this one."""
    for owner in model.modules():
        for leaf, buffer in owner.named_buffers(recurse=False):
            if buffer.is_meta:
                setattr(owner, leaf, torch.zeros_like(buffer, device=device))


def local(x: Tensor) -> Tensor:
    """The slice of a tensor that is on this rank."""
    return x.to_local() if hasattr(x, "to_local") else x  # a DTensor


@dataclass(frozen=True)
class LocalParameter:
    """A parameter as this rank holds it: its name and entry in the full model, and how it is cut."""

    name: str
    parameter: nn.Parameter
    entry: Parameter
    cut: tuple[Cut, ...]
    shard: Cut | None
    """How `fully_shard` shards the slice that `cut` leaves, over "zero" or "expert_shard"; None where every rank holds all of
    it."""
    copy_of_other_stage: bool = False
    compute_copy: ComputeCopy | None = None
    """The copy that the GEMMs use instead."""

    @property
    def whole(self) -> tuple[int, ...]:
        """Its shape in the full model."""
        return self.entry.shape

    @property
    def leaf(self) -> Tensor:
        """The tensor that receives the gradient."""
        return self.parameter if self.compute_copy is None else self.compute_copy.tensor

    @property
    def grad(self) -> Tensor | None:
        """This rank's slice of the gradient."""
        return None if self.leaf.grad is None else local(self.leaf.grad)

    @cached_property
    def cuts(self) -> tuple[Cut, ...]:
        """All cuts, in order."""
        return self.cut if self.shard is None else (*self.cut, self.shard)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The groups whose ranks hold different slices."""
        return tuple(cut.axis for cut in self.cuts)


def local_box(held: LocalParameter, mesh: Mesh) -> Box:
    """The slice of the parameter that this rank holds."""
    return box_of(held.whole, held.cuts, mesh)


def local_slice(whole: Tensor, cuts: Sequence[Cut], mesh: Mesh) -> Tensor:
    """This rank's slice of a full tensor under some cuts, as a view."""
    box = box_of(whole.shape, cuts, mesh)
    for dim, (start, length) in enumerate(zip(box.offset, box.size, strict=True)):
        whole = whole.narrow(dim, start, length)
    return whole


def replica_index(held: LocalParameter, mesh: Mesh) -> tuple[int, int]:
    """(replicas, index): how many ranks hold this same slice, and this rank's index among them. Replicas that rarely communicate
    hold different values."""
    data = ("expert_shard", "expert") if held.entry.routed else ("zero",)
    axes = (*_alike(mesh), *data, "tensor")
    return mesh.coordinates.joint_index(*(axis for axis in axes if axis not in held.axes))


def _alike(mesh: Mesh) -> tuple[str, ...]:
    """Axes whose ranks hold the same values, whatever is sharded."""
    return () if mesh.layout.sync_every > 1 else ("replicate",)


def stage_replica_index(mesh: Mesh) -> tuple[int, int]:
    """(ranks, index): how many ranks hold the same pipeline stages, and this rank's index among them."""
    return mesh.coordinates.joint_index(*_alike(mesh), "zero", "tensor")


def holds_first_slice(held: LocalParameter, mesh: Mesh) -> bool:
    """True on the ranks that hold the first slice of the parameter."""
    return all(mesh.index(axis) == 0 for axis in held.axes)


def gather_matrix(x: Tensor, held: LocalParameter, mesh: Mesh) -> Tensor:
    """Full matrices, from this rank's slice of a tensor shaped like the parameter. Different experts are different matrices and
    stay apart."""
    if held.shard is not None:
        x = _join(x, box_of(held.whole, held.cut, mesh).size, held.shard, mesh)
    for cut in held.cut:
        if cut.axis != "expert":
            x = _join(x, held.whole, cut, mesh)
    return x


def scatter_matrix(x: Tensor, held: LocalParameter, mesh: Mesh) -> Tensor:
    """The inverse of `gather_matrix`: this rank's slice."""
    return local_slice(x, [cut for cut in held.cuts if cut.axis != "expert"], mesh)


def _join(x: Tensor, shape: Sequence[int], cut: Cut, mesh: Mesh) -> Tensor:
    """Concatenate the slices, of possibly different lengths, of all ranks of an axis; the result has this shape along the cut."""
    group, dim, ranks = mesh.group(cut.axis), cut.dim, mesh.size(cut.axis)
    if group is None:
        return x
    padded = x.new_zeros(*x.shape[:dim], -(-shape[dim] // ranks), *x.shape[dim + 1 :])
    padded.narrow(dim, 0, x.shape[dim]).copy_(x)
    gathered = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(gathered, padded, group=group)
    return torch.cat(gathered, dim=dim).narrow(dim, 0, shape[dim])
