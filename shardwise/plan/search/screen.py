"""Step time and memory of all layouts of a run, by closed forms: the search rules layouts out with these before simulating.

A `Space` is all layouts on one number of devices, with the tables they read. Layouts with the same pipeline size and the same open
choices form a `Group`; a row of it is a recompute mode, a ZeRO stage and sizes. Memory comes first, since it is cheap and rules
most layouts out; then a bound on the time; then the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import groupby, product
from typing import Any

import numpy as np

from shardwise.plan.cost.constants import constants_of
from shardwise.plan.cost.job import GIB, Job, job_of
from shardwise.plan.cost.memory import standing_casts
from shardwise.plan.cost.passes import Passes
from shardwise.plan.search.bubbles import Pace, before_input, in_flight, least_makespan, makespan
from shardwise.plan.search.screened import LayoutIndex, Limit, RankBytes, Screened, TableRows
from shardwise.plan.search.space import NAMED, Sizes, choices, legal, plain, schedules, sizes, with_choices
from shardwise.plan.search.tables import LayerTable, ParameterTable, Rows, StageSplit, rows_of, split_key, stage_split
from shardwise.plan.time.data import DataSeconds
from shardwise.plan.time.step import copied_once, slowdown, tail_seconds, update_seconds, with_zero
from shardwise.run import LayoutConfig, Run
from shardwise.run.axes import HOLDS_ALL, LOOPED, SPLIT_BACKWARD, V_SHAPED
from shardwise.run.derive import compiles, planned_on_gpu

Array = Any
DEFERRED = 0.4
"""Share of a layer's saved tensors still held after its input gradient is computed: the inputs of its GEMMs."""
AT_ONCE = 12_000
"""Layouts in one array: few enough for the arrays of a formula to stay in the CPU's cache."""


class Space:
    """The layouts of a run on `devices` devices, in groups, with the tables they read: all of them, or `only` some schedules."""

    def __init__(
        self, run: Run, devices: int, per_node: int, most_microbatch: int = 0, only: tuple[str, ...] = ()
    ) -> None:
        self.devices, self.per_node = devices, per_node
        alone = replace(run, layout=LayoutConfig(replicate=devices, recompute=run.layout.recompute))
        # Compiling may depend on the layout, so it is settled before layouts are compared.
        compiled = compiles(alone, gpu=planned_on_gpu(run))
        self.run = run = replace(run, train=replace(run.train, compile=compiled))
        self.choices, self.plain = choices(run), plain(run.layout)
        found = sizes(run, devices, most_microbatch)
        self.schedules = {p: schedules(run, p) for p in np.unique(found.pipeline).tolist()}
        if only:
            self.schedules = {p: [s for s in each if s[0] in only and p > 1] for p, each in self.schedules.items()}
        possible = np.array([bool(self.schedules[p]) for p in found.pipeline.tolist()], dtype=bool)
        self.sizes: Sizes = found.at(np.flatnonzero(possible & bool(self.choices.recompute)))
        cluster = replace(run.cluster, nodes=devices // (inside := min(per_node, devices)), devices_per_node=inside)
        named: dict[str, Any] = {name: getattr(run.layout, name) for name in NAMED}
        lone = replace(self.plain, replicate=devices, shard=1, context=1, tensor=1, pipeline=1, expert=1, **named)
        self.job: Job = job_of(replace(run, cluster=cluster, layout=lone))
        self.constants = constants_of(self.job)
        self.slower = float(slowdown(self.job, self.constants))
        self.capacity = float(self.job.cluster.chip.memory) * (1.0 - self.job.headroom)
        self.methods = list(product(self.choices.context_method, self.choices.async_tensor))
        self._legal: dict[tuple[str, bool], Array] = {}
        self._values: dict[str, list[int]] = {}
        self._splits: dict[tuple[int, int, bool, bool], StageSplit] = {}
        self.layers: dict[bool, LayerTable] = {}
        self.parameters: dict[tuple[bool, int], ParameterTable] = {}
        self.parameter_row = np.zeros(len(self.sizes.tensor), dtype=np.int64)
        self.groups: list[Group] = []
        if len(self.sizes.tensor):
            self._fill()
            self.groups = list(self._groups())

    @cached_property
    def count(self) -> int:
        """The number of legal layouts."""
        return sum(group.count for group in self.groups)

    def legal(self, method: str, expert_tensor: bool) -> Array:
        """Which sizes are legal under a context method. The other choices were already restricted to legal values."""
        if (method, expert_tensor) not in self._legal:
            lay = replace(self.plain, context_method=method, expert_tensor=expert_tensor)  # type: ignore[arg-type]
            keeps = legal(replace(self.run, layout=self.sizes.into(lay)))
            self._legal[method, expert_tensor] = np.broadcast_to(keeps, self.sizes.tensor.shape)
        return self._legal[method, expert_tensor]

    def split(self, pipeline: int, schedule: str, chunks: int) -> StageSplit:
        """How a schedule splits the layers."""
        key = split_key(pipeline, schedule, chunks)
        if key not in self._splits:
            self._splits[key] = stage_split(self.job, pipeline, schedule, chunks)
        return self._splits[key]

    def values(self, key: str) -> list[int]:
        """The distinct values of one size."""
        if key not in self._values:
            self._values[key] = np.unique(getattr(self.sizes, key)).tolist()
        return self._values[key]

    @cached_property
    def _columns(self) -> dict[tuple[bool, Sizes], tuple[Group, int]]:
        """The group and the column of each size."""
        return {
            (group.expert_tensor, Sizes(*size)): (group, column)
            for group in self.groups
            for column, size in enumerate(zip(*(x.tolist() for x in group.sizes), strict=True))
        }

    def find(self, size: Sizes, chosen: dict[str, Any]) -> tuple[Group, LayoutIndex] | None:
        """The group and index of a layout. A choice that makes no difference is replaced by the one that is listed."""
        expert_tensor = chosen["expert_tensor"] if size.tensor > 1 else self.choices.expert_tensor[0]
        home = self._columns.get((expert_tensor, size))
        if home is None or chosen["recompute"] not in self.choices.recompute:
            return None
        group, column = home
        wanted = chosen["schedule"], chosen["chunks"]
        same = [s for s in group.schedules if s == wanted or (size.pipeline == 1 and s[0] not in LOOPED)]
        alike = same or [s for s in group.schedules if s[0] == chosen["schedule"] and s[0] not in LOOPED]
        method = (chosen["context_method"] if size.context > 1 else self.choices.context_method[0],
                  chosen["async_tensor"] if size.tensor > 1 else self.choices.async_tensor[0])  # fmt: skip
        zero = chosen["zero"] if chosen["zero"] in group.zero else group.zero[0]
        if not alike or method not in group.methods or not group.legal[group.methods.index(method), column]:
            return None
        a, z = self.choices.recompute.index(chosen["recompute"]), group.zero.index(zero)
        row = int(np.ravel_multi_index((a, z, column), group.shape))
        return group, LayoutIndex(*alike[0], group.methods.index(method), row)

    def _fill(self) -> None:
        """Makes the tables."""
        every = self.sizes
        self.of_size = rows_of(self.job, every)
        for expert_tensor in self.choices.expert_tensor:
            self.layers[expert_tensor] = LayerTable(self.job, every, self.choices, expert_tensor)
            for pipeline in np.unique(every.pipeline).tolist():
                index = np.flatnonzero(every.pipeline == pipeline)
                self.parameter_row[index] = np.arange(len(index))
                splits = [self.split(pipeline, *one) for one in self.schedules[pipeline]]
                table = ParameterTable(self.job, every.at(index), self.choices, splits, expert_tensor)
                self.parameters[expert_tensor, pipeline] = table

    @cached_property
    def seconds(self) -> dict[bool, Array]:
        """Seconds of the network's modules, with and without `expert_tensor`."""
        return {expert_tensor: layers.seconds(self.methods) for expert_tensor, layers in self.layers.items()}

    @cached_property
    def least(self) -> dict[bool, Array]:
        """Seconds of the whole network under the fastest method, of the forward and of all passes: [2, row]."""
        model = self.job.model
        dense = model.dense_layers if model.experts else model.layers
        parts = np.array([dense, model.layers - dense, 1.0, 1.0])
        found = {}
        for key, table in self.seconds.items():
            forward, inputs, weights = np.tensordot(parts, table, (0, 1))
            found[key] = np.stack([forward.min(axis=0), (forward + inputs + weights).min(axis=0)])
        return found

    def _groups(self) -> Iterator[Group]:
        every = self.sizes
        own = (every.context > 1, every.tensor > 1, every.shard * every.context > 1)
        for expert_tensor in self.choices.expert_tensor:
            # With one tensor rank, `expert_tensor` makes no difference.
            there = (every.tensor > 1) | (expert_tensor == self.choices.expert_tensor[0])
            for pipeline in np.unique(every.pipeline).tolist():
                for split in product((False, True), repeat=3):
                    alike = [has == wants for has, wants in zip(own, split, strict=True)]
                    index = np.flatnonzero(there & (every.pipeline == pipeline) & np.logical_and.reduce(alike))
                    if len(index):
                        yield Group(self, pipeline, expert_tensor, index, *split)


class Group:
    """Layouts with one pipeline size and the same open choices: a context method where context > 1 (`sliced`), overlap where
    tensor > 1 (`cut`), a ZeRO stage where parameters are `sharded`."""

    def __init__(
        self, space: Space, pipeline: int, expert_tensor: bool, index: Array, sliced: bool, cut: bool, sharded: bool
    ) -> None:
        self.space, self.pipeline, self.expert_tensor = space, pipeline, expert_tensor
        self.sizes = space.sizes.at(index)
        has = space.choices
        methods = has.context_method if sliced else has.context_method[:1]
        self.methods = list(product(methods, has.async_tensor if cut else has.async_tensor[:1]))
        self.zero = has.zero if sharded else has.zero[:1]
        self.layers, self.parameters = space.layers[expert_tensor], space.parameters[expert_tensor, pipeline]
        self.layer_row = self.layers.row[index]
        self.parameter_row = self.parameters.row[space.parameter_row[index]]
        self.of_size = Rows(*(column[index] for column in space.of_size))
        self.legal: Array = np.array([space.legal(method, expert_tensor)[index] for method, _ in self.methods])
        s = self.sizes
        self.microbatches = space.job.global_batch // (s.microbatch * s.replicate * s.shard)

    @cached_property
    def seconds(self) -> Array:
        """Seconds of the layers under this group's methods: all of the space's methods, the first ones, or every second one."""
        every, few = self.space.methods, self.methods
        step = every.index(few[1]) if len(few) > 1 else 1
        return np.ascontiguousarray(self.space.seconds[self.expert_tensor][:, :, : step * len(few) : step])

    @property
    def shape(self) -> tuple[int, int, int]:
        """Numbers of recompute modes, ZeRO stages and sizes: a row is one of each."""
        return len(self.space.choices.recompute), len(self.zero), len(self.sizes.tensor)

    @property
    def schedules(self) -> list[tuple[str, int]]:
        """Schedules, each with its stages per rank."""
        return self.space.schedules[self.pipeline]

    @property
    def count(self) -> int:
        """The number of legal layouts."""
        recomputations, zeros, _ = self.shape
        return int(self.legal.sum()) * recomputations * zeros * len(self.schedules)

    def rows(self) -> Array:
        """The indices of all rows."""
        return np.arange(int(np.prod(self.shape)))

    def at(self, rows: Array) -> TableRows:
        a, z, column = np.unravel_index(rows, self.shape)
        layer = a * self.layers.size + self.layer_row[column]
        parameters = z * self.parameters.size + self.parameter_row[column]
        return TableRows(a, z, column, layer, parameters, self.microbatches[column])

    def screen(self, wanted: list[tuple[str, int]], rows: Array, limit: Limit | None = None) -> Iterator[Screened]:
        """Screens rows under some schedules, without those certainly beyond the limit. Illegal layouts take infinite seconds."""
        every = self._all[0].some(rows)
        mean = self._all[1][..., rows] if limit is not None else ()
        for _, same in groupby(sorted(wanted, key=self._key), key=self._key):
            names = list(same)
            split, at, there = self.space.split(self.pipeline, *names[0]), every, rows
            if limit is not None:
                least = np.array([self.least_seconds(*name, every.microbatches, *mean) for name in names])
                quick = np.flatnonzero(least.min(axis=0) <= limit.seconds)
                if not len(quick):
                    continue
                there, least, at = rows[quick], least[:, quick], every.some(quick)
            held = self._held(split, at)
            memory = np.array([self._memory(split, schedule, at, held) for schedule, _ in names])
            fits = np.arange(len(there))
            if limit is not None:
                fits = np.flatnonzero((least <= limit.seconds_with(memory)).any(axis=0))
            for few in np.array_split(fits, -(-len(fits) * len(self.methods) // AT_ONCE) or 1):
                if len(few):
                    part = at.some(few)
                    pace, rest = self._pace(split, names[0][0], part)
                    for (schedule, chunks), need in zip(names, memory, strict=True):
                        seconds: Array = (makespan(schedule, pace, part.microbatches) + rest) * self.space.slower
                        seconds[~self.legal[:, part.column]] = np.inf
                        yield Screened(schedule, chunks, there[few], seconds, need[few])

    @cached_property
    def _all(self) -> tuple[TableRows, Array]:
        """All rows, and their least seconds on a mean rank."""
        at = self.at(self.rows())
        return at, self.mean_rank(at)

    def mean_rank(self, at: TableRows) -> Array:
        """Least seconds of a microbatch on a mean rank of these rows: of its forward, and of all passes."""
        return np.take(self.space.least[self.expert_tensor], at.layer, axis=-1) / self.pipeline

    def least_seconds(self, schedule: str, chunks: int, microbatches: Array, forward: Array, work: Array) -> Array:
        """A lower bound on the step seconds under a schedule and any method, by the seconds of a mean rank: its work, and the known
        part of the bubble."""
        return self.space.slower * least_makespan(schedule, self.pipeline, chunks, microbatches, work, forward)

    @cached_property
    def promises(self) -> float:
        """A lower bound on the step seconds of the group's layouts under its first schedule."""
        return float(self.least_seconds(*self.schedules[0], self._all[0].microbatches, *self._all[1]).min())

    def leanest(self) -> tuple[float, LayoutIndex]:
        """The least memory of any layout, and the index of that layout."""
        rows, best = self.rows(), (np.inf, LayoutIndex("", 0, 0, 0))
        at = self.at(rows)
        some_legal = self.legal.any(axis=0)[at.column]
        for schedule, chunks in self.schedules:
            split = self.space.split(self.pipeline, schedule, chunks)
            memory = np.where(some_legal, self._memory(split, schedule, at, self._held(split, at)), np.inf)
            row = int(memory.argmin())
            if memory[row] < best[0]:
                method = int(self.legal[:, at.column[row]].argmax())
                best = float(memory[row]), LayoutIndex(schedule, chunks, method, row)
        return best

    def _key(self, schedule: tuple[str, int]) -> tuple[int, int, bool, bool, bool]:
        return *split_key(self.pipeline, *schedule), schedule[0] in SPLIT_BACKWARD

    def _pace(self, split: StageSplit, schedule: str, at: TableRows) -> tuple[Pace, Array]:
        """The inputs of the schedule's closed form, and the seconds of a step outside the schedule."""
        constants, ranks, job = self.space.constants, split.ranks, self.space.job
        own = added_passes(split.parts, *np.take(self.seconds, at.layer, axis=-1))
        data = self.parameters.traffic(split, schedule, at.parameters)
        zero = with_zero(own, DataSeconds(*(x[:, None] for x in data)), constants)
        hop = constants["pipeline"] * self.of_size.hop[at.column]
        blocks = hop if job.framework.pipeline_blocks else 0.0
        forward, inputs, weights = zero.forward + blocks, zero.backward_input + blocks, zero.backward_weight
        busiest = added(ranks, forward + inputs + weights).max(axis=0)
        stage = added_passes(split.counts / split.counts.sum(), forward, inputs, weights)
        chunks = len(split.stages) // self.pipeline
        pace = Pace(
            self.pipeline, chunks, stage.forward, stage.backward_input, stage.backward_weight, busiest, hop - blocks
        )
        work = added_passes(ranks, own.forward, own.backward_input, own.backward_weight)
        sent = DataSeconds(*((ranks @ x)[:, None] for x in data))
        rest = tail_seconds(job, work, sent, constants).max(axis=0) + constants["overhead"]
        rest = rest + copied_once(sent, at.microbatches, constants).max(axis=0)
        if job.forward_passes:  # as in `step.py`; with microbatches from both ends this is a little too long
            once, each = added(split.counts, forward), added(ranks, forward).max(axis=0)
            rest = rest + job.forward_passes * (once + (at.microbatches - 1) * each)
        return pace, rest + update_seconds(job, sent, constants).max(axis=0)

    def _held(self, split: StageSplit, at: TableRows) -> RankBytes:
        """The bytes each kind of rank holds besides activations, and those that one microbatch saves on it: [kind of rank, row]."""
        space, framework, column = self.space, self.space.job.framework, at.column
        own, size = self.parameters.memory(split, at.parameters), self.of_size
        stands = np.array([standing_casts(space.job, mode) for mode in space.choices.recompute])[at.recompute]
        saved, recomputed = self.layers.saved
        has_head = ((split.ranks @ split.parts[:, 3]) > 0)[:, None]
        again = recomputed[at.layer]
        again = again + size.passing[column] * (again > 0)
        wasted = 1.0 + framework.fragmentation
        # The head's saved tensors are counted with the loss; every stage without a head saves the activations it sends.
        parts = split.parts * (1.0, 1.0, 1.0, -1.0) + (0.0, 0.0, 0.0, 1.0)
        zero = np.array(self.zero)[at.zero]
        return RankBytes(
            fixed=own.stays
            + framework.context_gib * GIB
            + wasted * (own.gathered + own.cast * stands + size.buffers[column]),
            gradients=own.gradients,
            whole_gradients=np.maximum(own.gradients, own.whole_gradients),
            once=(zero == 1) & (at.microbatches > 1),
            saved=wasted * (split.ranks @ parts) @ saved[:, at.layer],
            loss_saved=wasted * has_head * size.loss_saved[column],
            loss=wasted * has_head * size.loss[column],
            again=wasted * again,
        )

    def _memory(self, split: StageSplit, schedule: str, at: TableRows, held: RankBytes) -> Array:
        """Bytes of the fullest rank, at the moment when it holds the most (`trainer/memory.py`)."""
        chunks = len(split.stages) // self.pipeline
        ranks = split.latest if schedule in V_SHAPED else split.earliest
        flying = np.array([in_flight(schedule, self.pipeline, chunks, rank, at.microbatches) for rank in ranks])
        if schedule in ("zb-h1", "zb-2p"):  # a microbatch that waits only for its weight gradients holds a share
            whole = np.array([before_input(schedule, self.pipeline, rank, at.microbatches) for rank in ranks])
            flying = whole + DEFERRED * (flying - whole)
        deferred = (schedule in SPLIT_BACKWARD) & (self.pipeline > 1)
        whole = held.once
        if schedule in LOOPED:  # a rank finishes its stages in turn, unless rounds of microbatches interleave them
            in_turn = (at.microbatches < 2 * self.pipeline) | (schedule == "breadth-first")
            whole = whole * np.where(in_turn, 1.0 / chunks, 1.0)
        gradients = held.gradients + np.maximum(whole, deferred) * (held.whole_gradients - held.gradients)
        losses = at.microbatches if schedule in HOLDS_ALL and len(split.stages) > 1 else 1
        saved = flying * held.saved + losses * held.loss_saved
        peak: Array = held.fixed + gradients + saved + np.maximum(held.loss, held.again)
        if self.pipeline == 1:
            # In a step of one microbatch, gradients are allocated while activations are freed.
            ends = saved / self.space.job.model.layers + held.again + gradients
            alone = held.fixed + np.maximum(saved + np.maximum(held.loss, held.again), ends)
            peak = np.where(at.microbatches == 1, alone, peak)
        return peak.max(axis=0)

    def choices_at(self, index: LayoutIndex) -> dict[str, Any]:
        """The choices of a layout, by configuration key."""
        method, overlap = self.methods[index.method]
        a, z, _ = np.unravel_index(index.row, self.shape)
        return dict(
            zero=self.zero[z],
            context_method=method,
            async_tensor=overlap,
            expert_tensor=self.expert_tensor,
            schedule=index.schedule,
            chunks=index.chunks,
            recompute=self.space.choices.recompute[a],
        )

    def sizes_at(self, index: LayoutIndex) -> Sizes:
        """The sizes of a layout."""
        return Sizes(*(int(x) for x in self.sizes.at(index.row % self.shape[2])))

    def run_at(self, index: LayoutIndex) -> Run:
        """The run with a layout filled in."""
        space, chosen = self.space, self.choices_at(index)
        return with_choices(space.run, self.sizes_at(index), chosen, space.devices, space.per_node)


def added_passes(parts: Array, forward: Array, inputs: Array, weights: Array) -> Passes:
    """The sum of passes, weighted by `parts`."""
    return Passes(added(parts, forward), added(parts, inputs), added(parts, weights), {})


def added(parts: Array, each: Array) -> Array:
    """The sum of arrays, weighted by `parts`: `np.tensordot` over one axis, without its overhead, which exceeds the product."""
    sums = np.dot(parts.reshape(-1, parts.shape[-1]), each.reshape(len(each), -1))
    return sums.reshape(parts.shape[:-1] + each.shape[1:])
