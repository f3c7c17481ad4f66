"""Saved tensors that wait in host memory, or on the host's disk, for the backward pass (vDNN, Rhu et al. 2016; Capuchin, Peng et
al. 2020).

On a GPU a tensor is copied to pinned memory on a separate stream as soon as it is saved. At most `IN_FLIGHT` bytes are in flight;
beyond that, the passes wait. In the backward pass it comes back on another stream: when one tensor is needed, the copies of those
needed next start too, a layer's worth of them. So both directions overlap with the passes, as far as the link is fast enough.
Memory is allocated and freed on the passes' own stream, so the host may run ahead of the device. On a CPU it is a plain copy. A
tensor on disk is written and read at the moment it is needed, and overlaps with nothing. The bits are the same.
"""

from __future__ import annotations

import tempfile
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.plan.cost.host import IN_FLIGHT

AHEAD = 9
"""Tensors that start being copied back before they are needed: about those of a layer."""


class Swap:
    """Holds the saved tensors of this rank that leave the device."""

    def __init__(self, folder: str = "") -> None:
        """In host memory, or in files of a folder."""
        self.folder = folder
        self.streams: tuple[Any, Any] | None = None
        self.order: list[_Host | None] = []
        self.leaving: deque[tuple[Tensor, Any]] = deque()
        self.alive: weakref.WeakSet[_Host] = weakref.WeakSet()

    def begin(self) -> None:
        """A forward pass begins: its saved tensors are needed in reverse order."""
        self.order = []

    def held(self) -> list[Tensor]:
        """The tensors in host memory now."""
        return [each.host for each in self.alive]

    def form(self, x: Tensor) -> tuple[tuple[Tensor, ...], Callable[..., Tensor]]:
        """A form for `saving.py`."""
        if self.folder:
            return (), _File(x, self.folder)
        if x.is_cuda and self.streams is None:
            self.streams = torch.cuda.Stream(), torch.cuda.Stream()
        host = _Host(x, self, self.order)
        self.alive.add(host)
        self.order.append(host)
        return (), host

    def wait(self, most: int) -> None:
        """Make the passes wait until at most this many bytes are in flight to the host."""
        while self.leaving and sum(x.nbytes for x, _ in self.leaving) > most:
            torch.cuda.current_stream().wait_event(self.leaving.popleft()[1])


class _Host:
    """A tensor in host memory; calling it brings the tensor back."""

    def __init__(self, x: Tensor, swap: Swap, order: list[_Host | None]) -> None:
        self.place, self.order, self.swap, self.device = len(order), order, swap, x.device
        self.back: tuple[Tensor, Any] | None = None
        if not x.is_cuda:
            self.host = x.clone()
            return
        assert swap.streams is not None
        self.host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        stream = swap.streams[0]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.host.copy_(x, non_blocking=True)
            self.left = stream.record_event()
        swap.leaving.append((x, self.left))  # its memory is not reused before the passes have waited
        swap.wait(IN_FLIGHT)

    def start(self) -> None:
        """Start copying it back."""
        if self.back is not None:
            return
        assert self.swap.streams is not None
        back, stream = torch.empty_like(self.host, device=self.device), self.swap.streams[1]
        stream.wait_stream(torch.cuda.current_stream())
        stream.wait_event(self.left)
        with torch.cuda.stream(stream):
            back.copy_(self.host, non_blocking=True)
            self.back = back, stream.record_event()

    def __call__(self) -> Tensor:
        self.order[self.place] = None
        if self.device.type != "cuda":
            return self.host
        self.swap.wait(0)
        for each in (self, *self.order[max(0, self.place - AHEAD) : self.place][::-1]):
            if each is not None:
                each.start()
        assert self.back is not None
        (back, arrived), self.back = self.back, None
        torch.cuda.current_stream().wait_event(arrived)
        return back


class _File:
    """A tensor in an unnamed file; calling it reads the tensor back."""

    def __init__(self, x: Tensor, folder: str) -> None:
        self.dtype, self.device = x.dtype, x.device
        self.file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        x.cpu().view(torch.uint8).numpy().tofile(self.file)

    def __call__(self) -> Tensor:
        self.file.seek(0)
        return torch.from_numpy(np.fromfile(self.file, np.uint8)).view(self.dtype).to(self.device)
