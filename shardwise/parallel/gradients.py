"""What remains to be done with gradients after the backward pass, whatever the layout: sum partial gradients over ranks, take the
norm over each element exactly once, scale.

Traffic per step and rank: over t tensor ranks all-reduces, 2(t-1)/t of the gradients of uncut parameters (norms, routers, keys and
values of fewer heads than ranks, experts without expert tensor parallelism), of the local shard where ZeRO shards them: one for all
small ones, and one for each with more than `JOINED` values. One of the embedding's gradient between the first and last stage where
it is tied; one of every gradient between two ranks that hold the same stages, where microbatches enter a pipeline at both ends.
Each rank has a share of the norm (`squared_norm`), which the step sums over all ranks. The step's sums are four float64 values: the
token count and the request to stop before the passes, then the norm's share and the loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.parallel.collectives import Group
from shardwise.parallel.local_parameter import LocalParameter
from shardwise.parallel.mesh import Mesh
from shardwise.run.derive import JOINED
from shardwise.torch_private import foreach_mul_, foreach_norm


def _by_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors grouped by dtype."""
    found: dict[torch.dtype, list[Tensor]] = {}
    for t in tensors:
        found.setdefault(t.dtype, []).append(t)
    return list(found.values())


def all_reduce_together(tensors: Sequence[Tensor], group: Group, most: float = math.inf) -> None:
    """All-reduce many small tensors in one message per dtype, and those with more than `most` values one by one and in place: a
    joint buffer would be as large as all of them."""
    for large in (t for t in tensors if t.numel() > most):
        whole = large.contiguous()
        dist.all_reduce(whole, group=group)
        if whole is not large:
            large.copy_(whole)
    for same in _by_dtype(t for t in tensors if t.numel() <= most):
        flat = torch.cat([t.flatten() for t in same])
        dist.all_reduce(flat, group=group)
        for t, reduced in zip(same, flat.split([t.numel() for t in same]), strict=True):
            t.copy_(reduced.view_as(t))


def reduce_partial_gradients(held: Iterable[LocalParameter], mesh: Mesh) -> None:
    """Sum the gradients that are partial on several ranks, beyond the sums of data parallelism."""
    held = list(held)
    if mesh.group("tensor") is not None:
        whole = [h.grad for h in held if "tensor" not in h.axes]
        all_reduce_together([g for g in whole if g is not None], mesh.group("tensor"), JOINED)
    tied = [h.grad for h in held if h.name == "embed.weight" and h.grad is not None]
    if len(tied) == 2:  # both ends of a tied embedding are on this rank
        tied[0].add_(tied[1])
        tied[1].copy_(tied[0])
    elif mesh.group("tied") is not None:
        all_reduce_together(tied, mesh.group("tied"))
    if mesh.group("mirror") is not None:
        for h in held:  # one by one and in place: a joint buffer would be as large as the gradients
            if h.leaf.requires_grad and h.leaf.grad is None:  # in a step too short for any microbatch to go this way
                h.leaf.grad = torch.zeros_like(h.leaf)
            if h.grad is not None and h.grad.numel():
                dist.all_reduce(h.grad, group=mesh.group("mirror"))


@torch.no_grad()
def squared_norm(
    held: Iterable[LocalParameter],
    mesh: Mesh,
    device: torch.device,
    known: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """This rank's share of the squared norm of the full model's gradient: summed over all ranks, or over those of one replica where
    replicas rarely communicate, each element counts once. `known` holds the norms of gradients that have left the only rank that
    had them."""
    if known:
        return torch.stack([known[h.name] for h in held if h.name in known]).double().square().sum().to(device)
    by_replicas: dict[int, list[Tensor]] = {}
    for h in held:
        gradient = h.grad
        if gradient is not None and not h.copy_of_other_stage:
            slices = math.prod(mesh.size(axis) for axis in h.axes)
            by_replicas.setdefault(mesh.size(mesh.speaking) // (mesh.layout.pipeline * slices), []).append(gradient)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for replicas, gradients in by_replicas.items():
        for same in _by_dtype(gradients):
            total += sum_of_squares(same) / replicas
    return total


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of all values of tensors of one dtype, in float64."""
    if all(each.is_cuda and each.is_contiguous() for each in tensors) and tensors[0].dtype != torch.float64:
        from shardwise.model.kernels import many

        return many.sum_of_squares(tensors)
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack(foreach_norm(list(tensors), dtype=dtype)).double().square().sum()


@torch.no_grad()
def scale_gradients(gradients: Iterable[Tensor | None], factor: Tensor) -> None:
    """Multiply all gradients by one factor."""
    some = [g for g in gradients if g is not None and g.numel()]
    if some:
        foreach_mul_(some, factor.to(some[0]))
