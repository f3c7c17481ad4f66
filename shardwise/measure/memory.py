"""Counts what holds memory on one rank during one real step of training: bytes by owner.

What stays between steps (parameters, gradients, optimizer) is found by walking over the train state. What comes and goes is
found by the lifetime of storages: a dispatch mode sees every tensor that an operator gives back, also in backward passes, and
a weak reference to its storage tells when it dies. So views and in-place results count once, and tensors without data
(`FakeTensorMode`) count as if they had it. What a stage has saved for the backward pass of a microbatch is what its forward
pass made, or was given by another stage, and left alive; without the parameters that `fully_shard` gathered for it.
Storages made outside of PyTorch's dispatcher are not counted: arrays taken over from NumPy, and what kernels and
communication libraries hold inside. On CUDA the peak is that of the allocator, which sees them.
"""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage

from shardwise.data.batches import Batch
from shardwise.model.fp8_matrix import Fp8Matrix
from shardwise.parallel.observer import Observer
from shardwise.schedules import Action
from shardwise.torch_private import (
    TorchDispatchMode,
    gathered_tensors,
    local_shard,
    observed_resizes,
    sharded_groups,
    storage_key,
    tree_leaves,
    unreduced_gradients,
)
from shardwise.train.step import TrainState


def storage_of(x: Tensor) -> UntypedStorage:
    """The memory behind a tensor, behind this rank's part of it where it is spread over ranks."""
    if isinstance(x, Fp8Matrix):
        return x.fp8_data.untyped_storage()
    return local_shard(x).untyped_storage()


def unique_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the memory behind some tensors, memory that several share counted once."""
    storages = (storage_of(x) for x in tensors if x is not None)
    return sum({storage_key(s): s.nbytes() for s in storages}.values())


class Storages(TorchDispatchMode):
    """While it is open, follows every storage that operators make: which are alive, how many bytes, and the most so far.
    Storages are numbered, since a new one may lie where an old one lay."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.references: dict[int, tuple[int, weakref.ref[UntypedStorage]]] = {}
        self.count = self.now = self.peak = 0

    def __enter__(self) -> Storages:
        # `fully_shard` gives memory back by shrinking storages that stay alive, which no operator sees.
        self.resizes = observed_resizes(self.follow)
        self.resizes.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.resizes.__exit__(None, None, None)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.follow(storage_of(leaf))
        return result

    def follow(self, storage: UntypedStorage) -> int:
        """Count a storage, or its new size; gives its number."""
        place, size = storage_key(storage), storage.nbytes()
        if place not in self.references:
            self.count += 1
            number = self.count
            self.references[place] = (number, weakref.ref(storage, lambda _: self._died(place, number)))
        number = self.references[place][0]
        self.now += size - self.alive.get(number, 0)
        self.alive[number] = size
        self.peak = max(self.peak, self.now)
        return number

    def _died(self, place: int, number: int) -> None:
        self.now -= self.alive.pop(number)
        del self.references[place]

    def settle(self) -> None:
        """Wait until what nobody needs is gone: circles of references, and the tensors of messages that have arrived, which
        gloo's threads let go of a moment later."""
        gc.collect()
        quiet = 0
        while dist.is_initialized() and quiet < 3:
            before = self.now
            time.sleep(0.002)
            quiet = quiet + 1 if self.now == before else 0

    def numbers(self, tensors: Iterable[Tensor]) -> set[int]:
        """Of those storages behind some tensors that are followed."""
        places = (storage_key(storage_of(x)) for x in tensors)
        return {self.references[place][0] for place in places if place in self.references}

    def bytes(self, numbers: Iterable[int]) -> int:
        """Of those that are still alive."""
        return sum(self.alive.get(number, 0) for number in numbers)


def parameters_of(train_state: TrainState) -> list[Tensor]:
    """Parameters as this rank holds them for good."""
    copies = [
        each.compute_copy.tensor.detach() for each in train_state.parallel.parameters if each.compute_copy is not None
    ]
    return [each.parameter.detach() for each in train_state.parallel.parameters] + copies


def gradients_of(train_state: TrainState) -> list[Tensor | None]:
    """Gradients of those."""
    return [each.leaf.grad for each in train_state.parallel.parameters]


def optimizer_of(train_state: TrainState) -> list[Tensor]:
    """What the optimizers remember from step to step."""
    states = (state for part in train_state.optimizer.parts for state in part.state.values())
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


def _groups(train_state: TrainState) -> Iterator[Any]:
    """What `fully_shard` knows of the parameters that it gathers together."""
    return (group for model in train_state.parallel.models for _, group in sharded_groups(model))


def gathered_of(train_state: TrainState) -> Iterator[Tensor]:
    """Whole parameters that `fully_shard` has gathered from their shards, and the buffers of the all-gathers."""
    return (x for group in _groups(train_state) for x in gathered_tensors(group))


def unreduced_of(train_state: TrainState) -> Iterator[Tensor | None]:
    """Gradients that wait to be added over ranks: whole ones, and shards of those that replicas have yet to add."""
    return (x for group in _groups(train_state) for x in unreduced_gradients(group))


@dataclass
class StepMemory(Observer):
    """Follows the actions of a step's schedule."""

    train_state: TrainState
    storages: Storages
    saved: dict[int, list[int]] = field(default_factory=dict)
    """What each microbatch saved, by stage of this rank."""
    activations: set[int] = field(default_factory=set)
    """Numbers of the storages that microbatches in flight have saved."""
    high_water: int = 0
    """The most bytes of these."""
    buffers: int = 0
    gathered: int = 0
    gradients: int = 0
    """The most between two actions, those that wait to be reduced included."""
    left: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)
    """Bytes of each storage that the forward pass of a stage and microbatch left, by its number."""

    @contextlib.contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """See what is alive after a pass."""
        before = set(self.storages.alive)
        yield
        if action.kind == "W":  # see `weight_gradients`
            return
        self.storages.settle()
        if action.kind == "F":
            self._note_saved(action, before)
        self._sample()

    @contextlib.contextmanager
    def weight_gradients(self) -> Iterator[None]:
        yield
        self._sample_gradients()

    def _note_saved(self, action: Action, before: set[int]) -> None:
        """What a forward pass has left."""
        pipeline = self.train_state.parallel.pipeline
        made = set(self.storages.alive) - before
        if action.stage:
            made |= self.storages.numbers([pipeline.stages[action.stage].inputs[action.microbatch]])
        # What came for later passes, and the batch itself, are not this pass's.
        others = [buffer for buffer, _ in pipeline.channel.arriving.values()]
        others += [x for microbatch in pipeline.microbatches for x in microbatch.values() if x is not None]
        made -= self.storages.numbers((*gathered_of(self.train_state), *others))
        self.saved.setdefault(action.stage, []).append(self.storages.bytes(made))
        sizes = {number: self.storages.bytes([number]) for number in made}
        self.left[action.stage, action.microbatch] = {number: size for number, size in sizes.items() if size}
        self.activations |= made

    def _sample(self) -> None:
        pipeline, numbers = self.train_state.parallel.pipeline, self.storages.numbers
        stages = pipeline.stages.values()
        waiting = (each for stage in stages for taken in stage.deferred.values() for each in taken)
        deferred = numbers(x for each in waiting for x in (each.weight, *each.saved))
        deferred -= numbers((*parameters_of(self.train_state), *gathered_of(self.train_state)))
        ends = numbers(x for stage in stages for xs in (*stage.roots.values(), stage.inputs.values()) for x in xs)
        sent = numbers(x for x, _ in pipeline.channel.sending) - ends
        arrived = numbers(x for x, _ in pipeline.channel.arriving.values())
        # A gradient that was made ahead of its backward pass is saved until then, and afterwards a gradient.
        gradients = (*gradients_of(self.train_state), *unreduced_of(self.train_state))
        self.activations &= set(self.storages.alive) - numbers(g for g in gradients if g is not None)
        self.high_water = max(self.high_water, self.storages.bytes((self.activations | deferred) - sent))
        self.buffers = max(self.buffers, self.storages.bytes(sent | arrived))
        self.gathered = max(self.gathered, unique_bytes(gathered_of(self.train_state)))
        self._sample_gradients()

    def _sample_gradients(self) -> None:
        gradients = unique_bytes((*gradients_of(self.train_state), *unreduced_of(self.train_state)))
        self.gradients = max(self.gradients, gradients)


@contextlib.contextmanager
def following(step: StepMemory) -> Iterator[None]:
    """While it is open, every action of the pipeline is followed."""
    gc.collect()
    gc.freeze()  # what was there before need not be looked through after every action
    try:
        with step.train_state.observers.watched_by(step):
            yield
    finally:
        gc.unfreeze()


def measure_memory(train_state: TrainState, batch: Batch) -> dict[str, Any]:
    """Bytes on this rank in one step over `batch`: by owner where an owner is known, and

    - `saved`: what each microbatch keeps for its backward pass, by stage,
    - `activations`: the most that all microbatches in flight keep, which the schedule decides,
    - `gradients`: after the passes; `unreduced`: the most between them, those that wait to be added over ranks included,
    - `gathered`: the most between two passes of whole parameters gathered from shards,
    - `buffers`: the most between two passes of what travels between stages and is no longer, or not yet, of use,
    - `peak`: the most of everything together at any moment.
    """
    cuda = train_state.device.type == "cuda"
    parameters = parameters_of(train_state)
    storages = Storages()
    step = StepMemory(train_state, storages)
    train_state.optimizer.zero_grad()
    if cuda:
        torch.cuda.reset_peak_memory_stats(train_state.device)
    for x in (*parameters, *optimizer_of(train_state), *_buffers(train_state)):
        storages.follow(storage_of(x))
    with storages, following(step):
        train_state.train_step(batch)
    return dict(
        parameters=unique_bytes(parameters),
        gradients=unique_bytes(gradients_of(train_state)),
        optimizer=unique_bytes(optimizer_of(train_state)),
        activations=step.high_water,
        gathered=step.gathered,
        buffers=step.buffers,
        unreduced=step.gradients,
        saved=step.saved,
        peak=torch.cuda.max_memory_allocated(train_state.device) if cuda else storages.peak,
    )


def _buffers(train_state: TrainState) -> Iterator[Tensor]:
    return (buffer for model in train_state.parallel.models for buffer in model.buffers())
