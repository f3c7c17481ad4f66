"""Detects silent data corruption: a step computed twice on the same batch must give the same bits.

A chip that sometimes miscalculates raises no error. So every `train.recheck_every` steps forward and backward run a second time
before anything is updated, and two things are compared bit for bit: this rank's own gradients, taken from autograd before they are
reduced over ranks, and its share of the loss. Only a checksum of each gradient is kept: the sum of its values read as integers,
which any single flipped bit changes. The cost is the time of one more step and almost no memory. Ranks that compute one sample
together (tensor, context, pipeline) pass a wrong value on, so all ranks that saw a difference are named.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from shardwise.data.batches import Batch
from shardwise.parallel.local_parameter import local
from shardwise.run import Problem, UserError
from shardwise.train.step_state import StepState

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Corruption(Exception):
    """Raised on every rank when the two computations of a step differ; names the ranks that saw it."""


def checksum(x: Tensor) -> Tensor:
    """The sum of a tensor's values read as integers; a flipped bit anywhere changes it."""
    x = local(x.detach()).contiguous()
    return x.view(INTEGERS[x.element_size()]).sum(dtype=torch.int64)


@contextmanager
def own_gradients(found: list[Tensor]) -> Iterator[None]:
    """While open, the checksum of every gradient that this rank computes for a parameter is appended to `found`, in order.

    `fully_shard` replaces the shards of a module by unsharded parameters before it runs, and back when it has run. Global hooks are
    called before those of the module, so only those behind its forward pass see the unsharded parameters.
    """
    hooked: dict[int, Any] = {}

    def register_hooks(module: nn.Module, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in hooked:
                hooked[id(parameter)] = parameter.register_hook(lambda grad: found.append(checksum(grad)))

    hook = register_module_forward_hook(register_hooks)
    try:
        yield
    finally:
        hook.remove()
        for each in hooked.values():
            each.remove()


def check_repeatable(train_state: StepState) -> None:
    """Refuse a device on which two computations may differ without any corruption."""
    train = train_state.run.train
    if train.recheck_every and train_state.device.type == "cuda" and not train.deterministic:
        reason = "compares bits, and a GPU repeats them only with train.deterministic = true"
        raise UserError(Problem(reason, key="train.recheck_every"))


def passes_twice(train_state: StepState, batch: Batch) -> Tensor:
    """Run a step's forward and backward twice; raises `Corruption` on every rank if the two differ on any rank. Returns the second
    loss."""
    digests = []
    for attempt in range(2):
        if attempt:
            train_state.optimizer.zero_grad()
            for router in train_state.routers:
                router.load.zero_()
        found: list[Tensor] = []
        with own_gradients(found):
            loss = train_state.passes(batch)
        gradients = [checksum(h.grad) for h in train_state.parallel.parameters if h.grad is not None]
        digests.append(torch.stack([checksum(loss), *found, *gradients]))
    same = digests[0].shape == digests[1].shape and bool((digests[0] == digests[1])[: 1 + len(found)].all())
    added = digests[0].shape == digests[1].shape and torch.equal(*digests)
    world = train_state.run.layout.world
    votes = torch.zeros(2, world, dtype=torch.int64, device=train_state.device)
    votes[0, train_state.mesh.rank], votes[1, train_state.mesh.rank] = not same, not added
    if world > 1:
        dist.all_reduce(votes)
    own, together = (row.nonzero().flatten().tolist() for row in votes)
    again = f"when step {train_state.step + 1} was computed again"
    if own:
        raise Corruption(f"{_ranks(own)} computed other gradients {again}")
    if together:
        raise Corruption(
            f"gradients came out different on {_ranks(together)} {again}, though every rank computed the same ones: the sum over "
            f"ranks is not to be trusted"
        )
    return loss


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
