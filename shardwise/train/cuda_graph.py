"""The passes of a step recorded once and replayed (a CUDA graph), where one GPU works faster than its host can tell it what to do.

A step of a small model is thousands of kernels of some microseconds, and launching one takes the host longer than that. Recorded,
they are a single launch: the same kernels on the same memory, in which the next batch takes the place of the last. It helps
nothing where the device is the slower of the two, and keeps the memory of the activations to itself; so, unless it is asked for,
it is decided after some steps by looking: a host that has launched everything and finds that the device is done as well was the
one that was waited for. Steps computed twice, evaluations and whatever does not have the shape of the recorded batch are launched
one by one, as are the steps of `shardwise profile`, which says what each kernel is for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwise.data.batches import Batch
from shardwise.parallel.objective import Microbatch
from shardwise.run.derive import replays
from shardwise.torch_private import end_allocating_to_pool
from shardwise.train.step import TrainState

WARM = 3
"""Steps that are compiled, tuned and allocated for; they say nothing."""
LOOKED_AT = 3
BEHIND = (0.05, 0.005)
"""A device that ends this share of a step, and these seconds, after its host at most has waited for it. A host that is ahead is so
by a thousand launches, or by all there are."""


def attach(train_state: TrainState, log: Callable[[str], None] = lambda _: None) -> None:
    """Let the steps of a trainee be replayed, if its run can be."""
    if replays(train_state.run, gpu=train_state.device.type == "cuda"):
        train_state.replay = GraphedPasses(train_state, log)


class GraphedPasses:
    """Runs the passes of steps: launched at first, then, if that is worth it, replayed."""

    def __init__(self, train_state: TrainState, log: Callable[[str], None]) -> None:
        self.train_state, self.log = train_state, log
        self.steps = 0
        self.host_slower: list[bool] = []
        self.graph: torch.cuda.CUDAGraph | None = None
        self.off = False

    def __call__(self, batch: Batch) -> Tensor:
        """The passes of a step, in the place of `TrainState.passes`."""
        self.steps += 1
        if self.graph is not None:
            return self._replayed(batch)
        if self.off or self.steps <= WARM:
            return self.train_state.passes(batch)
        if self.train_state.run.train.cuda_graph == "auto":
            if len(self.host_slower) < LOOKED_AT:
                return self._looked_at(batch)
            if 2 * sum(self.host_slower) < LOOKED_AT:
                self.off = True
                return self.train_state.passes(batch)
        return self._recorded(batch)

    def _looked_at(self, batch: Batch) -> Tensor:
        """Launched, and waited for, to see which of the two was slower."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss = self.train_state.passes(batch)
        launched = time.perf_counter()
        torch.cuda.synchronize()
        ended = time.perf_counter()
        self.host_slower.append(ended - launched < min(BEHIND[0] * (ended - began), BEHIND[1]))
        return loss

    def _recorded(self, batch: Batch) -> Tensor:
        """Record the passes, and replay them for this batch; launch them if that can't be done."""
        train_state = self.train_state
        if train_state.tuner is not None:
            train_state.tuner.stop()
        self.batch = train_state.microbatches(batch)
        self.leaves = [held.leaf for held in train_state.parallel.parameters]
        graph, pool, stream = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), torch.cuda.current_stream()
        try:
            # What other threads do meanwhile, such as writing a checkpoint, is none of its business.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self.loss = train_state.passes_of(self.batch)
        except RuntimeError as error:  # memory, or something that waits for the device
            self.off = True
            recover(stream, pool)
            train_state.optimizer.zero_grad()
            torch.cuda.synchronize()
            self.log(f"steps are launched kernel by kernel, since they could not be recorded: {error}".splitlines()[0])
            return train_state.passes(batch)
        self.gradients = [leaf.grad for leaf in self.leaves]
        self.graph = graph
        why = ": the host was slower than the GPU" if self.host_slower else ""
        self.log(f"steps are replayed from here on{why}")
        return self._replayed(batch)

    def _replayed(self, batch: Batch) -> Tensor:
        microbatches = self.train_state.microbatches(batch)
        if not alike(self.batch, microbatches):
            return self.train_state.passes_of(microbatches)
        for mine, new in zip(self.batch, microbatches, strict=True):
            for name, value in new.items():
                if value is not None:
                    there = mine[name]
                    assert there is not None
                    there.copy_(value)
        assert self.graph is not None
        self.train_state.refresh()  # the recorded passes do not see whether somebody has changed a parameter
        self.graph.replay()
        for leaf, gradient in zip(self.leaves, self.gradients, strict=True):
            leaf.grad = gradient
        return self.loss.clone()


def recover(stream: torch.cuda.Stream, pool: tuple[int, int]) -> None:
    """After a recording that failed PyTorch stays on the stream it was made on, its generator of random numbers and its allocator
    believe that it still goes on, and the memory set apart for it stays so: all as they were before."""
    torch.cuda.set_stream(stream)
    device = stream.device_index
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())
    end_allocating_to_pool(device, pool)


def alike(these: Sequence[Microbatch], those: Sequence[Microbatch]) -> bool:
    """Whether one batch can take the place of another in memory."""

    def shapes(batch: Sequence[Microbatch]) -> list[dict[str, object]]:
        return [{name: None if x is None else (x.shape, x.dtype) for name, x in one.items()} for one in batch]

    return shapes(these) == shapes(those)
