"""All layouts of a run on so many devices: the tables they share, and the groups in which they are screened."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from shardwise.plan.cost.constants import constants_of
from shardwise.plan.cost.job import Job, job_of
from shardwise.plan.search.screen import Group, Place
from shardwise.plan.search.space import LOOPED, Sizes, choices, plain, schedules, sizes
from shardwise.plan.search.tables import Cut, Layers, Shares, cut, cut_key, moved, workspace
from shardwise.plan.time.step import slowdown
from shardwise.run import LayoutConfig, Run
from shardwise.run.derive import compiles, planned_on_gpu

Array = Any


class Space:
    """All layouts of a run on so many devices, in groups, with the tables they share."""

    def __init__(self, run: Run, devices: int, per_node: int, most_microbatch: int = 0) -> None:
        self.devices, self.per_node = devices, per_node
        alone = replace(run, layout=LayoutConfig(replicate=devices, recompute=run.layout.recompute))
        # What may depend on the layout is settled before layouts are compared.
        compiled = compiles(alone, gpu=planned_on_gpu(run))
        self.run = run = replace(run, train=replace(run.train, compile=compiled))
        self.choices, self.plain = choices(run), plain(run.layout)
        found = sizes(run, devices, most_microbatch)
        self.schedules = {p: schedules(run, p) for p in np.unique(found.pipeline).tolist()}
        possible = np.array([bool(self.schedules[p]) for p in found.pipeline.tolist()], dtype=bool)
        self.sizes: Sizes = found.at(np.flatnonzero(possible & bool(self.choices.recompute)))
        inside = min(per_node, devices)
        placed = replace(run.cluster, nodes=devices // inside, devices_per_node=inside)
        lone = replace(self.plain, replicate=devices, shard=1, context=1, tensor=1, pipeline=1, expert=1)
        self.job: Job = job_of(replace(run, cluster=placed, layout=lone))
        self.constants = constants_of(self.job)
        self.slower = float(slowdown(self.job, self.constants))
        self.workspace = workspace(self.job)
        self.capacity = float(self.job.cluster.chip.memory) * (1.0 - self.job.headroom)
        self.methods = list(product(self.choices.context_method, self.choices.async_tensor))
        self._cuts: dict[tuple[int, int, bool], Cut] = {}
        self.layers: dict[bool, Layers] = {}
        self.shares: dict[tuple[bool, int], Shares] = {}
        self.share_place = np.zeros(len(self.sizes.tensor), dtype=np.int64)
        self.groups: list[Group] = []
        if len(self.sizes.tensor):
            self._fill()
            self.groups = list(self._groups())

    @property
    def count(self) -> int:
        """Legal layouts."""
        return sum(group.count for group in self.groups)

    def cut(self, pipeline: int, schedule: str, chunks: int) -> Cut:
        """How a schedule cuts the layers."""
        key = cut_key(pipeline, schedule, chunks)
        if key not in self._cuts:
            self._cuts[key] = cut(self.job, pipeline, schedule, chunks)
        return self._cuts[key]

    def values(self, key: str) -> list[int]:
        """The values a size takes."""
        return np.unique(getattr(self.sizes, key)).tolist()

    @cached_property
    def _homes(self) -> dict[tuple[bool, Sizes], tuple[Group, int]]:
        """Where each size stands."""
        return {
            (group.expert_tensor, Sizes(*size)): (group, column)
            for group in self.groups
            for column, size in enumerate(zip(*(x.tolist() for x in group.sizes), strict=True))
        }

    def find(self, size: Sizes, words: dict[str, Any]) -> tuple[Group, Place] | None:
        """The place of a layout; where a choice makes no difference to it, the one that is listed."""
        wide = words["expert_tensor"] if size.tensor > 1 else self.choices.expert_tensor[0]
        home = self._homes.get((wide, size))
        if home is None or words["recompute"] not in self.choices.recompute:
            return None
        group, column = home
        same = [s for s in group.schedules if s == (words["schedule"], words["chunks"]) or size.pipeline == 1]
        alike = same or [s for s in group.schedules if s[0] == words["schedule"] and s[0] not in LOOPED]
        if not alike:
            return None
        method = (words["context_method"], words["async_tensor"])
        usual = (method[0] if size.context > 1 else self.choices.context_method[0],
                 method[1] if size.tensor > 1 else self.choices.async_tensor[0])  # fmt: skip
        zero = words["zero"] if words["zero"] in group.zero else group.zero[0]
        if usual not in group.methods or not group.legal[group.methods.index(usual), column]:
            return None
        a, z = self.choices.recompute.index(words["recompute"]), group.zero.index(zero)
        row = int(np.ravel_multi_index((a, z, column), group.shape))
        return group, Place(*alike[0], group.methods.index(usual), row)

    def _fill(self) -> None:
        """The tables."""
        every = self.sizes
        self.moved = moved(self.job, every)
        for wide in self.choices.expert_tensor:
            self.layers[wide] = Layers(self.job, every, self.choices, wide)
            for pipeline in np.unique(every.pipeline).tolist():
                index = np.flatnonzero(every.pipeline == pipeline)
                self.share_place[index] = np.arange(len(index))
                cuts = [self.cut(pipeline, *one) for one in self.schedules[pipeline]]
                self.shares[wide, pipeline] = Shares(self.job, every.at(index), self.choices, cuts, wide)

    @cached_property
    def seconds(self) -> dict[bool, Array]:
        """Times of the pieces of the network, with experts cut or not."""
        return {wide: layers.seconds(self.methods) for wide, layers in self.layers.items()}

    @cached_property
    def least(self) -> dict[bool, Array]:
        """Of these the whole network's, under the fastest method."""
        model = self.job.model
        dense = model.dense_layers if model.experts else model.layers
        parts = np.array([dense, model.layers - dense, 1.0, 1.0])
        return {wide: np.tensordot(parts, table.sum(axis=0), 1).min(axis=0) for wide, table in self.seconds.items()}

    def _groups(self) -> Iterator[Group]:
        every = self.sizes
        own = (every.context > 1, every.tensor > 1, every.shard * every.context > 1)
        for wide in self.choices.expert_tensor:
            # Where tensor is 1, cutting experts or not is the same.
            there = (every.tensor > 1) | (wide == self.choices.expert_tensor[0])
            for pipeline in np.unique(every.pipeline).tolist():
                for open_ in product((False, True), (False, True), (False, True)):
                    alike = [has == wants for has, wants in zip(own, open_, strict=True)]
                    index = np.flatnonzero(there & (every.pipeline == pipeline) & np.logical_and.reduce(alike))
                    if len(index):
                        yield Group(self, pipeline, wide, index, open_)
