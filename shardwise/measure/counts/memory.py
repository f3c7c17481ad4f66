"""Counts the memory of one rank during one real training step: bytes by owner.

Persistent memory (parameters, gradients, optimizer) is found by walking over the train state. Transient memory is found by the
lifetime of storages: a dispatch mode sees every tensor that an operator returns, also in backward passes, and a weak reference
to its storage reports when it is freed. So views and in-place results count once, and fake tensors (`FakeTensorMode`) count as if
they had data. The saved tensors of a stage and microbatch are the storages that the forward pass allocated, or received from
another stage, and left alive, without the parameters that `fully_shard` gathered for it. Storages allocated outside of PyTorch's
dispatcher are not counted: NumPy arrays, and workspaces of kernels and communication libraries. On CUDA the peak is the
allocator's, which sees them.
"""

from __future__ import annotations

import contextlib
import gc
import glob
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage

from shardwise.data.batches import Batch
from shardwise.measure.counts.traffic import DEVICE
from shardwise.model.quantized.fp8 import Fp8Matrix
from shardwise.parallel.observer import Observer
from shardwise.schedules import Action
from shardwise.torch_private import BareDispatchMode, observed_resizes, storage_key, tree_leaves
from shardwise.torch_private.fully_shard import gathered_tensors, local_shard, sharded_groups, unreduced_gradients
from shardwise.train.step import TrainState


def storage_of(x: Tensor) -> UntypedStorage:
    """The storage of a tensor, or of this rank's shard if it is sharded."""
    if isinstance(x, Fp8Matrix):
        return x.fp8_data.untyped_storage()
    return local_shard(x).untyped_storage()


def unique_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the tensors' storages; a shared storage counts once."""
    storages = (storage_of(x) for x in tensors if x is not None)
    return sum({storage_key(s): s.nbytes() for s in storages}.values())


class Storages(BareDispatchMode):
    """While it is open, tracks every storage that operators allocate: the live ones, their bytes, and the peak so far. Storages
    are numbered, since a new one may have the address of an old one."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.references: dict[int, tuple[int, weakref.ref[UntypedStorage]]] = {}
        self.count = self.now = self.peak = 0

    def __enter__(self) -> Storages:
        # `fully_shard` frees memory by shrinking storages that stay alive; no operator sees this.
        self.resizes = observed_resizes(self.track)
        self.resizes.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.resizes.__exit__(None, None, None)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator is DEVICE:
            return args[0].device
        result = operator(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self.track(storage_of(leaf))
        return result

    def track(self, storage: UntypedStorage) -> int:
        """Count a storage, or its new size; returns its number."""
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
        """Wait until unused storages are freed: reference cycles, and the tensors of completed messages. gloo's threads release
        the latter a moment later, or much later on a busy machine, so this waits until no other thread has anything to do."""
        gc.collect()
        quiet = 0
        while dist.is_initialized() and quiet < 3:
            before = self.now
            time.sleep(0.002)
            quiet = quiet + 1 if self.now == before and not _other_threads_run() else 0

    def numbers(self, tensors: Iterable[Tensor]) -> set[int]:
        """The numbers of the tensors' tracked storages."""
        places = (storage_key(storage_of(x)) for x in tensors)
        return {self.references[place][0] for place in places if place in self.references}

    def bytes(self, numbers: Iterable[int]) -> int:
        """Bytes of the storages that are still alive."""
        return sum(self.alive.get(number, 0) for number in numbers)


def _other_threads_run() -> bool:
    """Whether another thread of this process runs or is ready to, as Linux reports it."""
    for task in glob.iglob("/proc/self/task/*/stat"):
        if int(task.split("/")[4]) != threading.get_native_id():
            with contextlib.suppress(OSError), open(task) as stat:  # a thread may end meanwhile
                if stat.read().rpartition(")")[2].split()[0] == "R":
                    return True
    return False


def parameters_of(train_state: TrainState) -> list[Tensor]:
    """This rank's shards of the parameters, their compute copies and earlier versions, and the parameters of a frozen network."""
    copies = [
        each.compute_copy.tensor.detach() for each in train_state.parallel.parameters if each.compute_copy is not None
    ]
    frozen = train_state.reference.parameters if train_state.reference is not None else ()
    hosted = train_state.optimizer.host is not None
    own = [e for e in train_state.parallel.parameters if not (hosted and e.compute_copy is not None)]
    kept = train_state.updates.versions.before.values() if train_state.updates is not None else ()
    return [each.parameter.detach() for each in (*own, *frozen)] + copies + [x for values in kept for x in values]


def gradients_of(train_state: TrainState) -> list[Tensor | None]:
    """The gradients of the parameters."""
    return [each.leaf.grad for each in train_state.parallel.parameters]


def optimizer_of(train_state: TrainState) -> list[Tensor]:
    """The optimizers' state on the device, with the unsent remainder of compressed gradients and the outer optimizer's state."""
    return [] if train_state.optimizer.host is not None else _states(train_state)


def hosted_of(train_state: TrainState) -> list[Tensor | None]:
    """The tensors in host memory: parameters in high precision, optimizer states and gradients."""
    host = train_state.optimizer.host
    if host is None:
        return []
    own = [x for each in host.hosted.values() for x in (each.master, each.buffer, each.total)]
    in_files = host.files is not None
    return [*own, *(x for x in _states(train_state) if not (in_files and x.ndim))]


def _states(train_state: TrainState) -> list[Tensor]:
    parts = (part.state.values() for part in train_state.optimizer.parts)
    exchange, outer = train_state.exchange, train_state.outer
    kept = exchange.compressor.states if exchange is not None else ()
    anchors = (outer.state_of(n) for n in outer.shards) if outer is not None else ()
    states = chain(*parts, kept, anchors)
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


def _groups(train_state: TrainState) -> Iterator[Any]:
    """The parameter groups of `fully_shard`."""
    return (group for model in train_state.parallel.models for _, group in sharded_groups(model))


def gathered_of(train_state: TrainState) -> Iterator[Tensor]:
    """Unsharded parameters of `fully_shard`, and the buffers of its all-gathers."""
    return (x for group in _groups(train_state) for x in gathered_tensors(group))


def unreduced_of(train_state: TrainState) -> Iterator[Tensor | None]:
    """Gradients not yet reduced: unsharded ones, and shards waiting for the all-reduce over replicas."""
    return (x for group in _groups(train_state) for x in unreduced_gradients(group))


@dataclass
class StepMemory(Observer):
    """Samples memory after each action of a step's schedule."""

    train_state: TrainState
    storages: Storages
    saved: dict[int, list[int]] = field(default_factory=dict)
    """Bytes that each microbatch saved, by this rank's stage."""
    activations: set[int] = field(default_factory=set)
    """Numbers of the storages saved by microbatches in flight."""
    peak_activations: int = 0
    """Peak of the saved activations, in bytes."""
    away: int = 0
    """Peak of the saved tensors that are offloaded to host memory."""
    buffers: int = 0
    gathered: int = 0
    gradients: int = 0
    """Peak between two actions, including unreduced gradients."""
    left: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)
    """Bytes of each storage that the forward pass of a stage and microbatch left alive, by the storage's number."""

    ahead: bool = False
    """Whether the reference model's passes run; they precede the step's own and save nothing."""

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before, self.ahead = self.ahead, self.ahead or name == "reference"
        try:
            yield
        finally:
            self.ahead = before

    @contextlib.contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """Sample the live storages after a pass."""
        before = set(self.storages.alive)
        yield
        if action.kind in ("W", "U") or self.ahead:  # see `weight_gradients`
            return
        if (swap := self.train_state.parallel.pipeline.swap) is not None:
            swap.wait(0)  # tensors already offloaded are no longer held for the copy
        self.storages.settle()
        if action.kind == "F":
            self._record_saved(action, before)
        self._sample()

    @contextlib.contextmanager
    def weight_gradients(self) -> Iterator[None]:
        yield
        self._sample_gradients()

    def _record_saved(self, action: Action, before: set[int]) -> None:
        """Record the storages that a forward pass left alive."""
        pipeline = self.train_state.parallel.pipeline
        made = set(self.storages.alive) - before
        if action.stage:
            made |= self.storages.numbers([pipeline.input_of(action)])
        # Activations received for later passes, and the batch itself, are not saved by this pass.
        others = [buffer for buffer, _ in pipeline.channel.arriving.values()]
        away = pipeline.swap.held() if pipeline.swap is not None else []
        self.away = max(self.away, unique_bytes(away))
        others += away
        others += [x for microbatch in pipeline.batches() for x in microbatch.values() if x is not None]
        # `fully_shard` gives shards their own storage in the very first pass.
        made -= self.storages.numbers((*gathered_of(self.train_state), *parameters_of(self.train_state), *others))
        self.saved.setdefault(action.stage, []).append(self.storages.bytes(made))
        sizes = {number: self.storages.bytes([number]) for number in made}
        self.left[action.stage, action.microbatch] = {number: size for number, size in sizes.items() if size}
        self.activations |= made

    def _sample(self) -> None:
        pipeline, numbers = self.train_state.parallel.pipeline, self.storages.numbers
        stages = pipeline.stages.values()
        waiting = (each for stage in stages for taken in stage.deferred.values() for each in taken)
        deferred = numbers(x for each in waiting for x in (each.weight, *each.saved))
        if deferred:
            deferred -= numbers((*parameters_of(self.train_state), *gathered_of(self.train_state)))
        ends = numbers(x for stage in stages for xs in (*stage.roots.values(), stage.inputs.values()) for x in xs)
        handover = pipeline.handover
        sending = (*pipeline.channel.sending, *(handover.sending if handover is not None else ()))
        sent = numbers(x for x, _ in sending) - ends
        # Tensors that a partner handed over, or returned, are saved activations in one buffer.
        handed = numbers(x for x, _ in handover.arriving.values()) if handover is not None else set()
        arrived = numbers(x for x, _ in pipeline.channel.arriving.values())
        # A gradient computed ahead of its backward pass counts as an activation until then, and as a gradient afterwards.
        gradients = (*gradients_of(self.train_state), *unreduced_of(self.train_state))
        self.activations &= set(self.storages.alive) - numbers(g for g in gradients if g is not None)
        self.peak_activations = max(
            self.peak_activations, self.storages.bytes((self.activations | deferred | handed) - sent)
        )
        self.buffers = max(self.buffers, self.storages.bytes(sent | arrived))
        self.gathered = max(self.gathered, unique_bytes(gathered_of(self.train_state)))
        self._sample_gradients()

    def _sample_gradients(self) -> None:
        gradients = unique_bytes((*gradients_of(self.train_state), *unreduced_of(self.train_state)))
        self.gradients = max(self.gradients, gradients)


@contextlib.contextmanager
def sampling(step: StepMemory) -> Iterator[None]:
    """While it is open, memory is sampled after every action of the pipeline."""
    gc.collect()
    gc.freeze()  # collections after every action skip the objects that exist already
    try:
        with step.train_state.observers.watched_by(step):
            yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def measured_memory(train_state: TrainState) -> Iterator[dict[str, Any]]:
    """Fill a dict with this rank's bytes in the one step that runs while it is open: by owner where the owner is known, and

    - `saved`: bytes that each microbatch keeps for its backward pass, by stage,
    - `activations`: the peak over all microbatches in flight, which depends on the schedule,
    - `gradients`: after the passes; `unreduced`: the peak between and after them, including unreduced gradients,
    - `gathered`: the peak of unsharded parameters between two passes,
    - `buffers`: the peak between two passes of the P2P buffers between stages that no pass uses any more, or yet,
    - `peak`: the peak of everything together.
    """
    cuda = train_state.device.type == "cuda"
    parameters = parameters_of(train_state)
    storages = Storages()
    step = StepMemory(train_state, storages)
    found: dict[str, Any] = {}
    train_state.optimizer.zero_grad()
    if cuda:
        torch.cuda.reset_peak_memory_stats(train_state.device)
    for x in (*parameters, *optimizer_of(train_state), *_buffers(train_state)):
        storages.track(storage_of(x))
    with storages, sampling(step):
        yield found
        train_state.optimizer.finish()
    gradients = unique_bytes(gradients_of(train_state))
    found.update(
        parameters=unique_bytes(parameters_of(train_state)),
        gradients=gradients,
        optimizer=unique_bytes(optimizer_of(train_state)),
        host=unique_bytes(hosted_of(train_state)) + step.away,
        activations=step.peak_activations,
        gathered=step.gathered,
        buffers=step.buffers,
        unreduced=max(step.gradients, gradients),
        saved=step.saved,
        peak=torch.cuda.max_memory_allocated(train_state.device) if cuda else storages.peak,
    )


def measure_memory(train_state: TrainState, batch: Batch) -> dict[str, Any]:
    """The dict of `measured_memory` for one step over `batch`."""
    with measured_memory(train_state) as found:
        train_state.train_step(batch)
    return found


def _buffers(train_state: TrainState) -> Iterator[Tensor]:
    return (buffer for model in train_state.parallel.models for buffer in model.buffers())
