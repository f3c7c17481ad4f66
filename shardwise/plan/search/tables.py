"""What the hardware says about the layouts of a search, asked once for each case that differs.

Millions of layouts have few different layers: a layer's time depends on tensor, context, expert and microbatch alone, parameter
traffic on tensor, replicate and expert alone. So these are tables, filled by the planner's own formulas with arrays in the place
of sizes, and a layout is a row of each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from shardwise.plan.cost.constants import constants_of
from shardwise.plan.cost.job import Job, overlapped
from shardwise.plan.cost.memory import buffers, gathered_layers, layer_activations, loss_bytes, states
from shardwise.plan.cost.operations import embedding, head, layer
from shardwise.plan.cost.parameters import LocalNumel, cast_copies, ends_parameters, layer_parameters
from shardwise.plan.cost.passes import ModuleCost, NetworkCost, passes
from shardwise.plan.search.space import LOOPED, V_SHAPED, Choices, Sizes
from shardwise.plan.time.step import DataSeconds, data_seconds, hop_seconds

Array = Any

Kind = tuple[int, int, bool, bool]
"""Of a stage: dense layers, MoE layers, whether it has the embedding, whether it has the head."""


@dataclass(frozen=True)
class StageSplit:
    """How a pipeline splits the layers: kinds of stages, and kinds of ranks by how many stages of each kind they hold."""

    kinds: tuple[Kind, ...]
    stages: tuple[int, ...]
    """The kind of each stage."""
    ranks: Array
    """[kinds of ranks, kinds of stages]"""
    earliest: tuple[int, ...]
    """The first rank of each kind, where most schedules hold the most."""
    latest: tuple[int, ...]

    @property
    def parts(self) -> Array:
        """How often each kind of stage has a dense layer, a MoE layer, the embedding and the head."""
        return np.array(self.kinds, dtype=float)

    @property
    def counts(self) -> Array:
        """Stages of each kind."""
        return np.bincount(self.stages, minlength=len(self.kinds)).astype(float)


def stage_split(job: Job, pipeline: int, schedule: str, chunks: int) -> StageSplit:
    """The split of one schedule."""
    layout = replace(job.layout, pipeline=pipeline, schedule=schedule, chunks=chunks)  # type: ignore[arg-type]
    layers = replace(job, layout=layout).stage_layers
    last = len(layers) - 1
    kinds: dict[Kind, int] = {}
    stages = [kinds.setdefault((d, r, n == 0, n == last), len(kinds)) for n, (d, r) in enumerate(layers)]
    held = np.zeros((pipeline, len(kinds)))
    for stage, kind in enumerate(stages):
        there = stage % pipeline if stage < pipeline or schedule not in V_SHAPED else last - stage
        held[there, kind] += 1
    ranks, first, back = np.unique(held, axis=0, return_index=True, return_inverse=True)
    latest = [int(np.flatnonzero(back.ravel() == n)[-1]) for n in range(len(ranks))]
    return StageSplit(tuple(kinds), tuple(stages), ranks, tuple(first.tolist()), tuple(latest))


def split_key(pipeline: int, schedule: str, chunks: int) -> tuple[int, int, bool]:
    """What a split depends on."""
    if pipeline == 1 and schedule not in LOOPED:
        return 1, 1, False
    v = schedule in V_SHAPED
    return pipeline, chunks if schedule in LOOPED else 1 + v, v


class LayerTable:
    """Times and memory of the modules of the network, by the different (tensor, context, expert, microbatch), and by how many
    microbatches' gradients are accumulated; beyond some that makes no difference."""

    MOST_ACCUMULATED = 32

    def __init__(self, job: Job, sizes: Sizes, choices: Choices, expert_tensor: bool) -> None:
        added = job.global_batch // (sizes.microbatch * sizes.replicate * sizes.shard)
        added = np.minimum(added, self.MOST_ACCUMULATED)
        keys, self.row = _unique(sizes.tensor, sizes.context, sizes.expert, sizes.microbatch, added)
        t, c, e, b, added = keys
        self.size = len(t)
        replicas = job.global_batch / (b * added)
        layout = replace(job.layout, tensor=t, context=c, expert=e, expert_tensor=expert_tensor, replicate=replicas)
        self.job = replace(job, layout=layout, microbatch=b)
        self.choices, self.has_moe = choices, bool(job.model.experts)
        self.has_dense = not self.has_moe or job.model.dense_layers > 0

    def _under(self, recompute: str, method: str = "ring") -> Job:
        """The job of the rows with these choices."""
        return replace(self.job, layout=replace(self.job.layout, recompute=recompute, context_method=method))  # type: ignore[arg-type]

    @cached_property
    def networks(self) -> dict[tuple[str, str], NetworkCost]:
        """By recomputation and context method. The ops are the same under any recomputation."""
        found = {}
        for method in self.choices.context_method:
            job = self._under("none", method)
            dense = layer(job, routed=False) if self.has_dense else None
            modules = (embedding(job), dense, layer(job, routed=True) if self.has_moe else None, head(job))
            for recompute in self.choices.recompute:
                found[recompute, method] = NetworkCost.added(self._under(recompute, method), *modules)
        return found

    def seconds(self, methods: Iterable[tuple[str, bool]]) -> Array:
        """Forward, backward for the input and for the weights of dense layer, MoE layer, embedding and head:
        [pass, module, method and overlap, recomputation and row]."""
        constants = constants_of(self.job)
        methods = list(methods)
        result = np.zeros((3, 4, len(methods), len(self.choices.recompute), self.size))
        for a, recompute in enumerate(self.choices.recompute):
            for b, (method, overlap) in enumerate(methods):
                network = self.networks[recompute, method]
                job = overlapped(self._under(recompute, method), overlap)
                for n, module in enumerate((network.dense, network.moe, network.embedding, network.head)):
                    if module is not None:
                        own = passes(job, module, constants)
                        result[:, n, b, a] = own.forward, own.backward_input, own.backward_weight
        return result.reshape(3, 4, len(methods), -1)

    @cached_property
    def saved(self) -> tuple[Array, Array]:
        """Bytes saved for the backward pass by dense layer, MoE layer and embedding, [module, recomputation and row]; and what
        recomputation holds for a moment, [recomputation and row]."""
        many = len(self.choices.recompute)
        saved, recomputed = np.zeros((4, many, self.size)), np.zeros((many, self.size))
        for a, recompute in enumerate(self.choices.recompute):
            job = self._under(recompute)
            for n, there in enumerate((self.has_dense, self.has_moe)):
                if there:
                    saved[n, a], more = layer_activations(job, routed=bool(n))
                    recomputed[a] = np.maximum(recomputed[a], more)
            saved[2, a] = sum(op.saved for op in embedding(job))
        return saved.reshape(4, -1), recomputed.ravel()

    def network_at(self, row: int, recompute: str, method: str) -> NetworkCost:
        """The modules of one row, as plain numbers."""
        network = self.networks[recompute, method]

        def at(module: ModuleCost | None) -> Any:
            if module is None:
                return None
            seconds = [[_at(x, row) for x in line] for line in module.seconds]
            return ModuleCost(seconds, [_at(x, row) for x in module.launches])

        return NetworkCost(at(network.embedding), at(network.dense), at(network.moe), at(network.head))


class ParameterTable:
    """Traffic and memory of parameters on pipelines of one size, by the different (tensor, replicate, expert)."""

    def __init__(
        self, job: Job, sizes: Sizes, choices: Choices, splits: Iterable[StageSplit], expert_tensor: bool
    ) -> None:
        keys, self.row = _unique(sizes.tensor, sizes.replicate, sizes.expert, sizes.shard * sizes.context)
        t, r, e, z = keys
        layout = replace(job.layout, tensor=t, replicate=r, expert=e, shard=z, context=1, expert_tensor=expert_tensor)
        self.job, self.zero = replace(job, layout=layout), choices.zero
        self.kinds = {kind: n for n, kind in enumerate({k: None for one in splits for k in one.kinds})}
        self.held = self._held(list(self.kinds))
        self.size = len(t)
        self._states: dict[int, tuple[Array, Array, Array]] = {}

    @cached_property
    def data(self) -> Array:
        """Traffic and optimizer of each kind of stage: [field of DataSeconds, kind, ZeRO stage and row]."""
        dense, routed = (np.array([[float(kind[n])] for kind in self.kinds]) for n in range(2))
        every = [data_seconds(self.under(zero), self.held, (dense, routed)) for zero in self.zero]
        by_field = np.array(
            [[np.broadcast_to(x, self.held.dense.shape) for x in field] for field in zip(*every, strict=True)]
        )
        return np.moveaxis(by_field, 1, 2).reshape(len(by_field), len(self.kinds), -1)

    def under(self, zero: int) -> Job:
        """The job of the rows with that ZeRO stage."""
        return replace(self.job, layout=replace(self.job.layout, zero=zero))  # type: ignore[arg-type]

    def _held(self, kinds: list[Kind]) -> LocalNumel:
        """Parameters of each kind of stage before ZeRO shards them: [kind, row]."""
        job, routed = self.job, bool(self.job.model.experts)
        dense, mixed = layer_parameters(job, routed=False), layer_parameters(job, routed=routed)
        first, last = ends_parameters(job)
        own, experts = [], []
        for plain, more, begins, ends in kinds:
            tied = begins and job.model.tied_embeddings
            own.append(plain * dense.dense + more * mixed.dense + begins * first + (ends and not tied) * last)
            experts.append(more * mixed.experts + 0.0 * first)
        return LocalNumel(np.array(own), np.array(experts))

    def index(self, split: StageSplit) -> list[int]:
        """Where the kinds of a split are."""
        return [self.kinds[kind] for kind in split.kinds]

    def traffic(self, split: StageSplit, rows: Array) -> DataSeconds:
        """Of the stages of a split: [kind, row]."""
        return DataSeconds(*np.take(self.data[:, self.index(split)], rows, axis=-1))

    def memory(self, split: StageSplit, rows: Array) -> tuple[Array, Array, Array]:
        """Bytes of parameters, gradients and optimizer, of gathered parameters, and of cast ones: [kind of rank, row]."""
        key = id(split)
        if key not in self._states:
            self._states[key] = self._all_states(split)
        fixed, moving, cast = (np.take(part, rows, axis=-1) for part in self._states[key])
        return fixed, moving, cast

    def _all_states(self, split: StageSplit) -> tuple[Array, Array, Array]:
        index = self.index(split)
        held = LocalNumel(split.ranks @ self.held.dense[index], split.ranks @ self.held.experts[index])
        fixed, moving, cast = [], [], []
        for zero in self.zero:
            job = self.under(zero)
            owners = states(job, held)
            gathered = owners.pop("gathered")
            if zero == 3:
                gathered = gathered + gathered_layers(job)
            fixed.append(np.broadcast_to(sum(owners.values()), held.dense.shape))
            moving.append(np.broadcast_to(gathered, held.dense.shape))
            cast.append(np.broadcast_to(cast_copies(job, held), held.dense.shape))
        return np.concatenate(fixed, axis=1), np.concatenate(moving, axis=1), np.concatenate(cast, axis=1)

    def data_at(self, split: StageSplit, row: int, zero: int) -> list[DataSeconds]:
        """Of every kind of stage of a split, as plain numbers."""
        index, column = self.index(split), self.zero.index(zero) * self.size + row
        return [DataSeconds(*d) for d in self.data[:, index, column].T.tolist()]


def transfers(job: Job, sizes: Sizes) -> tuple[Array, Array, Array]:
    """Of each layout: seconds between two stages, bytes of logits, and of buffers."""
    every = replace(job, layout=sizes.into(job.layout), microbatch=sizes.microbatch.astype(float))
    return hop_seconds(every), loss_bytes(every), buffers(every)


def _unique(*columns: Array) -> tuple[list[Array], Array]:
    """The different rows of some columns, as columns of floats, and which of them each row is."""
    code = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, which = np.unique(column, return_inverse=True)
        code = code * len(values) + which
    _, first, back = np.unique(code, return_index=True, return_inverse=True)
    return [column[first].astype(float) for column in columns], back.ravel()


def _at(value: Any, row: int) -> float:
    return float(value[row]) if isinstance(value, np.ndarray) and value.ndim else float(value)
