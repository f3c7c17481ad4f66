"""AdamW on the host (ZeRO-Offload, Ren et al. 2021): moments and parameters in high precision are in the CPU's memory, and its
threads update them while the device computes.

A gradient leaves the device as soon as the backward pass has made it, on a stream of its own; at most `IN_FLIGHT` bytes wait
there. Where a step has several microbatches the host adds them up, as the device would have, in high precision. When the norm of
all gradients is known, threads update slices of the parameters, those outside of the layers first and then layer by layer in the
order of the forward pass, and send each slice to the device. The next forward pass waits, layer by layer, for what it needs: so
gradients travel behind the backward pass, and the update hides behind the forward pass.

Traffic of a step: every gradient once a microbatch to the host, every parameter once to the device, in the dtype that the device
holds. The host's memory holds 3 x 4 bytes a parameter and a gradient; what it reads and writes is in `plan/time/host.py`.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
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
"""Elements that a thread updates at a time: what it makes on the way stays in its cache."""


@dataclass
class Hosted:
    """A parameter whose optimizer is the host's."""

    held: LocalParameter
    master: Tensor
    """In high precision, in the host's memory. Not an alias that autograd knows of: a change of it says nothing to others."""
    target: Tensor
    """What the device computes with."""
    buffer: Tensor | None = None
    """Where its gradient arrives."""
    total: Tensor | None = None
    """The sum of several microbatches' gradients, once it is `begun`."""
    begun: bool = False
    norm: Tensor | None = None
    written: int = 0
    """The version of a parameter that others may write: one that the device holds in high precision."""
    adding: Future[None] | None = None
    updates: list[Future[None]] = field(default_factory=list)


class HostAdamW(torch.optim.Optimizer):
    """AdamW whose parameters are slices of the host's memory; `factor` on all gradients is set before each step."""

    factor: Tensor

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        local: Mapping[Tensor, LocalParameter],
        microbatches: int,
        threads: int,
        folder: str = "",
    ) -> None:
        super().__init__(groups, dict(lr=lr, betas=betas, eps=eps, weight_decay=0.0))
        self.local = local
        self.microbatches = microbatches
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
        # A dry run's tensors have no data, and know one thread alone.
        self.dry = any(is_fake(master) for master in local)
        self.threads: ThreadPoolExecutor | AtOnce = AtOnce()
        self.scratch = thread_local()
        if not self.dry:
            before, count = torch.get_num_threads(), threads or len(os.sched_getaffinity(0))
            self.threads = ThreadPoolExecutor(count, initializer=_alone)
            self.threads.submit(int).result()  # a thread has begun, and said that it works alone
            torch.set_num_threads(before)

    def watch(self, models: list[Transformer]) -> None:
        """Let the layers of the network wait for their parameters before they compute."""
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
        """What is computed from here on has these parameters updated."""
        waited = False
        for each in some:
            for update in each.updates:
                update.result()
                waited = True
            each.updates = []
        if waited and self.to_device is not None:
            torch.cuda.current_stream().wait_stream(self.to_device)

    def refresh(self) -> None:
        """Before a pass: parameters outside of the layers are updated, and what others have written is taken."""
        self._wait(self.outer)
        for each in self.hosted.values():
            if each.held.compute_copy is None and version(each.held.parameter) != each.written:
                self._wait([each])
                each.master.copy_(each.held.parameter.detach())
                each.written = version(each.held.parameter)

    def moment(self, like: Tensor) -> Tensor:
        """Zeros for a parameter's moment: in the host's memory, or in a file of the folder that the system maps into it, so that a
        slice is read when it is updated and written when there is need of its memory."""
        if self.files is None or self.dry:
            return torch.zeros_like(like)
        self.moments += 1
        path = os.path.join(self.files.name, str(self.moments))
        return torch.from_file(path, shared=True, size=like.numel(), dtype=like.dtype).view_as(like)

    def finish(self) -> None:
        """Wait until everything is updated."""
        self._wait(list(self.hosted.values()))
        if self.to_device is not None:
            self.to_device.synchronize()

    @torch.no_grad()
    def _arrived(self, each: Hosted, leaf: Tensor) -> None:
        """A gradient is complete: it leaves the device."""
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        gradient = gradient.contiguous()
        if self.microbatches == 1:
            each.norm = norm_of(gradient)
        if each.adding is not None:  # the buffer is still read
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
        """The norm of each gradient by the parameter's name; they are complete."""
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
        """Forget the gradients of a step."""
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
            group = settings[id(each.master)]
            flat = [x.view(-1) for x in (each.master, gradient, state["exp_avg"], state["exp_avg_sq"], each.target)]
            how = (
                0.0 if self.dry else float(state["step"]),
                group["lr"],
                group["betas"],
                group["eps"],
                group["weight_decay"],
            )
            each.updates = [
                self.threads.submit(self._update, [x[at : at + SLICE] for x in flat], factor, *how)
                for at in range(0, each.master.numel(), SLICE)
            ]
            each.norm = None

    @torch.no_grad()
    def _update(
        self,
        parts: list[Tensor],
        factor: float,
        step: float,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        decay: float,
    ) -> None:
        """One slice: its gradient times the factor, AdamW, and its way to the device."""
        master, gradient, first, second, target = parts
        mine = self.scratch
        if not hasattr(mine, "gradient"):
            mine.gradient, mine.slots, mine.turn = torch.empty(SLICE, dtype=master.dtype), [], 0
        scaled = mine.gradient if mine.gradient.dtype == master.dtype else torch.empty(SLICE, dtype=master.dtype)
        scaled = scaled[: master.numel()].copy_(gradient).mul_(factor)
        # The optimizer counts the step itself.
        adamw_(master, scaled, first, second, torch.tensor(step), lr, betas, eps, decay)
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
        """Pinned memory of this thread, that a slice goes to the device from; two, in turns, of each dtype."""
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
    """Does what threads would do, now."""

    def submit(self, work: Callable[..., None], *given: Any) -> Future[None]:
        """The work's future, done."""
        done: Future[None] = Future()
        work(*given)
        done.set_result(None)
        return done


def _alone() -> None:
    """A thread of many computes by itself."""
    torch.set_num_threads(1)


def norm_of(gradient: Tensor) -> Tensor:
    """The norm of one gradient, as `squared_norm` takes it of many."""
    return foreach_norm([gradient], dtype=torch.promote_types(gradient.dtype, torch.float32))[0]


def target_of(held: LocalParameter) -> Tensor:
    """What the device computes with in a parameter's place, without a trace in autograd's counts."""
    return (held.parameter if held.compute_copy is None else held.compute_copy.tensor).data


def master_of(held: LocalParameter) -> Tensor:
    """A parameter in high precision in the host's memory: its own where the device has a copy, else a copy."""
    if held.compute_copy is not None:
        return held.parameter.data
    return held.parameter.data.to("cpu", copy=True)
