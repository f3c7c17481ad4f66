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

from shardwise.plan.cost.job import overlapped
from shardwise.plan.cost.memory import casts_kept
from shardwise.plan.cost.passes import Passes
from shardwise.plan.search.bubbles import Pace, in_flight, makespan
from shardwise.plan.search.space import V_SHAPED, network_legal, with_choices
from shardwise.plan.search.tables import Cut, cut_key
from shardwise.plan.time.step import DataSeconds, Prepared, tail_seconds, update_seconds, with_sharing
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

    def __init__(self, space: Any, pipeline: int, wide: bool, index: Array, open_: tuple[bool, bool, bool]) -> None:
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
        self.legal: Array = np.array([self._legal(method) for method, _ in self.methods])
        s = self.sizes
        self.microbatches = space.job.global_batch // (s.microbatch * s.replicate * s.shard)

    @cached_property
    def seconds(self) -> Array:
        """The layers' times under this group's methods."""
        return self.space.seconds[self.expert_tensor][:, :, [self.space.methods.index(one) for one in self.methods]]

    def _legal(self, method: str) -> Array:
        """Sizes that keep the rules under a context method. The other choices were made so that they do."""
        lay = replace(self.space.plain, context_method=method, expert_tensor=self.expert_tensor)
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
                        seconds: Array = (makespan(schedule, pace, part.microbatches) + rest) * self.space.slower
                        seconds[~self.legal[:, part.column]] = np.inf
                        yield Screened(schedule, chunks, rows[few], seconds, need[few])

    def leanest(self) -> tuple[float, Place]:
        """The least memory of any layout, and which it is."""
        rows, best = self.rows(), (np.inf, Place("", 0, 0, 0))
        at = self._at(rows)
        for schedule, chunks in self.schedules:
            one = self.space.cut(self.pipeline, schedule, chunks)
            memory = np.where(
                self.legal.any(axis=0)[at.column], self._memory(one, schedule, at, *self._held(one, at)), np.inf
            )
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
        own = _passes(one.parts, *table)
        data = self.shares.traffic(one, at.share)
        beside = DataSeconds(*(x[:, None] for x in data))
        hop = constants["pipeline"] * self.hop[at.column]
        blocks = hop if job.stack.pipeline_blocks else 0.0
        shared = with_sharing(own, beside, constants)
        forward, inputs, weights = shared.forward + blocks, shared.backward_input + blocks, shared.backward_weight
        busiest = np.tensordot(ranks, forward + inputs + weights, 1).max(axis=0)
        mean = one.counts / one.counts.sum()
        stage = _passes(mean, forward, inputs, weights)
        chunks = len(one.stages) // self.pipeline
        pace = Pace(
            self.pipeline, chunks, stage.forward, stage.backward_input, stage.backward_weight, busiest, hop - blocks
        )
        work = _passes(ranks, own.forward, own.backward_input, own.backward_weight)
        sent = DataSeconds(*((ranks @ x)[:, None] for x in data))
        rest = tail_seconds(job, work, sent, constants).max(axis=0) + constants["overhead"]
        return pace, rest + update_seconds(job, sent, constants).max(axis=0)

    def _held(self, one: Cut, at: _Rows) -> tuple[Array, Array]:
        """What each kind of rank holds besides activations, and what one microbatch keeps on it: [kind of rank, row]."""
        fixed, share = self.space.workspace
        states, gathered, cast = self.shares.memory(one, at.share)
        stays = np.array([casts_kept(self.space.job, mode) for mode in self.space.choices.recompute])[at.recompute]
        kept, again = self.layers.kept
        has_head = (one.ranks @ one.parts[:, 3]) > 0
        moving = gathered + cast * stays + (self.buffers[at.column] + again[at.layer])
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


def _passes(parts: Array, forward: Array, inputs: Array, weights: Array) -> Passes:
    """Passes added up, each so many times."""
    return Passes(np.tensordot(parts, forward, 1), np.tensordot(parts, inputs, 1), np.tensordot(parts, weights, 1), {})
