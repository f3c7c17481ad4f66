"""What a checkpoint holds of this rank: pieces of whole tensors by name, so that any other layout can find its own pieces in them.

`model/NAME` are parameters and buffers, `optimizer/NAME/WHAT` the optimizer's state beside each parameter, `random/RANK/DEVICE`
the random generators. What several ranks hold is kept by one of them, or by all in turn where it is large, so that each
writes its even share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.parallel.local_parameter import (
    Box,
    holds_first_slice,
    local,
    local_box,
    replica_index,
    stage_replica_index,
)
from shardwise.run.parameters import shard_bounds
from shardwise.train.step import TrainState

SMALLEST = 1 << 20  # bytes; a piece is divided among the ranks that hold it down to this, and below goes to one of them


@dataclass(frozen=True)
class Kept:
    """A piece that this rank writes: the whole tensor's name and shape, where the piece lies, and its values."""

    name: str
    shape: tuple[int, ...]
    box: Box
    values: Tensor


def kept(train_state: TrainState, smallest: int = SMALLEST) -> list[Kept]:
    """Everything this rank writes; together the ranks write each number once."""
    return [piece for piece in _mine(train_state, smallest) if piece.values.numel()]


def _mine(train_state: TrainState, smallest: int) -> Iterator[Kept]:
    mesh = train_state.mesh
    for n, held in enumerate(train_state.parallel.parameters):
        if held.copy_of_other_stage:
            continue
        place, (copies, which) = local_box(held, mesh), replica_index(held, mesh)
        state = sorted(train_state.optimizer.state_of(n).items())
        tensors = [(f"model/{held.name}", local(held.parameter.detach()))]
        tensors += [(f"optimizer/{held.name}/{what}", value) for what, value in state]
        # Whose turn it is among the copies follows from the parameter's number, the same on all of them.
        for turn, (name, values) in enumerate(tensors, start=n):
            if values.ndim == 0:  # one number for the whole parameter, such as AdamW's count of steps
                if holds_first_slice(held, mesh) and turn % copies == which:
                    yield Kept(name, (), Box((), ()), values)
                continue
            shares = min(copies, max(1, values.nbytes // smallest), values.shape[0] or 1)
            share = (which - turn) % copies
            if share < shares:
                start, stop = shard_bounds(values.shape[0], shares, share)
                offset = (place.offset[0] + start, *place.offset[1:])
                yield Kept(name, held.whole, Box(offset, (stop - start, *place.size[1:])), values[start:stop])
    ranks, which = stage_replica_index(mesh)
    for turn, (name, buffer) in enumerate(buffers(train_state)):
        if turn % ranks == which:
            whole = tuple(buffer.shape)
            yield Kept(f"model/{name}", whole, Box((0,) * len(whole), whole), buffer)
    for device, generator in random_states(train_state):
        yield Kept(f"random/{mesh.rank}/{device}", (len(generator),), Box((0,), (len(generator),)), generator)


def buffers(train_state: TrainState) -> Iterator[tuple[str, Tensor]]:
    """What the network remembers besides its parameters: the routers' selection biases. Every rank of a stage has them all."""
    for model in train_state.parallel.models:
        for prefix, module in model.named_modules():
            for leaf, buffer in module.named_buffers(recurse=False):
                if leaf not in module._non_persistent_buffers_set:
                    yield (f"{prefix}.{leaf}" if prefix else leaf), buffer


def random_states(train_state: TrainState) -> Iterator[tuple[str, Tensor]]:
    """The states of this rank's random generators. A step draws nothing today; what is added to it may."""
    yield "cpu", torch.get_rng_state()
    if train_state.device.type == "cuda":
        yield "cuda", torch.cuda.get_rng_state(train_state.device)


def set_random_state(train_state: TrainState, device: str, state: Tensor) -> None:
    """Take up a random generator where it was."""
    if device == "cpu":
        torch.set_rng_state(state)
    elif train_state.device.type == "cuda":
        torch.cuda.set_rng_state(state, train_state.device)
