"""From the training layout to the rollout layout: which ranks form an engine, which shard of the weights each rank holds, and which
rank sends it what before a round. No torch; the trainer follows these lists, and the plan counts them.

An engine is sharded like the trainer: its tensor ranks, its pipeline ranks and the ranks that its experts are spread over form one
engine, and the remaining ranks form more engines. Data and context ranks hold shards of what an engine's rank needs, tensor ranks
may shard experts differently, and a server's pipeline begins at its last rank. So weights are sent between ranks, each box of a
parameter only to the ranks that need it. A matrix with adapters is merged from its parts on the rank that receives them.

Where no server supports such a layout, each rank has an engine of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from shardwise.plan.cost.stages import layers_of_stages
from shardwise.plan.serving.pool import served_layers
from shardwise.run import LayoutConfig, Run
from shardwise.run.derive import shard_dim
from shardwise.run.parameters import (
    Cut,
    factors_of,
    find_parameter,
    first_parameters,
    last_parameters,
    layer_parameters,
    magnitude_of,
    scales_of,
)
from shardwise.run.ranks.boxes import Box, box_of
from shardwise.run.ranks.coordinates import RankCoordinates
from shardwise.run.ranks.served import ServingRank
from shardwise.run.rules.check import serving_rules
from shardwise.run.sections.adapter import NF4_BLOCK


def rollout_layout(run: Run) -> LayoutConfig:
    """The layout of the engines that generate a run's rollouts, on the ranks that train it; each `replicate` is an engine."""
    return next(layout for layout in _layouts(run) if _is_served(run, layout))


def _layouts(run: Run) -> Iterator[LayoutConfig]:
    """Layouts from the most sharded one to the one with the whole network on every rank."""
    lay = run.layout

    def engines(tensor: int, pipeline: int, data: int, expert: int) -> LayoutConfig:
        replicate = lay.world // (tensor * pipeline * data)
        stages = lay.stages if len(lay.stages) == pipeline else ()
        return LayoutConfig(
            replicate=replicate, tensor=tensor, pipeline=pipeline, shard=data, expert=expert, stages=stages
        )

    data = lay.expert if run.model.experts else 1
    for pipeline in dict.fromkeys((lay.pipeline, 1)):
        for expert in (data, data * lay.tensor):  # shards of each expert over the tensor ranks, or whole experts
            yield engines(lay.tensor, pipeline, data, expert)
    yield LayoutConfig(replicate=lay.world)


def _is_served(run: Run, layout: LayoutConfig) -> bool:
    """Whether a server supports this layout, with layers in every stage."""
    served = replace(run, layout=layout)
    broken = (rule for rule in serving_rules(served) if rule.broken and rule.key.startswith("layout."))
    return next(broken, None) is None and all(map(len, served_layers(served)))


def is_whole(run: Run) -> bool:
    """Whether every rank trains unsharded parameters, which its engine can read in place."""
    return run.layout.world == run.layout.replicate and not run.layout.offload


@dataclass(frozen=True)
class Part:
    """A trained parameter that an engine's matrix is built from, and the box of it that is needed."""

    name: str
    box: Box


def parts_of(run: Run, name: str, box: Box) -> list[Part]:
    """The parts that a box of a parameter is built from: the parameter itself, or its quantized codes, scales and adapters. DoRA
    needs whole rows, since it sets their length, and codes come in blocks; where a box cuts rows or blocks, a larger box is built
    (`made_box`)."""
    entry = find_parameter(run.model, name, run.adapter)
    if not entry.adapted and not entry.dtype:
        return [Part(name, box)]
    made = made_box(run, name, box)
    (*at, row, column), (*stack, rows, columns) = made.offset, made.size

    def part(of: str, *spans: tuple[int, int]) -> Part:
        starts, sizes = zip(*spans, strict=True)
        return Part(of, Box((*at, *starts), (*stack, *sizes)))

    found = [part(name, (row, rows), (column // entry.packed, columns // entry.packed))]
    if entry.dtype:
        first, second = scales_of(name)
        found.append(part(first, (row, rows), (column // NF4_BLOCK, columns // NF4_BLOCK)))
        if run.adapter.double_quantization:
            found.append(part(second, (0, find_parameter(run.model, second, run.adapter).shape[-1])))
    if entry.adapted:
        a, b = factors_of(name)
        rank = run.adapter.rank
        found += [part(a, (0, rank), (column, columns)), part(b, (row, rows), (0, rank))]
        if run.adapter.kind == "dora":
            found.append(part(magnitude_of(name), (row, rows)))
    return found


def made_box(run: Run, name: str, box: Box) -> Box:
    """The box of a matrix that is built from its parts, which contains the needed `box`."""
    entry = find_parameter(run.model, name, run.adapter)
    cuts_blocks = entry.packed > 1 and (box.offset[-1] % NF4_BLOCK or box.size[-1] % NF4_BLOCK)
    if cuts_blocks or (entry.adapted and run.adapter.kind == "dora"):
        return Box((*box.offset[:-1], 0), (*box.size[:-1], entry.packed * entry.shape[-1]))
    return box


def needed(run: Run, stage: int | None = None) -> list[str]:
    """The names of the network's parameters, in order: of the whole network, or of a stage of the engine."""
    model, layout = run.model, rollout_layout(run)
    layers = range(model.layers) if stage is None else served_layers(replace(run, layout=layout))[stage]
    last = stage is None or stage == layout.pipeline - 1
    outer = (
        first_parameters(model) if not stage else first_parameters(model)[:1] if last and model.tied_embeddings else ()
    )
    found = [entry.name for entry in outer]
    for layer in layers:
        found += [f"layers.{layer}.{entry.name}" for entry in layer_parameters(model, model.is_moe(layer))]
    return found + [entry.name for entry in last_parameters(model) if last]


def stage_of(run: Run, name: str) -> int:
    """The stage of the trainer's pipeline that holds a parameter or buffer."""
    ranges = layers_of_stages(run)
    if not name.startswith("layers."):
        return 0 if name.startswith(("embed.", "positions.")) else run.layout.distinct_stages - 1
    layer = int(name.split(".")[1])
    return next(number for number, layers in enumerate(ranges) if layer in layers)


@dataclass(frozen=True)
class WeightSync:
    """The weights that one rank sends and receives so that the engines of its trainer replica have theirs."""

    run: Run
    rank: int

    @cached_property
    def layout(self) -> LayoutConfig:
        """The layout of the engines."""
        return rollout_layout(self.run)

    @cached_property
    def members(self) -> list[int]:
        """The ranks of the trainer's replica."""
        return RankCoordinates(self.run.layout, self.rank).replica_members()

    @cached_property
    def _names(self) -> list[frozenset[str]]:
        """The parameter names of each stage of the engine."""
        return [frozenset(needed(self.run, stage)) for stage in range(self.layout.pipeline)]

    @cached_property
    def _places(self) -> dict[int, RankCoordinates]:
        return {rank: RankCoordinates(self.run.layout, rank) for rank in self.members}

    @property
    def stage(self) -> int:
        """The stage of the engine that is on this rank."""
        return ServingRank(self.layout, self.rank).stage

    def home(self, name: str) -> int:
        """The pipeline index of the ranks that train a parameter or buffer."""
        return self.run.layout.placement[stage_of(self.run, name)]

    def first_at_home(self, name: str) -> int:
        """The first member that trains a parameter or buffer."""
        home = self.home(name)
        return next(rank for rank, at in self._places.items() if at.index("pipeline") == home)

    def box(self, name: str, rank: int) -> Box | None:
        """The box of a parameter that a rank's engine holds; None where its stage does not have the parameter."""
        place = ServingRank(self.layout, rank)
        if name not in self._names[place.stage]:
            return None
        return Box(*place.box(find_parameter(self.run.model, name)))

    def parts(self, name: str) -> Iterator[tuple[str, dict[int, Box]]]:
        """The parts of a parameter, one after the other, each with the box that every rank needs of it."""
        wanted: dict[str, dict[int, Box]] = {}
        for rank in self.members:
            box = self.box(name, rank)
            for part in parts_of(self.run, name, box) if box is not None and box.numel else ():
                wanted.setdefault(part.name, {})[rank] = part.box
        yield from wanted.items()

    def held(self, part: str) -> dict[Box, list[int]]:
        """The boxes of a parameter that the trainer holds, each with the members that hold it."""
        home = self.home(part)
        found: dict[Box, list[int]] = {}
        for rank, at in self._places.items():
            if at.index("pipeline") == home and (box := self._trained_box(part, at)).numel:
                found.setdefault(box, []).append(rank)
        return found

    def moves(self, part: str, wanted: dict[int, Box]) -> Moves:
        """What this rank sends and receives of a part. A rank that holds a box uses its own copy; otherwise one of the holders
        sends it, and the holders take turns."""
        here = self.rank
        sent: dict[int, Box] = {}
        received: dict[int, Box] = {}
        travels = False
        held = self.held(part)
        for turn, (rank, box) in enumerate(wanted.items()):
            for known, holders in held.items():
                common = known.common(box)
                if common is None:
                    continue
                source = rank if rank in holders else holders[turn % len(holders)]
                travels = travels or source != rank
                if source == here:
                    sent[rank] = common
                if rank == here:
                    received[source] = common
        own = next((box for box, holders in held.items() if here in holders), None)
        return Moves(part, own, wanted.get(here), sent, received, travels)

    def _width(self, name: str, part: str, widths: dict[str, int], width: int) -> int:
        entry = find_parameter(self.run.model, part, self.run.adapter)
        return widths[entry.dtype] if entry.dtype else part_width(self.run, name, part, width)

    def sent_bytes(self, widths: dict[str, int], width: int) -> int:
        """Bytes that this rank sends to others before a round. `width`: bytes of the compute dtype; `widths`: of integers."""
        total = 0
        for name in needed(self.run):
            for part, wanted in self.parts(name):
                moved = self.moves(part, wanted).sent.items()
                each = self._width(name, part, widths, width)
                total += each * sum(box.numel for rank, box in moved if rank != self.rank)
        return total

    def received_bytes(self, widths: dict[str, int], width: int) -> list[int]:
        """Bytes that this rank receives from others, for each parameter that its engine needs."""
        found = []
        for name in needed(self.run, self.stage):
            box = self.box(name, self.rank)
            for part in parts_of(self.run, name, box) if box is not None and box.numel else ():
                own = sum(common.numel for common in map(part.box.common, self._trained(part.name)) if common)
                found.append(self._width(name, part.name, widths, width) * (part.box.numel - own))
        return found

    def _trained(self, part: str) -> list[Box]:
        """The boxes of a parameter that this rank trains."""
        at = RankCoordinates(self.run.layout, self.rank)
        return [self._trained_box(part, at)] if at.index("pipeline") == self.home(part) else []

    def _trained_box(self, part: str, at: RankCoordinates) -> Box:
        run = self.run
        entry = find_parameter(run.model, part, run.adapter)
        cuts, axis = entry.cuts(run.layout), "expert_shard" if entry.routed else "zero"
        inner = box_of(entry.shape, cuts, at).size
        shard = Cut(axis, shard_dim(inner, at.size(axis)) if entry.routed else 0)
        return box_of(entry.shape, (*cuts, shard), at)


@dataclass(frozen=True)
class Moves:
    """The boxes of a parameter that a rank sends and receives, by the other rank; in coordinates of the unsharded parameter."""

    name: str
    held: Box | None
    """The box that the rank holds itself."""
    wanted: Box | None
    sent: dict[int, Box]
    received: dict[int, Box]
    travels: bool
    """Whether anything is sent from one rank to another; the same on all members."""


def part_width(run: Run, name: str, part: str, width: int) -> int:
    """Bytes per element of a part as it is sent: those of the compute dtype, but at least 4 for a part that is used or merged
    before rounding."""
    entry = find_parameter(run.model, part, run.adapter)
    learned = run.model.position == "learned" and entry.owner == "embedding"
    exact = part != name or learned or (entry.owner == "router" and part.endswith("router.weight"))
    return max(4, width) if exact else width
