"""The weights for rollouts: those being trained, as a network that the engine can run.

If a rank trains unsharded parameters (one device, or replicas), the engine's network is built over the trainer's own tensors: the
parameters, or the 16-bit copies that its GEMMs use. Nothing is held twice, and the engine sees an optimizer step at once. Only
parameters that the trainer keeps in a higher precision than its compute dtype, without a copy in that dtype, are cast into tensors
of the engine's own.

On any other layout the engine is sharded over ranks too, and its weights are resharded before each rollout: every rank of a replica
sends the parts of its shards that others need, in one all-to-all for each parameter (`plan/serving/weight_sync.py` lists which rank
needs what). A rank receives its shard of the engine's weights, less the parts it trains itself.

Adapters are merged into matrices of the engine's own, in float32 or higher and rounded once; 4-bit matrices are dequantized to the
compute dtype. Matrices are built one at a time, so the temporaries need no more memory than training does at its peak.
"""

from __future__ import annotations

from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.model.adapters import row_lengths
from shardwise.model.invariant.network import read_exactly
from shardwise.model.quantized.nf4 import slice_of_matrix
from shardwise.model.transformer import Transformer, make_stage
from shardwise.parallel.inference import Peers, build_share
from shardwise.parallel.local_parameter import leaves, local
from shardwise.plan.serving.pool import served_layers
from shardwise.plan.serving.rollouts import as_served
from shardwise.plan.serving.weight_sync import Moves, WeightSync, is_whole, made_box, needed
from shardwise.run.parameters import factors_of, find_parameter, magnitude_of, scales_of
from shardwise.run.ranks.boxes import Box
from shardwise.run.sections.adapter import NF4_BLOCK
from shardwise.torch_private import is_persistent
from shardwise.train.step import TrainState

GROUP = "rollout"
"""The name of the process group of the ranks that train one network together."""


class RolloutWeights:
    """The engine's network, or this rank's shard of it, and how it gets the trainer's values."""

    def __init__(self, state: TrainState, owns: bool = False) -> None:
        """`owns`: copy every tensor, so that training may continue while the engine samples. All ranks must construct this
        together."""
        self.state, run = state, state.run
        self.held = {each.name: each for each in state.parallel.parameters if not each.copy_of_other_stage}
        self.dtype = state.dtype
        self.sync = WeightSync(run, state.mesh.rank)
        layout = self.sync.layout
        self.peers = Peers(layout, run.serve.invariant) if layout.world > layout.replicate else None
        """The other ranks of this engine, if there are any."""
        self.shares = is_whole(run) and not owns
        self.copied: dict[str, Tensor] = {}
        """The engine's own tensors, by parameter name."""
        self.buffers: dict[str, Tensor] = {}
        self.model = self._build()
        for name, owner, leaf, buffer in _buffers(self.model):
            owner.register_buffer(leaf, self._buffer(name, buffer), persistent=is_persistent(owner, leaf))
        self.model.eval()
        state.mesh.add_group(GROUP, self.sync.members)

    def _build(self) -> Transformer:
        run, device = self.state.run, self.state.device
        if self.peers is not None:
            layers = served_layers(as_served(run))
            return build_share(run.model, self.dtype, layers, self.peers, device, self._share)
        model = make_stage(run.model, self.dtype, range(run.model.layers), True, True)
        for name, owner, leaf, held in leaves(model):
            if isinstance(held, nn.Parameter):
                owner.register_parameter(leaf, nn.Parameter(self._tensor(name, held.shape), requires_grad=False))
        return model

    def _share(self, name: str, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        """As `_tensor`, for a slice of a parameter, and for buffers."""
        known = name in self._names
        return self._tensor(name, size) if known else torch.zeros(size, device=self.state.device)

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(needed(self.state.run))

    @cached_property
    def _moves(self) -> dict[str, list[Moves]]:
        """For every parameter of the network, the moves of the tensors it is built from."""
        sync = self.sync
        return {
            name: [sync.moves(part, wanted) for part, wanted in sync.parts(name)] for name in needed(self.state.run)
        }

    @cached_property
    def _every_buffer(self) -> list[tuple[str, Tensor]]:
        """The buffers of the whole network, without memory."""
        run = self.state.run
        network = make_stage(run.model, self.dtype, range(run.model.layers), True, True)
        return [(name, buffer) for name, _, _, buffer in _buffers(network)]

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The trainer's own tensor, or a new one to be filled."""
        held = self.held.get(name)
        exact = read_exactly(self.state.run.model, name)
        if self.shares and held is not None and not held.entry.adapted and not held.entry.dtype:
            if held.compute_copy is not None and not exact:
                return held.compute_copy.tensor.detach()
            if held.parameter.dtype == self.dtype or exact:
                return held.parameter.detach()
        self.copied[name] = torch.empty(shape, dtype=self._kept_dtype(exact), device=self.state.device)
        return self.copied[name]

    def _kept_dtype(self, exact: bool) -> torch.dtype:
        high = torch.float64 if self.dtype == torch.float64 else torch.float32
        return high if exact else self.dtype

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        """A buffer of the engine: a router's selection bias, which every rank of a stage has unsharded."""
        found = self._trained_buffers()
        if self.shares and name in found:
            return found[name]
        self.buffers[name] = torch.zeros(like.shape, dtype=like.dtype, device=self.state.device)
        return self.buffers[name]

    def _trained_buffers(self) -> dict[str, Tensor]:
        return {full: b for model in self.state.parallel.models for full, _, _, b in _buffers(model)}

    def follow(self, model: Transformer) -> None:
        """The engine has concatenated matrices in its own memory, and its parameters became views of it. Make the trainer's compute
        copies those views too, so that each exists only once again."""
        for name, parameter in model.named_parameters():
            held = self.held.get(name)
            if self.shares and held is not None and held.compute_copy is not None:
                copy = held.compute_copy.tensor
                if copy.data_ptr() != parameter.data_ptr():
                    copy.data = parameter.detach()
        tensors = dict(model.named_parameters())
        self.copied = {name: tensors[name].detach() for name in self.copied}

    @torch.no_grad()
    def update(self) -> None:
        """Update the network to the trainer's values. Every rank calls it. An asynchronous pipeline first finishes its passes in
        flight, so that all stages have made the same updates."""
        self.state.drain()
        self.state.refresh()
        if is_whole(self.state.run):
            for name, target in self.copied.items():
                parts = {part: local(self.held[part].parameter) for part, _ in self.sync.parts(name)}
                self._fill(name, target, Box((0,) * target.ndim, tuple(target.shape)), parts)
        else:
            for name, moved in self._moves.items():
                received = {moves.name: self._receive(name, moves) for moves in moved}
                box = self.sync.box(name, self.state.mesh.rank)
                if box is not None and box.numel:
                    self._fill(name, self.copied[name], box, {part: x for part, x in received.items() if x is not None})
        self._update_buffers()

    def _receive(self, name: str, moves: Moves) -> Tensor | None:
        """Receive this rank's box of one of the tensors from the ranks that hold it; every member takes part. None if it needs no
        part of the tensor."""
        entry = find_parameter(self.state.run.model, moves.name, self.state.run.adapter)
        exact = moves.name != name or read_exactly(self.state.run.model, name)
        dtype = getattr(torch, entry.dtype) if entry.dtype else self._kept_dtype(exact)
        device, rank, members = self.state.device, self.state.mesh.rank, self.sync.members
        mine: dict[int, Tensor] = {}
        if moves.sent:
            assert moves.held is not None
            held = local(self.held[moves.name].parameter)
            mine = {to: narrowed(held, box.within(moves.held)) for to, box in moves.sent.items()}
        found = {rank: mine[rank]} if rank in mine else {}
        if moves.travels:
            nothing = torch.empty(0, dtype=dtype, device=device)
            sent = [mine[to].to(device, dtype).flatten() if to in mine else nothing for to in members]
            counts = [moves.received[source].numel if source in moves.received else 0 for source in members]
            into = torch.empty(sum(counts), dtype=dtype, device=device)
            group = self.state.mesh.group(GROUP)
            dist.all_to_all_single(into, torch.cat(sent), counts, [len(x) for x in sent], group=group)
            found = dict(zip(members, into.split(counts), strict=True))
        if moves.wanted is None:
            return None
        made = torch.empty(moves.wanted.size, dtype=dtype, device=device)
        for source, box in moves.received.items():
            narrowed(made, box.within(moves.wanted)).copy_(found[source].reshape(box.size))
        return made

    def _fill(self, name: str, target: Tensor, box: Box, parts: dict[str, Tensor]) -> None:
        """Fill a tensor of the engine: with a parameter's values, or by dequantizing and merging the tensors it is built from."""
        run, base = self.state.run, parts[name]
        entry = find_parameter(run.model, name, run.adapter)
        if not entry.adapted and not entry.dtype:
            target.copy_(base)
            return
        made = made_box(run, name, box)
        if entry.dtype:
            stride = entry.shape[-1] * entry.packed // NF4_BLOCK
            first = made.offset[-2] * stride + made.offset[-1] // NF4_BLOCK
            absmax, scales = (parts.get(each) for each in scales_of(name))
            base = slice_of_matrix(base, absmax, scales, (first, stride), self.dtype)
        if entry.adapted:
            a, b = (parts[each] for each in factors_of(name))
            base = base.to(a.dtype).add(b @ a, alpha=run.adapter.scale)
            magnitude = parts.get(magnitude_of(name))
            if magnitude is not None:
                base.mul_((magnitude / row_lengths(base))[..., None])
        target.copy_(narrowed(base, box.within(made)))

    def _update_buffers(self) -> None:
        """Update the routers' buffers, from a rank that trains them."""
        found, group = self._trained_buffers(), self.state.mesh.group(GROUP)
        if is_whole(self.state.run) or group is None:
            for name, tensor in self.buffers.items():
                tensor.copy_(found[name])
            return
        for name, like in self._every_buffer:
            if name in found:
                sent = found[name].to(self.state.device, copy=True)
            else:
                sent = torch.empty(like.shape, dtype=like.dtype, device=self.state.device)
            dist.broadcast(sent, self.sync.first_at_home(name), group=group)
            if name in self.buffers:
                self.buffers[name].copy_(sent)


def narrowed(x: Tensor, box: Box) -> Tensor:
    """A view of a tensor's box."""
    for dim, (start, length) in enumerate(zip(box.offset, box.size, strict=True)):
        x = x.narrow(dim, start, length)
    return x


def _buffers(model: nn.Module) -> list[tuple[str, nn.Module, str, Tensor]]:
    """Every buffer: its full name, the module that holds it, its name in that module, and its tensor."""
    return [
        (f"{path}.{leaf}" if path else leaf, owner, leaf, buffer)
        for path, owner in model.named_modules()
        for leaf, buffer in owner.named_buffers(recurse=False)
    ]
