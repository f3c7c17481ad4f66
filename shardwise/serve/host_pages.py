"""Pages in host memory, to which those of preempted sequences are swapped."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class HostPages:
    """Room for copies of pages, each a slice of these tensors [pages, ...]."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._device = tensors
        self._host: list[Tensor] = []

    def allocate(self, pages: int) -> None:
        """Allocate room for this many pages, if there is none yet; for a GPU in pinned memory, which takes a while."""
        if pages and not self._host:
            empty = [torch.empty(pages, *x.shape[1:], dtype=x.dtype, pin_memory=x.is_cuda) for x in self._device]
            self._host = empty

    def swap(self, out: Sequence[tuple[int, int]], back: Sequence[tuple[int, int]], pages: int) -> None:
        """Copy pages `out` to the host, which has room for `pages`, and others `back` to the device; each is a pair (from, to)."""
        if not out and not back:
            return
        self.allocate(pages)
        for device, host in zip(self._device, self._host, strict=True):
            for page, kept in out:
                host[kept].copy_(device[page], non_blocking=True)
            for kept, page in back:
                device[page].copy_(host[kept], non_blocking=True)
