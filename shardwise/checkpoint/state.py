"""This rank's part of a checkpoint: shards of whole tensors by name, so that any other layout can find its own shards in them.

`model/NAME` are parameters and buffers, `optimizer/NAME/KEY` the optimizer state of each parameter, `random/RANK/DEVICE` the
random generators, `kept/NAME` other tensors that a run could not recompute; state that differs between replicas is in
`replicas.py`, earlier weights are in `versions.py`. A tensor that several ranks hold is written by one of them, or by all in equal
shares if it is large. Training waits only until the shards are copied; the copy is made in memory allocated once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor, nn

from shardwise.checkpoint.format import LocalShard
from shardwise.checkpoint.replicas import outer_shards, own_prefix, unsent_shards
from shardwise.checkpoint.run_state import State
from shardwise.checkpoint.versions import version_shards
from shardwise.parallel.local_parameter import (
    holds_first_slice,
    leaves,
    local,
    local_box,
    replica_index,
    stage_replica_index,
)
from shardwise.run.parameters import shard_bounds

SMALLEST = 1 << 20  # bytes; ranks that hold the same shard divide it into shares of at least this size


def local_shards(state: State, smallest: int = SMALLEST) -> list[LocalShard]:
    """Everything this rank writes; together the ranks write each element once. Wide dtypes come first: safetensors allows no gaps,
    so this order keeps every shard aligned to its itemsize."""
    shards = (shard for shard in _shards(state, smallest) if shard.values.numel())
    return sorted(shards, key=lambda shard: -shard.values.itemsize)


def _shards(state: State, smallest: int) -> Iterator[LocalShard]:
    state.drain()
    mesh, own = state.mesh, own_prefix(state.mesh)
    for n, each in enumerate(state.parallel.parameters):
        if each.copy_of_other_stage or each.entry.frozen:  # the base of adapters is not saved
            continue
        offset, (replicas, replica) = local_box(each, mesh).offset, replica_index(each, mesh)
        states = sorted(state.optimizer.state_of(n).items())  # first: it waits for updates in progress
        tensors = [(f"{own}model/{each.name}", local(each.parameter.detach()))]
        tensors += [(f"{own}optimizer/{each.name}/{key}", v) for key, v in states]
        # The parameter's index decides which replica writes; it is the same on all of them.
        for index, (name, values) in enumerate(tensors, start=n):
            if values.ndim == 0:  # a scalar of the whole parameter, such as AdamW's step count
                if holds_first_slice(each, mesh) and index % replicas == replica:
                    yield LocalShard(name, (), (), values)
                continue
            shares = min(replicas, max(1, values.nbytes // smallest), values.shape[0] or 1)
            share = (replica - index) % replicas
            if share < shares:
                start, stop = shard_bounds(values.shape[0], shares, share)
                yield LocalShard(name, each.whole, (offset[0] + start, *offset[1:]), values[start:stop])
    yield from version_shards(state)
    yield from outer_shards(state)
    yield from unsent_shards(state)
    replicas, replica = stage_replica_index(mesh)
    for index, (name, buffer) in enumerate(() if state.run.adapter.used else buffers(state.parallel.own_models)):
        if index % replicas == replica:
            yield _whole(f"{own}model/{name}", buffer)
    if mesh.rank == 0:
        for name, values in sorted(state.kept.items()):
            yield _whole(f"kept/{name}", values)
    for device, generator in random_states(state):
        yield _whole(f"random/{mesh.rank}/{device}", generator)


def _whole(name: str, values: Tensor) -> LocalShard:
    return LocalShard(name, tuple(values.shape), (0,) * values.ndim, values)


def buffers(models: Iterable[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """The state of a network's stages besides their parameters: the routers' selection biases. Every rank of a stage has all of
    them."""
    for model in models:
        yield from ((name, buffer) for name, _, _, buffer in leaves(model) if not isinstance(buffer, nn.Parameter))


def random_states(state: State) -> Iterator[tuple[str, Tensor]]:
    """The states of this rank's random generators. A step draws no random numbers today; later additions may."""
    yield "cpu", torch.get_rng_state()
    if state.device.type == "cuda":
        yield "cuda", torch.cuda.get_rng_state(state.device)


class Staging:
    """Memory for one copy of this rank's shards, allocated at the first checkpoint and reused by all later ones.

    From a GPU the copies run in parallel into pinned memory, with one synchronization at the end. On a CPU a few threads each copy
    an equal share of the bytes and join once: PyTorch's own copies would join after every tensor, which on a busy machine costs
    many times the copying.
    """

    def __init__(self) -> None:
        self.block = torch.empty(0, dtype=torch.uint8)
        self.pinned = False
        self._unpin: Callable[[], object] = lambda: None

    def _allocate(self, size: int, pinned: bool) -> None:
        """Allocate exactly `size` bytes; PyTorch's own pinned memory comes in powers of two."""
        self._unpin()
        self.block = torch.empty(0, dtype=torch.uint8)  # frees the old one first
        self.block = torch.empty(size, dtype=torch.uint8)
        # If pinning is refused, copies are only slower.
        self.pinned = pinned and int(torch.cuda.cudart().cudaHostRegister(self.block.data_ptr(), size, 0)) == 0
        if self.pinned:  # also after the last save: the next owner of this memory may want to pin it
            self._unpin = weakref.finalize(self, torch.cuda.cudart().cudaHostUnregister, self.block.data_ptr())

    def copy(self, shards: Sequence[LocalShard]) -> Tensor:
        """Copy the current bytes of the shards, one after another. The result is valid until the next copy."""
        needed = sum(shard.values.nbytes for shard in shards)
        if self.block.numel() != needed:
            self._allocate(needed, pinned=any(shard.values.is_cuda for shard in shards))
        views, at = [], 0
        for shard in shards:
            target = self.block[at : at + shard.values.nbytes]
            source = shard.values.contiguous().flatten().view(torch.uint8)
            if source.is_cuda:
                target.copy_(source, non_blocking=True)
            else:
                views.append((target.numpy(), source.numpy()))
            at += len(target)
        _copy_in_threads(views, torch.get_num_threads())
        for device in {shard.values.device for shard in shards if shard.values.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return self.block


def _copy_in_threads(views: list[tuple[np.ndarray, np.ndarray]], threads: int) -> None:
    """Copy each second array to its first, an equal share of the bytes by each thread."""
    total = sum(len(target) for target, _ in views)
    shares: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(threads)]
    done = 0
    for target, source in views:
        start = 0
        while start < len(target):
            share = done * threads // total
            stop = min(len(target), start - done + -(-(share + 1) * total // threads))
            shares[share].append((target[start:stop], source[start:stop]))
            done, start = done + stop - start, stop

    def work(share: list[tuple[np.ndarray, np.ndarray]]) -> None:
        for target, source in share:
            np.copyto(target, source)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, shares))
