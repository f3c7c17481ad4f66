"""The weights that answers are made with: those being trained, as a network that the engine can run.

Where a rank holds whole parameters (one device, or replicas), the engine's network is built over the trainer's own tensors: the
parameters, or the 16-bit copies that its GEMMs use. Nothing is held twice, and an optimizer's step is seen at once. Only what the
trainer keeps in higher precision than it computes in, and has no copy of, is cast into tensors of the engine's own.

Adapters are merged into matrices of the engine's own, in float32 or higher and rounded once; matrices of 4 bits are there as GEMMs
take them.

Any other layout is laid anew before answers are made: every rank gets the whole network, each box of a parameter broadcast by one
of the ranks that hold it, among the ranks of a replica. That moves the bytes of the network once to each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.model.adapters import row_lengths
from shardwise.model.invariant.network import read_exactly
from shardwise.model.quantized.nf4 import whole_matrix
from shardwise.model.transformer import Transformer, make_stage
from shardwise.parallel.local_parameter import Box, box_of, local
from shardwise.plan.cost.flops import layers_of_stages
from shardwise.run import AdapterConfig, ModelConfig, Run
from shardwise.run.coordinates import RankCoordinates
from shardwise.run.derive import shard_dim
from shardwise.run.parameters import Cut, factors_of, find_parameter, magnitude_of, scales_of
from shardwise.torch_private import is_persistent
from shardwise.train.step import TrainState

GROUP = "rollout"
"""The process group of the ranks that hold a network together."""


@dataclass(frozen=True)
class Piece:
    """A box of a parameter, and the rank that gives it to the others."""

    name: str
    box: Box
    rank: int


class RolloutWeights:
    """The engine's network, and how it comes to the trainer's values."""

    def __init__(self, state: TrainState, owns: bool = False) -> None:
        """`owns`: hold every tensor, so that training may go on while answers are made. Every rank makes one at the same time."""
        self.state, run = state, state.run
        self.held = {each.name: each for each in state.parallel.parameters if not each.copy_of_other_stage}
        self.dtype = state.dtype
        whole = run.layout.world == run.layout.replicate and not run.layout.offload
        self.shares = whole and not owns
        self.copied: list[tuple[str, Tensor]] = []
        self.parts: dict[str, dict[str, Tensor | None]] = {}
        """Of each matrix that is made of several parameters, these by name: adapters, codes of 4 bits. Where the trainer has them
        whole there is no tensor for them here."""
        self.whole = whole
        self.buffers: list[tuple[str, Tensor]] = []
        self.model = make_stage(run.model, state.dtype, range(run.model.layers), True, True)
        for name, owner, leaf, parameter in _leaves(self.model):
            owner.register_parameter(leaf, nn.Parameter(self._tensor(name, parameter), requires_grad=False))
        for name, owner, leaf, buffer in _buffers(self.model):
            owner.register_buffer(leaf, self._buffer(name, buffer), persistent=is_persistent(owner, leaf))
        self.model.eval()
        self.pieces: list[Piece] = []
        if not whole:
            self.pieces = list(pieces_of(run, state.mesh.coordinates, list(self._targets()), state))
            members = [r for r in range(run.layout.world) if _replica(run, r) == _replica(run, state.mesh.rank)]
            state.mesh.add_group(GROUP, members)

    def _tensor(self, name: str, like: Tensor) -> Tensor:
        """The trainer's own tensor, or a new one to be filled."""
        held = self.held.get(name)
        exact = read_exactly(self.state.run.model, name)
        if self.shares and held is not None and not held.entry.adapted and not held.entry.dtype:
            if held.compute_copy is not None and not exact:
                return held.compute_copy.tensor.detach()
            if held.parameter.dtype == self.dtype or exact:
                return held.parameter.detach()
        dtype = self._kept_dtype(exact)
        made = torch.empty(like.shape, dtype=dtype, device=self.state.device)
        self.copied.append((name, made))
        model, adapter = self.state.run.model, self.state.run.adapter
        if parts := parts_of(name, model, adapter):
            self.parts[name] = {each: None if self.whole else self._part(each) for each in parts}
        return made

    def _part(self, name: str) -> Tensor:
        entry = find_parameter(self.state.run.model, name, self.state.run.adapter)
        dtype = getattr(torch, entry.dtype) if entry.dtype else self._kept_dtype(exact=True)
        return torch.empty(entry.shape, dtype=dtype, device=self.state.device)

    def _targets(self) -> dict[str, Tensor]:
        """Tensors to be filled, by the name of the parameter that they are of."""
        found = {name: tensor for name, tensor in self.copied if name not in self.parts.get(name, ())}
        for parts in self.parts.values():
            found |= {name: tensor for name, tensor in parts.items() if tensor is not None}
        return found

    def _kept_dtype(self, exact: bool) -> torch.dtype:
        high = torch.float64 if self.dtype == torch.float64 else torch.float32
        return high if exact else self.dtype

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        """The routers' selection biases, which every rank of a stage has whole."""
        found = {full: b for model in self.state.parallel.models for full, _, _, b in _buffers(model)}
        if self.shares and name in found:
            return found[name]
        made = torch.zeros(like.shape, dtype=like.dtype, device=self.state.device)
        self.buffers.append((name, made))
        return made

    def follow(self, model: Transformer) -> None:
        """The engine has joined matrices in memory of its own, of which its parameters became views: let the trainer's copies be
        those views, so that there is one of each again."""
        for name, parameter in model.named_parameters():
            held = self.held.get(name)
            if self.shares and held is not None and held.compute_copy is not None:
                copy = held.compute_copy.tensor
                if copy.data_ptr() != parameter.data_ptr():
                    copy.data = parameter.detach()
        tensors = dict(model.named_parameters())
        self.copied = [(name, tensors[name].detach()) for name, _ in self.copied]

    @torch.no_grad()
    def update(self) -> None:
        """Bring the network to the trainer's values. Every rank calls it."""
        self.state.refresh()
        targets = self._targets()
        if not self.pieces:
            for name, tensor in targets.items():
                tensor.copy_(local(self.held[name].parameter))
        group = self.state.mesh.group(GROUP)
        for piece in self.pieces:
            target = targets[piece.name]
            for dim, (start, length) in enumerate(zip(piece.box.offset, piece.box.size, strict=True)):
                target = target.narrow(dim, start, length)
            mine = piece.rank == self.state.mesh.rank
            sent = torch.empty(piece.box.size, dtype=target.dtype, device=target.device)
            if mine:
                sent.copy_(local(self.held[piece.name].parameter))
            if group is not None:
                dist.broadcast(sent, piece.rank, group=group)
            target.copy_(sent)
        tensors = dict(self.copied)
        for name, parts in self.parts.items():
            here = {each: local(self.held[each].parameter) if t is None else t for each, t in parts.items()}
            tensors[name].copy_(self._made(name, tensors[name], here))
        self._update_buffers(group)

    def _made(self, name: str, base: Tensor, parts: dict[str, Tensor]) -> Tensor:
        """A matrix of its parts; `base` has the values of one that is not kept in 4 bits."""
        adapter = self.state.run.adapter
        if name in parts:
            absmax, scales = (parts.get(each) for each in scales_of(name))
            base = whole_matrix(parts[name], absmax, scales, self.dtype)
        a, b = (parts.get(each) for each in factors_of(name))
        if a is None or b is None:
            return base
        merged = base.to(a.dtype).add_(b @ a, alpha=adapter.scale)
        magnitude = parts.get(magnitude_of(name))
        return merged if magnitude is None else merged.mul_((magnitude / row_lengths(merged))[..., None])

    def _update_buffers(self, group: dist.ProcessGroup | None) -> None:
        found = {full: b for model in self.state.parallel.models for full, _, _, b in _buffers(model)}
        for name, tensor in self.buffers:
            if name in found:
                tensor.copy_(found[name])
            if group is not None:
                stage = _stage_of(self.state.run, name)
                home = self.state.parallel.pipeline.schedule.placement[stage]
                dist.broadcast(tensor, _first_rank(self.state.run, self.state.mesh.rank, home), group=group)


def _replica(run: Run, rank: int) -> int:
    return RankCoordinates(run.layout, rank).index("replicate")


def _first_rank(run: Run, rank: int, home: int) -> int:
    """The first rank of a replica that holds the stages of a pipeline rank."""
    members = [r for r in range(run.layout.world) if _replica(run, r) == _replica(run, rank)]
    return next(r for r in members if RankCoordinates(run.layout, r).index("pipeline") == home)


def _stage_of(run: Run, name: str) -> int:
    """The stage of the pipeline that holds a parameter or buffer."""
    ranges = layers_of_stages(run)
    if not name.startswith("layers."):
        return 0 if name.startswith(("embed.", "positions.")) else run.layout.distinct_stages - 1
    layer = int(name.split(".")[1])
    return next(number for number, layers in enumerate(ranges) if layer in layers)


def pieces_of(run: Run, here: RankCoordinates, wanted: Iterable[str], state: TrainState) -> Iterator[Piece]:
    """The boxes that make up parameters, each with the first rank of this replica that holds it; the same list on all of them."""
    placement = state.parallel.pipeline.schedule.placement
    members = [RankCoordinates(run.layout, r) for r in range(run.layout.world)]
    members = [each for each in members if each.index("replicate") == here.index("replicate")]
    for name in wanted:
        entry, home = find_parameter(run.model, name, run.adapter), placement[_stage_of(run, name)]
        cuts = entry.cuts(run.layout)
        known: set[Box] = set()
        for each in members:
            if each.index("pipeline") != home:
                continue
            axis = "expert_shard" if entry.routed else "zero"
            inner = box_of(entry.shape, cuts, each).size
            shard = Cut(axis, shard_dim(inner, each.size(axis)) if entry.routed else 0)
            box = box_of(entry.shape, (*cuts, shard), each)
            if box not in known and all(box.size):
                known.add(box)
                yield Piece(name, box, each.rank)


def parts_of(matrix: str, model: ModelConfig, adapter: AdapterConfig) -> list[str]:
    """The parameters that a matrix is made of, where it is more than itself."""
    entry = find_parameter(model, matrix, adapter)
    found = list(factors_of(matrix)) if entry.adapted else []
    if entry.adapted and adapter.kind == "dora":
        found.append(magnitude_of(matrix))
    if entry.dtype:
        found += [matrix, *scales_of(matrix)[: 2 if adapter.double_quantization else 1]]
    return found


def _leaves(model: nn.Module) -> list[tuple[str, nn.Module, str, Tensor]]:
    """Every parameter: its full name, the module that holds it, its name there."""
    return [
        (f"{path}.{leaf}" if path else leaf, owner, leaf, parameter)
        for path, owner in model.named_modules()
        for leaf, parameter in owner.named_parameters(recurse=False)
    ]


def _buffers(model: nn.Module) -> list[tuple[str, nn.Module, str, Tensor]]:
    return [
        (f"{path}.{leaf}" if path else leaf, owner, leaf, buffer)
        for path, owner in model.named_modules()
        for leaf, buffer in owner.named_buffers(recurse=False)
    ]
