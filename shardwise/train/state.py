"""A trainee's state as whole tensors by name, whatever the layout: gathered on the first rank to be saved, and cut up again by
every rank that loads it. So a checkpoint does not know the layout that wrote it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.parallel.gather import mine, whole
from shardwise.parallel.gradients import local
from shardwise.train.step import Trainee


def _here(trainee: Trainee) -> Iterator[tuple[str, Tensor]]:
    """What this rank's stages hold, each tensor made whole: `model/NAME` and `optimizer/NAME/WHAT`."""
    mesh = trainee.mesh
    for n, held in enumerate(trainee.parallel.held):
        values = dict(sorted(trainee.optimizer.state_of(n).items()))
        if held.copy_of_other_stage:
            continue
        yield f"model/{held.name}", whole(local(held.parameter.detach()), held, mesh)
        for what, value in values.items():
            yield f"optimizer/{held.name}/{what}", whole(value, held, mesh) if value.ndim else value
    for model in trainee.parallel.models:
        for name, buffer in model.state_dict(keep_vars=True).items():
            if not isinstance(buffer, torch.nn.Parameter):
                yield f"model/{name}", buffer


def collect(trainee: Trainee) -> dict[str, Tensor] | None:
    """The whole state on the first rank, None on the others."""
    mesh = trainee.mesh
    leads = all(mesh.index(axis) == 0 for axis in ("replicate", "shard", "context", "tensor"))
    state = {name: value.cpu().contiguous() for name, value in _here(trainee) if leads}
    for stage, rank in enumerate(mesh.pipeline_ranks()[1:] if leads else [], start=1):
        if mesh.index("pipeline") == stage:
            dist.send_object_list([[(name, t.shape, t.dtype) for name, t in state.items()]], 0, mesh.group("pipeline"))
            for value in state.values():
                dist.send(value.to(trainee.device), 0, mesh.group("pipeline"))
        elif mesh.index("pipeline") == 0:
            described: list[list[tuple[str, torch.Size, torch.dtype]]] = [[]]
            dist.recv_object_list(described, rank, mesh.group("pipeline"))
            for name, shape, dtype in described[0]:
                buffer = torch.empty(shape, dtype=dtype, device=trainee.device)
                dist.recv(buffer, rank, mesh.group("pipeline"))
                state[name] = buffer.cpu()
    return state if mesh.rank == 0 else None


@torch.no_grad()
def restore(trainee: Trainee, state: Mapping[str, Tensor]) -> None:
    """Take this rank's part of a whole state."""
    mesh = trainee.mesh
    for n, held in enumerate(trainee.parallel.held):
        local(held.parameter).copy_(mine(state[f"model/{held.name}"], held, mesh))
        prefix = f"optimizer/{held.name}/"
        values = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        if values:
            parts = {what: mine(value, held, mesh) if value.ndim else value for what, value in values.items()}
            trainee.optimizer.set_state(n, {what: value.clone() for what, value in parts.items()})
    for model in trainee.parallel.models:
        for name, buffer in model.state_dict(keep_vars=True).items():
            if not isinstance(buffer, torch.nn.Parameter):
                buffer.copy_(state[f"model/{name}"])
