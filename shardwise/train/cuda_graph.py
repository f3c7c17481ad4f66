"""Captures a step's forward and backward once as a CUDA graph and replays it, when a single GPU outruns its host's kernel launches.

A step of a small model is thousands of kernels of a few microseconds each, and the host takes longer than that to launch one. A
CUDA graph is a single launch: the same kernels on the same memory, into which the next batch is copied. It does not help when the
device is slower than the host, and it holds on to the activations' memory. So, unless the run asks for a graph, some steps are
measured first: if the device finishes as soon as the host has launched everything, the host is the slower one. Rechecked steps,
evaluations, batches of another shape, and the steps of `shardwise profile`, which labels kernels, are launched kernel by kernel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwise.data.batches import Batch
from shardwise.model.device import recover_from_capture
from shardwise.parallel.objective import Microbatch
from shardwise.run.derive import replays
from shardwise.train.step import TrainState

WARM_UP = 3
"""Steps spent on compiling, tuning and allocating; they are not measured."""
MEASURED = 3
"""Steps measured to decide whether to capture."""
BEHIND = (0.05, 0.005)
"""The host is the slower one if the device finishes within this share of a step, and within these seconds, after the last launch.
A host that is faster is ahead by a thousand launches, or by all of them."""


def attach(train_state: TrainState, log: Callable[[str], None] = lambda _: None) -> None:
    """Replay a train state's steps as a CUDA graph, if its run allows it."""
    if replays(train_state.run, gpu=train_state.device.type == "cuda"):
        train_state.replay = GraphedPasses(train_state, log)


class GraphedPasses:
    """Forward and backward of steps: launched kernel by kernel at first, then replayed if that is faster."""

    def __init__(self, train_state: TrainState, log: Callable[[str], None]) -> None:
        self.train_state, self.log = train_state, log
        self.steps = 0
        self.host_slower: list[bool] = []
        self.graph: torch.cuda.CUDAGraph | None = None
        self.off = False

    def __call__(self, batch: Batch) -> Tensor:
        """Run a step's forward and backward; replaces `TrainState.passes`."""
        self.steps += 1
        if self.graph is not None:
            return self._replayed(batch)
        if self.off or self.steps <= WARM_UP:
            return self.train_state.passes(batch)
        if self.train_state.run.train.cuda_graph == "auto":
            if len(self.host_slower) < MEASURED:
                return self._measured(batch)
            if 2 * sum(self.host_slower) < MEASURED:
                self.off = True
                return self.train_state.passes(batch)
        return self._captured(batch)

    def _measured(self, batch: Batch) -> Tensor:
        """Launch the step and synchronize, to see whether the host or the device was slower."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss = self.train_state.passes(batch)
        launched = time.perf_counter()
        torch.cuda.synchronize()
        ended = time.perf_counter()
        self.host_slower.append(ended - launched < min(BEHIND[0] * (ended - began), BEHIND[1]))
        return loss

    def _captured(self, batch: Batch) -> Tensor:
        """Capture the graph and replay it for this batch; if the capture fails, launch kernel by kernel."""
        train_state = self.train_state
        if train_state.tuner is not None:
            train_state.tuner.stop()
        self.batch = train_state.microbatches(batch)
        self.leaves = [each.leaf for each in train_state.parallel.parameters]
        graph, pool, stream = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), torch.cuda.current_stream()
        try:
            # Other threads may use the GPU meanwhile, for instance to write a checkpoint.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self.loss = train_state.passes_of(self.batch)
        except RuntimeError as error:  # out of memory, or an operation that synchronizes
            self.off = True
            recover_from_capture(stream, pool)
            train_state.optimizer.zero_grad()
            torch.cuda.synchronize()
            self.log(f"steps are launched kernel by kernel, since they could not be captured: {error}".splitlines()[0])
            return train_state.passes(batch)
        self.gradients = [leaf.grad for leaf in self.leaves]
        self.graph = graph
        why = ": the host was slower than the GPU" if self.host_slower else ""
        self.log(f"steps are replayed as a CUDA graph from here on{why}")
        return self._replayed(batch)

    def _replayed(self, batch: Batch) -> Tensor:
        microbatches = self.train_state.microbatches(batch)
        if not same_shapes(self.batch, microbatches):
            return self.train_state.passes_of(microbatches)
        for mine, new in zip(self.batch, microbatches, strict=True):
            for name, value in new.items():
                mine[name].copy_(value)
        assert self.graph is not None
        self.train_state.refresh()  # the graph cannot notice that a parameter has changed
        self.graph.replay()
        for leaf, gradient in zip(self.leaves, self.gradients, strict=True):
            leaf.grad = gradient
        return self.loss.clone()


def same_shapes(these: Sequence[Microbatch], those: Sequence[Microbatch]) -> bool:
    """Whether one batch can be copied into the tensors of another: same names, shapes and dtypes."""
    one, other = ([{name: (x.shape, x.dtype) for name, x in each.items()} for each in some] for some in (these, those))
    return one == other
