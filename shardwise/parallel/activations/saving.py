"""Replaces tensors that autograd saves for the backward pass by something smaller, from which they are recomputed.

Autograd saves the inputs of its operators. While `saving` is open, a saved tensor that was noted here, or a view of one, is
replaced: its first user in the backward pass recomputes it, and its last user frees it. It is recomputed from other tensors, which
may be noted too. There are three kinds: sequences gathered over tensor ranks, of which each rank saves its own shard (Korthikanti
et al. 2022); tensors of a layer that cost less time than memory (`rematerialize.py`); and tensors that are kept in another form
(`quantized.py`, `swap.py`). Inside of a recomputed block nothing is replaced: there a saved tensor lives only for that block's
backward pass.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.torch_private import storage_key

Form = Callable[[Tensor], tuple[tuple[Tensor, ...], Callable[..., Tensor]]]
"""For a flat tensor: the tensors kept in its place, and the function that rebuilds it from them."""


@dataclass
class Recomputable:
    """A tensor that can be recomputed from others."""

    inputs: tuple[Tensor | _View, ...] = ()
    make: Callable[..., Tensor] | None = None
    form: Form | None = None
    """The other form in which the tensor itself is kept, if it is saved."""
    users: int = 0
    whole: Tensor | None = None

    def made_of(self) -> Iterator[Recomputable]:
        """This tensor, and the recomputable tensors that it is recomputed from, recursively."""
        yield self
        for each in self.inputs:
            if isinstance(each, _View):
                yield from each.of.made_of()

    def used(self) -> None:
        """Count one more user; the first one also counts as a user of the inputs."""
        self.users += 1
        if self.users == 1:
            for each in self.inputs:
                if isinstance(each, _View):
                    each.of.used()

    def keep(self, x: Tensor) -> None:
        """Keep the tensor that `x` is a view of in its other form."""
        if self.form is not None and self.make is None:
            flat = x.detach().as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
            self.inputs, self.make = self.form(flat)

    def take(self) -> Tensor:
        """The full tensor, for one of its users."""
        if self.whole is None:
            assert self.make is not None
            with torch.no_grad():
                self.whole = self.make(*map(_unpack, self.inputs))
        whole = self.whole
        self.users -= 1
        if not self.users:
            self.whole = None
        return whole


@dataclass(frozen=True)
class _View:
    of: Recomputable
    shape: torch.Size
    stride: tuple[int, ...]
    offset: Any


@dataclass
class _Slot:
    """A tensor that an operator saved before the tensor could be noted."""

    packed: Tensor | _View | PackedTensor


class PackedTensor(Protocol):
    """Stands for a saved tensor."""

    def take(self) -> Tensor: ...


class SavedTensorHook(Protocol):
    """Receives saved tensors, to put them elsewhere for a while."""

    def keep(self, x: Tensor) -> Tensor | PackedTensor:
        """A tensor is saved; returns what is saved in its place."""

    def note(self, known: Recomputable) -> None:
        """A tensor is saved as the inputs that it can be recomputed from."""


_SLOTS: list[_Slot] | None = None
_KEEPER: SavedTensorHook | None = None
_KNOWN: dict[int, tuple[weakref.ref[Any], Recomputable]] = {}
_OPEN = 0


def note_form(x: Tensor, form: Form) -> None:
    """Let a tensor be kept in another form, if it is saved."""
    if _OPEN:
        _remember(x, Recomputable(form=form))


def note(x: Tensor, inputs: Sequence[Tensor], make: Callable[..., Tensor]) -> None:
    """Note the inputs that a tensor can be recomputed from, while it is alive."""
    if _OPEN:
        views = tuple(_view(each) or each.detach() for each in inputs)
        for each, view in zip(inputs, views, strict=True):
            if isinstance(view, _View):
                view.of.keep(each)
        _remember(x, Recomputable(views, make))


def _remember(x: Tensor, known: Recomputable) -> None:
    storage = x.untyped_storage()
    key = storage_key(storage)
    _KNOWN[key] = (weakref.ref(storage, lambda _: _KNOWN.pop(key, None)), known)


def _view(x: Tensor) -> _View | None:
    """The description of a tensor that is a view of a noted one."""
    known = _KNOWN.get(storage_key(x.untyped_storage())) if _KNOWN and x.layout == torch.strided else None
    return None if known is None else _View(known[1], x.shape, x.stride(), x.storage_offset())


@contextlib.contextmanager
def noted_afterwards() -> Iterator[None]:
    """Tensors saved inside are packed when it closes: an operator saves its own result before that can be noted."""
    global _SLOTS
    slots: list[_Slot] = []
    _SLOTS = slots
    try:
        yield
    finally:
        _SLOTS = None
        for slot in slots:
            assert isinstance(slot.packed, Tensor)
            slot.packed = _packed(slot.packed)


def _pack(x: Tensor) -> Tensor | _View | _Slot | PackedTensor:
    if _SLOTS is None:
        return _packed(x)
    _SLOTS.append(_Slot(x))
    return _SLOTS[-1]


def _packed(x: Tensor) -> Tensor | _View | PackedTensor:
    found = _view(x)
    if found is None:
        return x if _KEEPER is None else _KEEPER.keep(x)
    found.of.keep(x)
    found.of.used()
    if _KEEPER is not None:
        _KEEPER.note(found.of)
    return found


def _unpack(packed: Tensor | _View | _Slot | PackedTensor) -> Tensor:
    if isinstance(packed, _Slot):
        packed = packed.packed
    if isinstance(packed, Tensor):
        return packed
    if isinstance(packed, _View):
        return packed.of.take().as_strided(packed.shape, packed.stride, packed.offset)
    return packed.take()


@contextlib.contextmanager
def saving(keeper: SavedTensorHook | None = None) -> Iterator[None]:
    """While it is open, forward passes save the inputs of noted tensors instead of these; a `keeper` may keep the other tensors."""
    global _OPEN, _KEEPER
    _OPEN += 1
    _KEEPER, before = keeper, _KEEPER
    try:
        with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
            yield
    finally:
        _OPEN -= 1
        _KEEPER = before
