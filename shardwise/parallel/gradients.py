"""What remains to be done with gradients after the backward pass, whatever the layout: add the parts that several ranks hold,
take the norm over everything exactly once, clip.

Traffic a step and rank: over tensor ranks one all-reduce of the gradients of what is not cut (norms, routers, …), of its
shard where shared; one between the first and last stage of a tied embedding; a few numbers for the norm on each axis.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.parallel.collectives import Group
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.split import Split


def local(x: Tensor) -> Tensor:
    """The part of a tensor that is on this rank."""
    return x.to_local() if isinstance(x, DTensor) else x


@dataclass(frozen=True)
class Held:
    """A parameter as this rank holds it: its name in the whole model, its shape there, and over which axes it is cut."""

    name: str
    parameter: nn.Parameter
    whole: tuple[int, ...]
    cut: tuple[Split, ...]
    sharded_over: str  # "zero", "expert_shard", or "" when every rank holds all of it
    copy_of_other_stage: bool = False

    @property
    def grad(self) -> Tensor | None:
        """This rank's part of the gradient."""
        return None if self.parameter.grad is None else local(self.parameter.grad)

    @property
    def axes(self) -> tuple[str, ...]:
        """The groups over which the pieces of this parameter lie."""
        return (*(split.axis for split in self.cut), *([self.sharded_over] if self.sharded_over else []))


def _all_reduce_together(tensors: list[Tensor], group: Group) -> None:
    """One message for many small tensors."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for t in tensors:
        by_dtype.setdefault(t.dtype, []).append(t)
    for same in by_dtype.values():
        flat = torch.cat([t.flatten() for t in same])
        dist.all_reduce(flat, group=group)
        for t, piece in zip(same, flat.split([t.numel() for t in same]), strict=True):
            t.copy_(piece.view_as(t))


def add_partial(held: Iterable[Held], mesh: Mesh, tied: Group) -> None:
    """Bring together the gradients that several ranks hold parts of, beyond what data parallelism has added."""
    held = list(held)
    if mesh.group("tensor") is not None:
        whole = [h.grad for h in held if all(split.axis != "tensor" for split in h.cut)]
        _all_reduce_together([g for g in whole if g is not None], mesh.group("tensor"))
    shared = [h.grad for h in held if h.name == "embed.weight" and h.grad is not None]
    if len(shared) == 2:  # both ends of a tied embedding are on this rank
        shared[0].add_(shared[1])
        shared[1].copy_(shared[0])
    elif tied is not None:
        _all_reduce_together([g for g in shared if g is not None], tied)


def total_norm(held: Iterable[Held], mesh: Mesh, device: torch.device) -> Tensor:
    """The norm of the whole model's gradient, each number counted once."""
    squares: dict[tuple[str, ...], list[Tensor]] = {}
    for h in held:
        if h.grad is not None and not h.copy_of_other_stage:
            squares.setdefault(h.axes, []).append(torch.linalg.vector_norm(h.grad).square())
    kinds = sorted(squares)
    if mesh.layout.world > 1:
        # Every rank must send the same messages, whatever stages it holds.
        kinds = _kinds_everywhere(kinds, mesh)
    total = torch.zeros((), device=device, dtype=_widest(squares))
    for axes in kinds:
        part = torch.stack(squares[axes]).sum() if squares.get(axes) else torch.zeros_like(total)
        for axis in axes:
            if mesh.group(axis) is not None:
                dist.all_reduce(part, group=mesh.group(axis))
        total = total + part
    if mesh.group("pipeline") is not None:
        dist.all_reduce(total, group=mesh.group("pipeline"))
    return total.sqrt()


def _widest(squares: dict[tuple[str, ...], list[Tensor]]) -> torch.dtype:
    found = {t.dtype for ts in squares.values() for t in ts}
    return torch.float64 if torch.float64 in found else torch.float32


def _kinds_everywhere(kinds: list[tuple[str, ...]], mesh: Mesh) -> list[tuple[str, ...]]:
    """All ways of being cut that occur in a layout, in one order."""
    layout = mesh.layout
    spread = "zero" if mesh.size("zero") > 1 else ""
    experts = "expert_shard" if mesh.size("expert_shard") > 1 else ""
    known = {
        tuple(axis for axis in (*cut, last) if axis)
        for cut in ((), ("tensor",))
        for last in (spread,)
    }
    if layout.expert > 1 or experts or spread:
        for cut in ((), ("expert",), ("tensor",), ("expert", "tensor")):
            known.add(tuple(axis for axis in (*cut, experts) if axis))
    return sorted(known | set(kinds))


def clip(held: Iterable[Held], norm: Tensor, most: float) -> None:
    """Shorten all gradients by the same factor when their norm is above `most`."""
    factor = (most / (norm + 1e-6)).clamp(max=1.0)
    gradients = [h.grad for h in held if h.grad is not None and h.grad.numel()]
    torch._foreach_mul_(gradients, factor.to(gradients[0].dtype) if gradients else factor)
