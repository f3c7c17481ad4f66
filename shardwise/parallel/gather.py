"""A parameter's parts brought together, and cut up again, for what must see a whole matrix."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.parallel.gradients import LocalParameter
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.split import Split, bounds, part


def _join(x: Tensor, length: int, dim: int, mesh: Mesh, axis: str) -> Tensor:
    """Pieces of possibly different lengths along `dim`, over the ranks of an axis, as one tensor."""
    group = mesh.group(axis)
    if group is None:
        return x
    piece = -(-length // mesh.size(axis))
    padded = x.new_zeros(*x.shape[:dim], piece, *x.shape[dim + 1 :])
    padded.narrow(dim, 0, x.shape[dim]).copy_(x)
    gathered = [torch.empty_like(padded) for _ in range(mesh.size(axis))]
    dist.all_gather(gathered, padded, group=group)
    return torch.cat(gathered, dim=dim).narrow(dim, 0, length)


def _place(mesh: Mesh) -> dict[str, tuple[int, int]]:
    return {axis: (mesh.size(axis), mesh.index(axis)) for axis in ("tensor", "expert")}


def cut_shape(held: LocalParameter, cut: tuple[Split, ...], mesh: Mesh) -> list[int]:
    """The shape of a parameter after some of its cuts, before sharding."""
    shape = list(held.whole)
    for split in cut:
        start, stop = bounds(shape[split.dim], mesh.size(split.axis), mesh.index(split.axis))
        shape[split.dim] = stop - start
    return shape


def unsharded(x: Tensor, held: LocalParameter, mesh: Mesh) -> Tensor:
    """This rank's shard of something shaped like the parameter, with the other ranks' shards."""
    if held.shard is None:
        return x
    dim = held.shard.dim
    return _join(x, cut_shape(held, held.cut, mesh)[dim], dim, mesh, held.shard.axis)


def resharded(x: Tensor, held: LocalParameter, mesh: Mesh) -> Tensor:
    """This rank's shard, as `fully_shard` lays it out."""
    if held.shard is None:
        return x
    dim, axis = held.shard.dim, held.shard.axis
    start, stop = bounds(x.shape[dim], mesh.size(axis), mesh.index(axis))
    return x.narrow(dim, start, stop - start)


def whole_matrix(x: Tensor, held: LocalParameter, mesh: Mesh) -> Tensor:
    """Whole matrices from parts: everything joined but different experts, which are different matrices."""
    x = unsharded(x, held, mesh)
    for split in held.cut:
        if split.axis != "expert":
            x = _join(x, held.whole[split.dim], split.dim, mesh, split.axis)
    return x


def part_of(x: Tensor, held: LocalParameter, mesh: Mesh) -> Tensor:
    """The inverse of `whole_matrix`."""
    cut = tuple(split for split in held.cut if split.axis != "expert")
    return resharded(part(x, cut, _place(mesh)), held, mesh)
