"""What remains to be done with gradients after the backward pass, whatever the layout: add partial ones over the ranks that hold
them, take the norm over everything exactly once, scale.

Traffic a step and rank: over t tensor ranks one all-reduce, 2(t-1)/t of the gradients of what is not cut (norms, routers,
keys and values of fewer heads than ranks, experts without expert tensor parallelism), of its shard where sharded; one of the
embedding's gradient between the first and last stage where it is tied. The norm is a share of each rank (`squared_norm`), which the
step adds over all ranks: four float64 elements, the count of tokens and the wish to stop ahead of the passes, then the norm's
share and the loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.model.compute_copy import ComputeCopy
from shardwise.parallel.collectives import Group
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.split import Split
from shardwise.torch_private import foreach_mul_, foreach_norm


def local(x: Tensor) -> Tensor:
    """The part of a tensor that is on this rank."""
    return x.to_local() if isinstance(x, DTensor) else x


@dataclass(frozen=True)
class LocalParameter:
    """A parameter as this rank holds it: its name in the whole model, its shape there, and over which axes it is cut."""

    name: str
    parameter: nn.Parameter
    whole: tuple[int, ...]
    cut: tuple[Split, ...]
    shard: Split | None  # of what those leave, over "zero" or "expert_shard"; None when every rank holds all of it
    copy_of_other_stage: bool = False
    compute_copy: ComputeCopy | None = None  # what the GEMMs use in its place

    @property
    def leaf(self) -> Tensor:
        """Where the gradient arrives."""
        return self.parameter if self.compute_copy is None else self.compute_copy.tensor

    @property
    def grad(self) -> Tensor | None:
        """This rank's part of the gradient."""
        return None if self.leaf.grad is None else local(self.leaf.grad)

    @property
    def axes(self) -> tuple[str, ...]:
        """The groups over which the shards of this parameter lie."""
        return tuple(split.axis for split in self.cuts)

    @property
    def cuts(self) -> tuple[Split, ...]:
        """All cuts in their order."""
        return self.cut if self.shard is None else (*self.cut, self.shard)


def _by_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Those of one dtype together."""
    found: dict[torch.dtype, list[Tensor]] = {}
    for t in tensors:
        found.setdefault(t.dtype, []).append(t)
    return list(found.values())


def _all_reduce_together(tensors: list[Tensor], group: Group) -> None:
    """One message for many small tensors."""
    for same in _by_dtype(tensors):
        flat = torch.cat([t.flatten() for t in same])
        dist.all_reduce(flat, group=group)
        for t, part in zip(same, flat.split([t.numel() for t in same]), strict=True):
            t.copy_(part.view_as(t))


def reduce_partial_gradients(parameters: Iterable[LocalParameter], mesh: Mesh, tied: Group) -> None:
    """Add the gradients of which several ranks hold partial ones, beyond what data parallelism has added."""
    parameters = list(parameters)
    if mesh.group("tensor") is not None:
        whole = [h.grad for h in parameters if all(split.axis != "tensor" for split in h.cut)]
        _all_reduce_together([g for g in whole if g is not None], mesh.group("tensor"))
    tied_gradients = [h.grad for h in parameters if h.name == "embed.weight" and h.grad is not None]
    if len(tied_gradients) == 2:  # both ends of a tied embedding are on this rank
        tied_gradients[0].add_(tied_gradients[1])
        tied_gradients[1].copy_(tied_gradients[0])
    elif tied is not None:
        _all_reduce_together(tied_gradients, tied)


@torch.no_grad()
def squared_norm(parameters: Iterable[LocalParameter], mesh: Mesh, device: torch.device) -> Tensor:
    """This rank's share of the squared norm of the whole model's gradient: added over all ranks, each element counts once."""
    by_replicas: dict[int, list[Tensor]] = {}
    for h in parameters:
        gradient = h.grad
        if gradient is not None and not h.copy_of_other_stage:
            shards = math.prod(mesh.size(axis) for axis in h.axes)
            by_replicas.setdefault(mesh.layout.world // (mesh.layout.pipeline * shards), []).append(gradient)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for replicas, gradients in by_replicas.items():
        for same in _by_dtype(gradients):
            dtype = torch.promote_types(same[0].dtype, torch.float32)
            total += torch.stack(foreach_norm(same, dtype=dtype)).double().square().sum() / replicas
    return total


@torch.no_grad()
def scale_gradients(gradients: Iterable[Tensor | None], factor: Tensor) -> None:
    """All gradients times one number."""
    some = [g for g in gradients if g is not None and g.numel()]
    if some:
        foreach_mul_(some, factor.to(some[0]))
