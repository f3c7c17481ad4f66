"""Step time and memory of many layouts at once, by closed forms: what the search sorts out with before it plays schedules.

Layouts with one size of pipeline and the same open choices are a `Group`; a row of it is a recomputation, a ZeRO stage and
sizes. Memory comes first, since it is cheap and rules most layouts out; then a bound on the time; then the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import groupby, product
from typing import Any, NamedTuple

import numpy as np

from shardwise.plan.bubbles import Pace, in_flight, makespan
from shardwise.plan.constants import constants_of
from shardwise.plan.job import Job, job_of, overlapped
from shardwise.plan.passes import Passes
from shardwise.plan.space import LOOPED, V_SHAPED, Sizes, choices, network_legal, plain, schedules, sizes, with_choices
from shardwise.plan.step import DataSeconds, Prepared, slowdown, tail_seconds, with_sharing
from shardwise.plan.tables import Cut, Layers, Shares, cut, cut_key, moved, workspace
from shardwise.run import Run

Array = Any
AT_ONCE = 12_000
"""Layouts in one array: few enough for the arrays of a formula to stay in the processor's cache."""


class Place(NamedTuple):
    """Where a layout stands in a group."""

    schedule: str
    chunks: int
    method: int
    row: int


class Screened(NamedTuple):
    """Step seconds [method, row] and bytes of the fullest rank [row] of some rows of a group under one schedule."""

    schedule: str
    chunks: int
    rows: Array
    seconds: Array
    memory: Array


class _Rows(NamedTuple):
    """Rows of a group, and where each stands in the tables."""

    recompute: Array
    zero: Array
    column: Array
    layer: Array
    share: Array
    microbatches: Array


class Group:
    """Layouts of one pipeline size and with the same open choices."""

    def __init__(self, space: Space, pipeline: int, wide: bool, index: Array, open_: tuple[bool, bool, bool]) -> None:
        self.space, self.pipeline, self.expert_tensor = space, pipeline, wide
        self.sizes = space.sizes.at(index)
        sliced, split, shared = open_
        has = space.choices
        methods = has.context_method if sliced else has.context_method[:1]
        overlaps = has.async_tensor if split else has.async_tensor[:1]
        self.methods = list(product(methods, overlaps))
        self.zero = has.zero if shared else has.zero[:1]
        self.layers, self.shares = space.layers[wide], space.shares[wide, pipeline]
        self.layer_row = self.layers.row[index]
        self.share_row = self.shares.row[space.share_place[index]]
        self.index = index
        self.hop, self.logits, self.buffers = (column[index] for column in space.moved)
        self.legal = np.array([self._legal(method) for method, _ in self.methods])
        s = self.sizes
        self.microbatches = space.job.global_batch // (s.microbatch * s.replicate * s.shard)

    @cached_property
    def seconds(self) -> Array:
        """The layers' times under this group's methods."""
        return self.space.seconds[self.expert_tensor][:, :, [self.space.methods.index(one) for one in self.methods]]

    def _legal(self, method: str) -> Array:
        """Sizes that keep the rules under a context method. The other choices were made so that they do."""
        lay = replace(self.space.plain, context_method=method, expert_tensor=self.expert_tensor)  # type: ignore[arg-type]
        return network_legal(self.space.run, self.sizes.into(lay))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Recomputations, ZeRO stages and sizes: a row is one of each."""
        return len(self.space.choices.recompute), len(self.zero), len(self.sizes.tensor)

    @property
    def schedules(self) -> list[tuple[str, int]]:
        """Schedules, with stages a rank."""
        return self.space.schedules[self.pipeline]

    @property
    def count(self) -> int:
        """Legal layouts."""
        recomputations, zeros, _ = self.shape
        return int(self.legal.sum()) * recomputations * zeros * len(self.schedules)

    def rows(self) -> Array:
        """The numbers of all rows."""
        return np.arange(int(np.prod(self.shape)))

    def _at(self, rows: Array) -> _Rows:
        a, z, column = np.unravel_index(rows, self.shape)
        layer = a * self.layers.size + self.layer_row[column]
        share = z * self.shares.size + self.share_row[column]
        return _Rows(a, z, column, layer, share, self.microbatches[column])

    def screen(
        self, wanted: list[tuple[str, int]], rows: Array, room: float = np.inf, limit: float = np.inf
    ) -> Iterator[Screened]:
        """Rows under some schedules. Those that need more room, or that certainly take longer than the limit, are left out
        of what comes back. What is illegal takes forever."""
        at = self._at(rows)
        share = self.microbatches / self.pipeline * self.space.slower
        quick = np.flatnonzero(share[at.column] * self.space.least[self.expert_tensor][at.layer] <= limit)
        rows, at = rows[quick], _Rows(*(x[quick] for x in at))
        for _, same in groupby(sorted(wanted, key=self._key), key=self._key):
            names = list(same)
            one = self.space.cut(self.pipeline, *names[0])
            base, whole = self._held(one, at)
            memory = [self._memory(one, schedule, at, base, whole) for schedule, _ in names]
            fits = np.flatnonzero(np.minimum.reduce(memory) <= room)
            for few in np.array_split(fits, -(-len(fits) * len(self.methods) // AT_ONCE) or 1):
                if len(few):
                    part = _Rows(*(x[few] for x in at))
                    pace, rest = self._pace(one, part)
                    for (schedule, chunks), need in zip(names, memory, strict=True):
                        seconds = (makespan(schedule, pace, part.microbatches) + rest) * self.space.slower
                        seconds[~self.legal[:, part.column]] = np.inf
                        yield Screened(schedule, chunks, rows[few], seconds, need[few])

    def leanest(self) -> tuple[float, Place]:
        """The least memory of any layout, and which it is."""
        rows, best = self.rows(), (np.inf, Place("", 0, 0, 0))
        at = self._at(rows)
        for schedule, chunks in self.schedules:
            one = self.space.cut(self.pipeline, schedule, chunks)
            memory = np.where(self.legal.any(axis=0)[at.column], self._memory(one, schedule, at, *self._held(one, at)), np.inf)
            row = int(memory.argmin())
            if memory[row] < best[0]:
                method = int(self.legal[:, at.column[row]].argmax())
                best = float(memory[row]), Place(schedule, chunks, method, row)
        return best

    def _key(self, schedule: tuple[str, int]) -> tuple[int, int, bool]:
        return cut_key(self.pipeline, *schedule)

    def _pace(self, one: Cut, at: _Rows) -> tuple[Pace, Array]:
        """What the schedule's closed form reads, and the seconds of a step beside it."""
        constants, ranks, job = self.space.constants, one.ranks, self.space.job
        table = np.take(self.seconds, at.layer, axis=-1)
        own = Passes(*(np.tensordot(one.parts, passes, 1) for passes in table), {})
        data = self.shares.traffic(one, at.share)
        beside = DataSeconds(*(x[:, None] for x in data))
        hop = constants["pipeline"] * self.hop[at.column]
        blocks = hop if job.stack.pipeline_blocks else 0.0
        shared = with_sharing(own, beside, constants)
        forward, inputs, weights = shared.forward + blocks, shared.backward_input + blocks, shared.backward_weight
        busiest = np.tensordot(ranks, forward + inputs + weights, 1).max(axis=0)
        mean = one.counts / one.counts.sum()
        stage = (np.tensordot(mean, x, 1) for x in (forward, inputs, weights))
        pace = Pace(self.pipeline, len(one.stages) // self.pipeline, *stage, busiest, hop - blocks)
        work = Passes(*(np.tensordot(ranks, x, 1) for x in (own.forward, own.backward_input, own.backward_weight)), {})
        sent = DataSeconds(*((ranks @ x)[:, None] for x in data))
        rest = tail_seconds(job, work, sent, constants).max(axis=0) + constants["overhead"]
        return pace, rest + constants["optimizer"] * sent.optimizer.max(axis=0)

    def _held(self, one: Cut, at: _Rows) -> tuple[Array, Array]:
        """What each kind of rank holds besides activations, and what one microbatch keeps on it: [kind of rank, row]."""
        fixed, share = self.space.workspace
        states, gathered = self.shares.memory(one, at.share)
        kept, again = self.layers.kept
        has_head = (one.ranks @ one.parts[:, 3]) > 0
        moving = gathered + (self.buffers[at.column] + again[at.layer])
        moving[has_head] += self.logits[at.column]
        parts = one.parts * (1.0, 1.0, 1.0, 0.0)  # the head's own tensors are the logits
        return states + fixed + (1.0 + share) * moving, (1.0 + share) * (one.ranks @ parts) @ kept[:, at.layer]

    def _memory(self, one: Cut, schedule: str, at: _Rows, base: Array, whole: Array) -> Array:
        """Bytes of the fullest rank."""
        chunks = len(one.stages) // self.pipeline
        ranks = one.latest if schedule in V_SHAPED else one.earliest
        held = [in_flight(schedule, self.pipeline, chunks, rank, at.microbatches) for rank in ranks]
        return np.maximum.reduce([b + h * w for b, h, w in zip(base, held, whole, strict=True)])

    def words(self, place: Place) -> dict[str, Any]:
        """The choices at a place, by key."""
        method, overlap = self.methods[place.method]
        a, z, _ = np.unravel_index(place.row, self.shape)
        return dict(
            zero=self.zero[z],
            context_method=method,
            async_tensor=overlap,
            expert_tensor=self.expert_tensor,
            schedule=place.schedule,
            chunks=place.chunks,
            recompute=self.space.choices.recompute[a],
        )

    def run_at(self, place: Place) -> Run:
        """The run with the layout at a place."""
        size = self.sizes.at(place.row % self.shape[2])
        return with_choices(self.space.run, size, self.words(place), self.space.devices, self.space.per_node)

    def prepared_at(self, place: Place) -> Prepared:
        """What `prepare` would say of the layout at a place, read from the tables."""
        run, words, column = self.run_at(place), self.words(place), place.row % self.shape[2]
        job = replace(self.space.job, layout=run.layout, microbatch=run.train.microbatch)
        one = self.space.cut(self.pipeline, place.schedule, place.chunks)
        network = self.layers.piece_at(int(self.layer_row[column]), words["recompute"], words["context_method"])
        held, data = self.shares.data_at(one, int(self.share_row[column]), words["zero"])
        pieces = [network.stage(d, r, first=float(b), last=float(e)) for d, r, b, e in one.kinds]
        kinds, hop = list(one.stages), float(self.hop[column])
        job = overlapped(job, words["async_tensor"])
        return Prepared(job, list(one.layers), [held[k] for k in kinds], kinds, pieces, data, hop)


class Space:
    """All layouts of a run on so many devices, in groups, with the tables they share."""

    def __init__(self, run: Run, devices: int, per_node: int, most_microbatch: int = 0) -> None:
        self.run, self.devices, self.per_node = run, devices, per_node
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
                for open_ in product((False, True), repeat=3):
                    alike = [has == wants for has, wants in zip(own, open_, strict=True)]
                    index = np.flatnonzero(there & (every.pipeline == pipeline) & np.logical_and.reduce(alike))
                    if len(index):
                        yield Group(self, pipeline, wide, index, open_)
