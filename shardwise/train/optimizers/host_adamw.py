"""AdamW on the host (ZeRO-Offload, Ren et al. 2021): moments and master parameters in high precision are in CPU memory, and CPU
threads update them while the device computes.

A gradient leaves the device as soon as the backward pass has produced it, on its own CUDA stream; at most `IN_FLIGHT` bytes wait on
the device. If a step has several microbatches, the host accumulates their gradients in high precision, as the device would have.
When the norm of all gradients is known, threads update slices of the parameters and send each slice to the device: first the
parameters outside the layers, then layer by layer in the order of the forward pass. The next forward pass waits, layer by layer,
for the parameters it needs. So the gradients' copies overlap the backward pass, and the update overlaps the forward pass.

Traffic of a step: every gradient to the host once per microbatch, and every parameter to the device once, in the device's dtype.
Host memory holds 3 x 4 bytes a parameter, and a gradient; `plan/cost/host.py` has the bytes that the host reads and writes.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from threading import local as thread_local
from typing import Any

import torch
from torch import Tensor

from shardwise.model.transformer import Transformer
from shardwise.parallel.local_parameter import LocalParameter
from shardwise.plan.cost.host import IN_FLIGHT
from shardwise.run import Problem, UserError
from shardwise.torch_private import adamw_, foreach_norm, is_fake, version

SLICE = 1 << 20
"""Elements that a thread updates at a time: its temporaries stay in its cache."""
SETTINGS = itemgetter("lr", "betas", "eps", "weight_decay")
"""Of a parameter group, in the order in which the update takes them."""


@dataclass
class Hosted:
    """A parameter that the host updates."""

    held: LocalParameter
    master: Tensor
    """The master parameter, in high precision and in host memory. Autograd does not know it as an alias: a write to it does not
    change the version counter of other tensors."""
    target: Tensor
    """The tensor that the device computes with."""
    buffer: Tensor | None = None
    """The host tensor that its gradient is copied to."""
    total: Tensor | None = None
    """The sum of several microbatches' gradients; valid once it is `begun`."""
    begun: bool = False
    norm: Tensor | None = None
    written: int = 0
    """The parameter's version counter when it was last in sync. Others may write the parameter if the device holds it in high
    precision."""
    adding: Future[None] | None = None
    updates: list[Future[None]] = field(default_factory=list)


class HostAdamW(torch.optim.Optimizer):
    """AdamW whose parameters are in host memory; `factor`, which multiplies all gradients, is set before each step."""

    factor: Tensor

    def __init__(
        self,
        groups: list[dict[str, Any]],
        defaults: dict[str, Any],
        local: Mapping[Tensor, LocalParameter],
        microbatches: int,
        threads: int,
        folder: str = "",
    ) -> None:
        super().__init__(groups, defaults)
        self.local, self.microbatches = local, microbatches
        if folder and not os.path.isdir(folder):
            raise UserError(Problem(f"there is no such folder: {folder}", "memory.folder"))
        self.files = tempfile.TemporaryDirectory(dir=folder, prefix="moments-") if folder else None
        self.hosted = {held.name: Hosted(held, master, target_of(held)) for master, held in local.items()}
        for each in self.hosted.values():
            each.written = version(each.held.parameter)
            each.held.leaf.register_post_accumulate_grad_hook(partial(self._arrived, each))
        self.cuda = any(each.target.is_cuda for each in self.hosted.values())
        self.to_host, self.to_device = (torch.cuda.Stream() if self.cuda else None for _ in range(2))
        self.outer: list[Hosted] = []
        self.moments = 0
        self.leaving: deque[tuple[Tensor, Any]] = deque()
        # A dry run's tensors have no data, and work in one thread only.
        self.dry = any(is_fake(master) for master in local)
        self.threads: ThreadPoolExecutor | AtOnce = AtOnce()
        self.scratch = thread_local()
        if not self.dry:
            before, count = torch.get_num_threads(), threads or len(os.sched_getaffinity(0))
            self.threads = ThreadPoolExecutor(count, initializer=_alone)
            self.threads.submit(int).result()  # a thread has started, and `_alone` has run in it
            torch.set_num_threads(before)

    def watch(self, models: list[Transformer]) -> None:
        """Make the layers of the network wait for their parameters before they compute."""
        inner: dict[str, list[Hosted]] = {}
        for name, each in self.hosted.items():
            if name.startswith("layers."):
                inner.setdefault(name.split(".")[1], []).append(each)
            else:
                self.outer.append(each)
        for model in models:
            for name, layer in model.layers.items():
                layer.register_forward_pre_hook(partial(self._before, inner.get(name, [])))

    def _before(self, own: list[Hosted], *_: Any) -> None:
        self._wait(own)

    def _wait(self, some: list[Hosted]) -> None:
        """Wait until these parameters are updated, for all work that is launched from here on."""
        waited = False
        for each in some:
            for update in each.updates:
                update.result()
                waited = True
            each.updates = []
        if waited and self.to_device is not None:
            torch.cuda.current_stream().wait_stream(self.to_device)

    def refresh(self) -> None:
        """Called before a pass: wait for the parameters outside the layers, and take over parameters that others have written."""
        self._wait(self.outer)
        for each in self.hosted.values():
            if each.held.compute_copy is None and version(each.held.parameter) != each.written:
                self._wait([each])
                each.master.copy_(each.held.parameter.detach())
                each.written = version(each.held.parameter)

    def moment(self, like: Tensor) -> Tensor:
        """Zeros for a parameter's moment: in host memory, or in a memory-mapped file of the folder, so that a slice is read when it
        is updated and written back when the system needs its memory."""
        if self.files is None or self.dry:
            return torch.zeros_like(like)
        self.moments += 1
        path = os.path.join(self.files.name, str(self.moments))
        return torch.from_file(path, shared=True, size=like.numel(), dtype=like.dtype).view_as(like)

    def finish(self) -> None:
        """Wait until all parameters are updated."""
        self._wait(list(self.hosted.values()))
        if self.to_device is not None:
            self.to_device.synchronize()

    @torch.no_grad()
    def _arrived(self, each: Hosted, leaf: Tensor) -> None:
        """Called when a gradient is complete: start its copy to the host."""
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        gradient = gradient.contiguous()
        if self.microbatches == 1:
            each.norm = norm_of(gradient)
        if each.adding is not None:  # a thread still reads the buffer
            each.adding.result()
        arrived = None
        if self.to_host is None:
            each.buffer = gradient
        else:
            if each.buffer is None:
                each.buffer = torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=True)
            self.to_host.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.to_host):
                each.buffer.copy_(gradient, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(self.to_host)
            self.leaving.append((gradient, arrived))
            while sum(g.nbytes for g, _ in self.leaving) > IN_FLIGHT:
                self.leaving.popleft()[1].synchronize()
        if self.microbatches > 1:
            each.adding = self.threads.submit(self._add, each, arrived)

    @torch.no_grad()
    def _add(self, each: Hosted, arrived: Any) -> None:
        if arrived is not None:
            arrived.synchronize()
        assert each.buffer is not None
        if each.total is None:
            each.total = torch.empty_like(each.master)
        if each.begun:
            each.total.add_(each.buffer)
        else:
            each.total.copy_(each.buffer)
        each.begun = True

    def norms(self) -> dict[str, Tensor]:
        """The norm of each gradient, by the parameter's name; waits until all gradients have arrived."""
        while self.leaving:
            self.leaving.popleft()[1].synchronize()
        found = {}
        for name, each in self.hosted.items():
            if each.adding is not None:
                each.adding.result()
                each.adding = None
                assert each.total is not None
                each.norm = norm_of(each.total)
            if each.norm is not None:
                found[name] = each.norm
        return found

    def drop(self) -> None:
        """Drop the gradients of a step."""
        self.norms()
        for each in self.hosted.values():
            each.norm, each.begun = None, False
            if self.to_host is None:
                each.buffer = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "this optimizer does not evaluate the loss again"
        factor = 1.0 if self.dry else self.factor.item()
        settings = {id(p): group for group in self.param_groups for p in group["params"]}
        inner = [each for name, each in self.hosted.items() if name.startswith("layers.")]
        for each in (*self.outer, *inner):
            if each.norm is None:
                continue
            state = self.state[each.master]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"], state["exp_avg_sq"] = (self.moment(each.master) for _ in range(2))
            state["step"] += 1
            gradient = each.buffer if each.total is None else each.total
            assert gradient is not None
            flat = [x.view(-1) for x in (each.master, gradient, state["exp_avg"], state["exp_avg_sq"], each.target)]
            step, how = 0.0 if self.dry else float(state["step"]), SETTINGS(settings[id(each.master)])
            each.updates = [
                self.threads.submit(self._update, [x[at : at + SLICE] for x in flat], factor, step, how)
                for at in range(0, each.master.numel(), SLICE)
            ]
            each.norm = None

    @torch.no_grad()
    def _update(self, parts: list[Tensor], factor: float, step: float, how: tuple[Any, ...]) -> None:
        """Update one slice: multiply its gradient by the factor, apply AdamW, and send it to the device."""
        master, gradient, first, second, target = parts
        mine = self.scratch
        if not hasattr(mine, "gradient"):
            mine.gradient, mine.slots, mine.turn = torch.empty(SLICE, dtype=master.dtype), [], 0
        scaled = mine.gradient if mine.gradient.dtype == master.dtype else torch.empty(SLICE, dtype=master.dtype)
        scaled = scaled[: master.numel()].copy_(gradient).mul_(factor)
        # The optimizer has already incremented the step.
        adamw_(master, scaled, first, second, torch.tensor(step), *how)
        if self.to_device is None:
            target.copy_(master)
            return
        slot, sent = self._slot(target.dtype)
        if sent is not None:
            sent.synchronize()
        torch.cuda.set_device(target.device)
        with torch.cuda.stream(self.to_device):
            target.copy_(slot[: master.numel()].copy_(master), non_blocking=True)
            sent = torch.cuda.Event()
            sent.record()
        mine.slots[mine.turn] = (slot, sent)

    def _slot(self, dtype: torch.dtype) -> tuple[Tensor, Any]:
        """A pinned buffer of this thread, from which a slice is copied to the device; each dtype has two, used in turn."""
        mine = self.scratch
        of = [n for n, (slot, _) in enumerate(mine.slots) if slot.dtype == dtype]
        if len(of) < 2:
            mine.slots.append((torch.empty(SLICE, dtype=dtype, pin_memory=True), None))
            mine.turn = len(mine.slots) - 1
        else:
            mine.turn = of[(of.index(mine.turn) + 1) % 2] if mine.turn in of else of[0]
        slot: tuple[Tensor, Any] = mine.slots[mine.turn]
        return slot


class AtOnce:
    """Runs work at once, in the caller's thread, in place of a thread pool."""

    def submit(self, work: Callable[..., None], *given: Any) -> Future[None]:
        """Run the work; returns a future that is done."""
        done: Future[None] = Future()
        work(*given)
        done.set_result(None)
        return done


def _alone() -> None:
    """Make PyTorch compute in this thread alone: the pool already has one thread per core."""
    torch.set_num_threads(1)


def norm_of(gradient: Tensor) -> Tensor:
    """The norm of one gradient, computed as `squared_norm` does for many."""
    return foreach_norm([gradient], dtype=torch.promote_types(gradient.dtype, torch.float32))[0]


def target_of(held: LocalParameter) -> Tensor:
    """The tensor that the device computes with: the parameter or its compute copy, detached from autograd's version counter."""
    return (held.parameter if held.compute_copy is None else held.compute_copy.tensor).data


def master_of(held: LocalParameter) -> Tensor:
    """A parameter in high precision in host memory: the parameter's own tensor if the device has a compute copy, else a copy."""
    if held.compute_copy is not None:
        return held.parameter.data
    return held.parameter.data.to("cpu", copy=True)
