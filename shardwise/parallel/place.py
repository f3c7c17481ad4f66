"""Where the piece of a parameter that this rank holds lies in the whole, and which of the ranks that hold the same piece this is.

Both follow from the table of cuts and the mesh alone, so ranks agree without a message on who reads and who writes what.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.parallel.gradients import LocalParameter
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.split import bounds


@dataclass(frozen=True)
class Box:
    """A box of a whole tensor: where it begins and how large it is, by dimension."""

    offset: tuple[int, ...]
    size: tuple[int, ...]


def box(held: LocalParameter, mesh: Mesh) -> Box:
    """The part of the parameter that this rank holds."""
    offset, size = [0] * len(held.whole), list(held.whole)
    for split in held.cuts:
        dim = split.dim
        start, stop = bounds(size[dim], mesh.size(split.axis), mesh.index(split.axis))
        offset[dim], size[dim] = offset[dim] + start, stop - start
    return Box(tuple(offset), tuple(size))


def copy_place(held: LocalParameter, mesh: Mesh) -> tuple[int, int]:
    """(copies, which): how many ranks hold this very piece, and the number of this one among them."""
    dispatch = ("expert_shard", "expert") if ".experts." in held.name else ("zero",)
    return _count(mesh, [axis for axis in ("replicate", *dispatch, "tensor") if axis not in held.axes])


def stage_place(mesh: Mesh) -> tuple[int, int]:
    """(ranks, which): how many ranks hold the same pipeline stages, and the number of this one among them."""
    return _count(mesh, ["replicate", "zero", "tensor"])


def leads(held: LocalParameter, mesh: Mesh) -> bool:
    """True on the ranks that hold the first piece of the parameter."""
    return all(mesh.index(axis) == 0 for axis in held.axes)


def _count(mesh: Mesh, axes: list[str]) -> tuple[int, int]:
    ranks, which = 1, 0
    for axis in axes:
        ranks, which = ranks * mesh.size(axis), which * mesh.size(axis) + mesh.index(axis)
    return ranks, which
