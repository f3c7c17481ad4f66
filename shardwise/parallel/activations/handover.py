"""BPipe's handovers (Kim et al. 2023): the saved tensors of a microbatch go to the partner rank and come back for the backward
pass.

While a microbatch that will be evicted goes forward, autograd saves placeholders instead of tensors. To evict is to copy the
storages behind the placeholders into one message, of bytes, and to free them; to load is to point the placeholders into the message
that came back. Parameters, buffers and the batch stay where they are. The output that went to the next stage is not needed any
more.

Traffic: per microbatch handed over, one message to the partner and one back, of its saved tensors without its output. The partner
must know the size beforehand: the size is sent before the first message for a batch of new shapes. Where experts save tensors whose
sizes depend on how tokens are routed, it is sent before every message, and the partner waits for it at the transfer in its list.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.parallel.activations.saving import Recomputable
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.p2p import irecv, isend
from shardwise.parallel.rendezvous import group_of
from shardwise.schedules import Action, Schedule
from shardwise.torch_private import is_fake, storage_key
from shardwise.torch_private.fully_shard import gathered_tensors, local_shard, sharded_groups

Key = tuple[int, int]
"""Stage and microbatch."""


class SavedTensor:
    """Holds a tensor that autograd saved; the code that evicts it refers to it weakly."""

    __slots__ = ("__weakref__", "learns", "tensor")

    def __init__(self, x: Tensor) -> None:
        self.tensor, self.learns = x.detach(), x.requires_grad

    def take(self) -> Tensor:
        """The tensor; it requires a gradient where the saved one did, for what is recomputed from it."""
        return self.tensor.detach().requires_grad_() if self.learns else self.tensor


@dataclass
class _Part:
    """A tensor in a message: where its storage begins there, and its layout within the storage."""

    place: SavedTensor | Recomputable
    input: int
    """Which input it is, where `place` is a tensor that is recomputed."""
    first: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass
class SavedMicrobatch:
    """The tensors that the forward pass of a microbatch saved."""

    places: list[weakref.ref[Any]] = field(default_factory=list)
    parts: list[_Part] = field(default_factory=list)

    def keep(self, x: Tensor) -> Tensor | SavedTensor:
        """The placeholder that autograd saves instead of a tensor."""
        if isinstance(x, nn.Parameter) or x.layout != torch.strided:
            return x
        place = SavedTensor(x)
        self.places.append(weakref.ref(place))
        return place

    def note(self, known: Recomputable) -> None:
        """Note a tensor that is recomputed: its inputs are handed over."""
        self.places += [weakref.ref(each) for each in known.made_of()]

    def _tensors(self) -> list[tuple[SavedTensor | Recomputable, int, Tensor]]:
        """The tensors saved now, each with its placeholder."""
        alive = {id(place): place for ref in self.places if (place := ref()) is not None}
        found: list[tuple[SavedTensor | Recomputable, int, Tensor]] = []
        for place in alive.values():
            if isinstance(place, SavedTensor):
                found.append((place, 0, place.tensor))
            else:
                found += [(place, n, x) for n, x in enumerate(place.inputs) if isinstance(x, Tensor)]
        return found

    def evict(self, stays: set[int]) -> Tensor:
        """Copy all storages but those that stay into one message, and free them."""
        tensors = self._tensors()
        storages: dict[int, Tensor] = {}
        for _, _, x in tensors:
            key = storage_key(x.untyped_storage())
            if key not in stays and key not in storages:
                storages[key] = x
        # Long elements first, so that each tensor is aligned in the message.
        order = sorted(storages.items(), key=lambda one: -one[1].itemsize)
        first, size = dict[int, int](), 0
        for key, x in order:
            first[key] = size
            size += x.untyped_storage().nbytes()
        device = order[0][1].device if order else torch.device("cpu")
        message = torch.empty(size, dtype=torch.uint8, device=device)
        for key, x in () if is_fake(message) else order:  # views of fake tensors would keep them alive
            storage = x.untyped_storage()
            whole = x.new_empty(0).set_(storage, 0, (storage.nbytes() // x.itemsize,), (1,))
            message[first[key] : first[key] + storage.nbytes()].copy_(whole.view(torch.uint8))
        for place, n, x in tensors:
            key = storage_key(x.untyped_storage())
            if key in first:
                self.parts.append(_Part(place, n, first[key], x.dtype, x.shape, x.stride(), int(x.storage_offset())))
                _set(place, n, x.new_empty(0))
        return message

    def load(self, message: Tensor) -> None:
        """Point the placeholders into the message that came back."""
        for part in self.parts:
            whole = message[: message.numel() // part.dtype.itemsize * part.dtype.itemsize].view(part.dtype)
            offset = part.first // part.dtype.itemsize + part.offset
            _set(part.place, part.input, whole.as_strided(part.shape, part.stride, offset))
        self.parts = []


def _set(place: SavedTensor | Recomputable, number: int, x: Tensor) -> None:
    if isinstance(place, SavedTensor):
        place.tensor = x
    else:
        place.inputs = (*place.inputs[:number], x, *place.inputs[number + 1 :])


def shrink(x: Tensor) -> None:
    """Free the values of a tensor of which only the place in the graph is still needed."""
    x.data = x.new_zeros(1).expand(x.shape)


def lasting(model: nn.Module, copies: Iterable[Tensor]) -> Iterator[Tensor]:
    """The tensors that a stage has for all microbatches: parameters, sharded and gathered, their copies, and buffers."""
    yield from map(local_shard, model.parameters())
    yield from model.buffers()
    yield from copies
    for _, group in sharded_groups(model):
        yield from gathered_tensors(group)


class Handover:
    """What this rank evicts to its partner and holds for it during one step."""

    def __init__(
        self,
        schedule: Schedule,
        mesh: Mesh,
        sizes: dict[Any, int],
        planned: Callable[[int], int],
        device: torch.device,
        varies: bool,
    ) -> None:
        """`varies`: whether microbatches of one shape may save different sizes, as experts do depending on routing."""
        self.varies, self.own_sizes = varies, dict[Key, int]()
        ranks, me = mesh.pipeline_ranks(), mesh.index("pipeline")
        self.me, self.device, self.sizes, self.planned = me, device, sizes, planned
        partner = len(ranks) - 1 - me
        self.partner = ranks[partner]
        self.out, self.back = group_of(mesh, me, partner), group_of(mesh, partner, me)
        self.evicted = {(a.stage, a.microbatch) for a in schedule.ranks[me] if a.kind == "E"}
        self.held: dict[Key, SavedMicrobatch] = {}
        self.arriving: dict[Key, tuple[Tensor, Any]] = {}
        """Messages from the partner: microbatches that it evicted, or own ones that come back."""
        self.loaded: dict[Key, Tensor] = {}
        self.sending: list[tuple[Tensor, Any]] = []

    def will_evict(self, action: Action) -> bool:
        """Whether the microbatch of this forward pass will be handed over."""
        return (action.stage, action.microbatch) in self.evicted

    def keeper(self, action: Action) -> SavedMicrobatch:
        """Collects all tensors that a forward pass saves, so that they can be handed over."""
        held = self.held[action.stage, action.microbatch] = SavedMicrobatch()
        return held

    def evict(self, key: Key, batch: Any, stays: Iterable[Tensor], ends: Iterable[Tensor]) -> None:
        """Start sending a microbatch's saved tensors. `stays` are tensors that others need too, `ends` its input and output in the
        graph."""
        message = self.held[key].evict({storage_key(x.untyped_storage()) for x in stays})
        for x in ends:
            shrink(x)
        shape = (key[0], *_shapes(batch))
        if not self.varies and self.sizes.get(shape, message.numel()) != message.numel():
            raise RuntimeError(
                f"a microbatch saved {message.numel()} bytes on stage {key[0]} and another of the same shape "
                f"{self.sizes[shape]}: the partner cannot know how much to receive; use another layout.schedule"
            )
        if self.varies or (shape not in self.sizes and not is_fake(message)):
            self._send(torch.tensor([message.numel()], device=self.device))
        self.sizes[shape] = self.own_sizes[key] = message.numel()
        self._send(message)

    def accept(self, key: Key, batch: Any) -> None:
        """Start receiving a microbatch that the partner evicts."""
        shape = (key[0], *_shapes(batch))
        if self.varies or shape not in self.sizes:
            size = torch.zeros(1, dtype=torch.int64, device=self.device)
            if not is_fake(size):
                irecv(size, self.partner, self.back).wait()
            self.sizes[shape] = self.planned(key[0]) if is_fake(size) else int(size.item())
        self._receive(key, self.sizes[shape])

    def give_back(self, key: Key) -> None:
        """Send a microbatch back to the partner that evicted it."""
        message, work = self.arriving.pop(key)
        work.wait()
        self._send(message)

    def load(self, key: Key) -> None:
        """Start receiving a microbatch that this rank had evicted."""
        self._receive(key, self.own_sizes.pop(key))

    def finish_load(self, key: Key) -> None:
        """Wait until a microbatch is back, if it was handed over."""
        held = self.held.pop(key, None)
        if held is not None:
            message, work = self.arriving.pop(key)
            work.wait()
            held.load(message)

    def finish_evictions(self) -> None:
        """Wait until evicted tensors have been sent: their memory is needed."""
        for _, work in self.sending:
            work.wait()
        self.sending = []

    def _send(self, x: Tensor) -> None:
        self.sending.append((x, isend(x, self.partner, group=self.out)))

    def _receive(self, key: Key, size: int) -> None:
        message = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.arriving[key] = (message, irecv(message, self.partner, group=self.back))

    def let_go(self) -> None:
        """Free the messages that have been sent."""
        self.sending = [(sent, work) for sent, work in self.sending if not work.is_completed()]


def _shapes(batch: Any) -> tuple[Any, ...]:
    return tuple((name, tuple(x.shape)) for name, x in sorted(batch.items()) if isinstance(x, Tensor))
