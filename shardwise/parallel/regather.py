"""Sequences gathered over tensor ranks are not kept for the backward pass but gathered again there (Korthikanti et al. 2022): of
the input of matrices that are cut by columns each rank saves its own shard.

Autograd saves what its operators were given. While `regathering` is open, a saved tensor that is a gathered sequence, or a view of
one, is replaced by its shard; whoever needs it first in the backward pass gathers it, and the last one lets it go. Inside of a
recomputed block nothing is replaced: there it lives for that block's backward pass alone.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.torch_private import storage_key


@dataclass
class Gathered:
    """A gathered sequence that can be made again from its shard."""

    shard: Tensor
    gather: Callable[[Tensor], Tensor]
    users: int = 0
    whole: Tensor | None = None

    def take(self) -> Tensor:
        """The whole, for one of its users."""
        whole = self.gather(self.shard) if self.whole is None else self.whole
        self.users -= 1
        self.whole = whole if self.users else None
        return whole


@dataclass(frozen=True)
class _View:
    of: Gathered
    shape: torch.Size
    stride: tuple[int, ...]
    offset: Any


_KNOWN: dict[int, tuple[weakref.ref[Any], Gathered]] = {}
_OPEN = 0


def note_gathered(whole: Tensor, shard: Tensor, gather: Callable[[Tensor], Tensor]) -> None:
    """Remember how a tensor was gathered, while it is alive."""
    if _OPEN:
        storage = whole.untyped_storage()
        key = storage_key(storage)
        _KNOWN[key] = (weakref.ref(storage, lambda _: _KNOWN.pop(key, None)), Gathered(shard.detach(), gather))


def _pack(x: Tensor) -> Tensor | _View:
    known = _KNOWN.get(storage_key(x.untyped_storage())) if x.layout == torch.strided else None
    if known is None:
        return x
    known[1].users += 1
    return _View(known[1], x.shape, x.stride(), x.storage_offset())


def _unpack(packed: Tensor | _View) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    return packed.of.take().as_strided(packed.shape, packed.stride, packed.offset)


@contextlib.contextmanager
def regathering() -> Iterator[None]:
    """While it is open, forward passes save shards of gathered sequences."""
    global _OPEN
    _OPEN += 1
    try:
        with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
            yield
    finally:
        _OPEN -= 1
