"""Times and bytes of the layouts of a search, computed once for each distinct case.

Millions of layouts have few different layers: a layer's time depends only on tensor, context, expert and microbatch, parameter
traffic only on tensor, replicate and expert. So these are tables, filled by the planner's own formulas with arrays in place of
sizes, and a layout is a row of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from shardwise.plan.cost.constants import constants_of
from shardwise.plan.cost.job import Job, overlapped, sharded_parts
from shardwise.plan.cost.memory import buffers, gathered_layers, layer_activations, states
from shardwise.plan.cost.operations import embedding, head, layer, residual_bytes
from shardwise.plan.cost.ops import OpList
from shardwise.plan.cost.parameters import LocalNumel, cast_copies, ends_parameters, layer_parameters
from shardwise.plan.cost.passes import ModuleCost, NetworkCost, passes_at_one_clock
from shardwise.plan.search.space import Choices, Sizes, distinct
from shardwise.plan.time.data import DataSeconds, data_seconds
from shardwise.plan.time.step import hop_seconds
from shardwise.run.axes import BIDIRECTIONAL, LOOPED, SPLIT_BACKWARD, V_SHAPED
from shardwise.run.derive import logit_columns

Array = Any

Kind = tuple[int, int, bool, bool, int]
"""A kind of stage: dense layers, MoE layers, whether it has the embedding, whether it has the head; and the layers of its rank
where these share a recompute budget, else 0."""


@dataclass(frozen=True)
class StageSplit:
    """How a pipeline splits the layers: kinds of stages, and kinds of ranks by how many stages of each kind they hold."""

    kinds: tuple[Kind, ...]
    stages: tuple[int, ...]
    """The kind of each stage."""
    ranks: Array
    """[kinds of ranks, kinds of stages]"""
    earliest: tuple[int, ...]
    """The first rank of each kind, which in most schedules holds the most."""
    latest: tuple[int, ...]
    pipeline: int

    @cached_property
    def parts(self) -> Array:
        """The number of dense layers, MoE layers, embeddings and heads of each kind of stage."""
        return np.array(self.kinds, dtype=float)[:, :4]

    @cached_property
    def counts(self) -> Array:
        """The number of stages of each kind."""
        return np.bincount(self.stages, minlength=len(self.kinds)).astype(float)


def stage_split(job: Job, pipeline: int, schedule: str, chunks: int) -> StageSplit:
    """How one schedule splits the layers."""
    layout = replace(job.layout, pipeline=pipeline, schedule=schedule, chunks=chunks)  # type: ignore[arg-type]
    layers = replace(job, layout=layout).stage_layers
    places = layout.placement
    shared = [0] * pipeline
    for rank, own in zip(places, layers, strict=True) if layout.recompute_budget else ():
        shared[rank] += sum(own)
    kinds: dict[Kind, int] = {}
    stages = [
        kinds.setdefault((*own, *layout.has_ends(n), shared[rank]), len(kinds))
        for n, (rank, own) in enumerate(zip(places, layers, strict=True))
    ]
    held = np.zeros((pipeline, len(kinds)))
    np.add.at(held, (places, stages), 1.0)
    ranks, first, back = np.unique(held, axis=0, return_index=True, return_inverse=True)
    latest = [int(np.flatnonzero(back.ravel() == n)[-1]) for n in range(len(ranks))]
    return StageSplit(tuple(kinds), tuple(stages), ranks, tuple(first.tolist()), tuple(latest), pipeline)


def split_key(pipeline: int, schedule: str, chunks: int) -> tuple[int, int, bool, bool]:
    """The values that a split depends on."""
    if pipeline == 1 and schedule not in LOOPED:
        return 1, 1, False, False
    v = schedule in V_SHAPED
    return pipeline, chunks if schedule in LOOPED else 1 + v, v, schedule in BIDIRECTIONAL


class LayerTable:
    """Times and memory of the network's modules, for each distinct (tensor, context, expert, microbatch), number of microbatches
    of gradient accumulation, and set of parameters that `fully_shard` handles."""

    def __init__(self, job: Job, sizes: Sizes, choices: Choices, expert_tensor: bool) -> None:
        added = job.global_batch // (sizes.microbatch * sizes.replicate * sizes.shard)
        # The pipeline decides how many layers share a rank's budget, and ZeRO whether they save casts of their weights.
        more = (sizes.pipeline, sizes.shard) if "budget" in choices.recompute else ()
        devices = sizes.replicate * sizes.shard * sizes.context * sizes.tensor * sizes.pipeline
        sharded = sharded_parts(sizes.into(job.layout), devices)
        keys, self.row = distinct(sizes.tensor, sizes.context, sizes.expert, sizes.microbatch, added, *sharded, *more)
        t, c, e, b, added, dense, experts, *ranks = keys
        self.size = len(t)
        replicas = job.global_batch / (b * added)
        layout = replace(job.layout, tensor=t, context=c, expert=e, expert_tensor=expert_tensor, replicate=replicas)
        layout = replace(layout, pipeline=ranks[0], shard=ranks[1], replicate=replicas / ranks[1]) if ranks else layout
        self.job = replace(job, layout=layout, microbatch=b, sharded=(dense, experts))
        self.choices, self.has_moe = choices, bool(job.model.experts)
        self.has_dense = not self.has_moe or job.model.dense_layers > 0

    def _under(self, recompute: str, method: str = "ring", overlap: bool = False) -> Job:
        """The job of all rows with these choices."""
        chosen: dict[str, Any] = dict(recompute=recompute, context_method=method, async_tensor=overlap)
        return replace(self.job, layout=replace(self.job.layout, **chosen))

    def _jobs(self, recompute: str, method: str = "ring", overlap: bool = False) -> Iterator[Job]:
        """The same job for each row by itself, where a formula does not take arrays."""
        job = self._under(recompute, method, overlap)
        for n in range(self.size):
            sizes: dict[str, Any] = {key: float(getattr(job.layout, key)[n]) for key in ROW}
            assert job.sharded is not None
            sharded = float(job.sharded[0][n]), float(job.sharded[1][n])
            layout = replace(job.layout, **sizes)
            yield replace(job, layout=layout, microbatch=float(job.microbatch[n]), sharded=sharded)

    @cached_property
    def networks(self) -> dict[tuple[str, str, bool], NetworkCost]:
        """Costs by recompute mode, context method and overlap, which cuts layers that are recomputed (`compiled_as_one`)."""
        found = {}
        for how in product(self.choices.recompute, self.choices.context_method, self.choices.async_tensor):
            if self.job.memory.swaps:  # the swapped tensors are chosen layer by layer
                found[how] = _joined([NetworkCost.of(job) for job in self._jobs(*how)])
            elif how[0] in ("full", "budget") or not how[2] or len(self.choices.async_tensor) == 1:
                found[how] = NetworkCost.added(self._under(*how), *self._modules[how[1]])
            else:
                found[how] = found[*how[:2], False]
        return found

    @cached_property
    def _modules(self) -> dict[str, tuple[OpList, OpList | None, OpList | None, OpList]]:
        """The ops of the modules, by context method."""
        found = {}
        for method in self.choices.context_method:
            job = self._under("none", method)
            dense = layer(job, routed=False) if self.has_dense else None
            found[method] = embedding(job), dense, layer(job, routed=True) if self.has_moe else None, head(job)
        return found

    def network(self, recompute: str, method: str, overlap: bool, rank_layers: int) -> NetworkCost:
        """The network on a rank where `rank_layers` layers share a recompute budget; 0: no budget is shared."""
        if not rank_layers:
            return self.networks[recompute, method, overlap]
        under = replace(self._under(recompute, method, overlap), layers_of_rank=rank_layers)
        return NetworkCost.added(under, *self._modules[method])

    def seconds(self, methods: Iterable[tuple[str, bool]]) -> Array:
        """Seconds of forward, backward-input and backward-weight of dense layer, MoE layer, embedding and head:
        [pass, module, method and overlap, recompute mode and row]."""
        constants = constants_of(self.job)
        methods = list(methods)
        result = np.zeros((3, 4, len(methods), len(self.choices.recompute), self.size))
        for a, recompute in enumerate(self.choices.recompute):
            for b, (method, overlap) in enumerate(methods):
                network = self.networks[recompute, method, overlap]
                job = overlapped(self._under(recompute, method), overlap)
                dense = job.model.dense_layers if job.model.experts else job.model.layers
                counts = dense, job.model.layers - dense, 1, 1
                every = zip(counts, (network.dense, network.moe, network.embedding, network.head), strict=True)
                there = {n: (count, module) for n, (count, module) in enumerate(every) if module is not None}
                for n, own in zip(there, passes_at_one_clock(job, [*there.values()], constants), strict=True):
                    result[:, n, b, a] = own.forward, own.backward_input, own.backward_weight
        return result.reshape(3, 4, len(methods), -1)

    @cached_property
    def saved(self) -> tuple[Array, Array]:
        """Bytes saved for the backward pass by dense layer, MoE layer, embedding and the transfer to the next stage, [module,
        recompute mode and row]; and the bytes held temporarily while a layer is recomputed, [recompute mode and row]."""
        many = len(self.choices.recompute)
        saved, recomputed = np.zeros((4, many, self.size)), np.zeros((many, self.size))
        for a, recompute in enumerate(self.choices.recompute):
            job = self._under(recompute)
            for n, there in enumerate((self.has_dense, self.has_moe)):
                if there and self.job.memory.swaps:
                    saved[n, a] = [float(layer_activations(one, routed=bool(n))[0]) for one in self._jobs(recompute)]
                elif there:
                    saved[n, a], more = layer_activations(job, routed=bool(n))
                    recomputed[a] = np.maximum(recomputed[a], more)
            saved[2, a] = sum(op.saved for op in embedding(job))
            saved[3, a] = residual_bytes(job)
        return saved.reshape(4, -1), recomputed.ravel()


ROW = ("tensor", "context", "expert", "replicate")
"""Sizes that differ between rows of the layer table, besides the microbatch."""


def _joined(rows: list[NetworkCost]) -> NetworkCost:
    """The networks of single rows, joined into one with arrays."""

    def joined(modules: tuple[ModuleCost | None, ...]) -> Any:
        known = [module for module in modules if module is not None]
        if not known:
            return None
        seconds = np.array([[[float(x) for x in line] for line in one.seconds] for one in known])
        launches = np.array([[float(x) for x in one.launches] for one in known])
        return ModuleCost([list(line) for line in np.moveaxis(seconds, 0, -1)], list(launches.T))

    every = zip(*((one.embedding, one.dense, one.moe, one.head) for one in rows), strict=True)
    return NetworkCost(*map(joined, every))


class StateBytes(NamedTuple):
    """Bytes of a rank's parameters, and of the tensors made from them."""

    stays: Array
    """Parameters and optimizer state."""
    gradients: Array
    """After the reduction, as each rank keeps them."""
    whole_gradients: Array
    """Before the reduction, where gradients are sharded at all."""
    gathered: Array
    cast: Array


class ParameterTable:
    """Traffic and memory of parameters for one pipeline size, for each distinct (tensor, replicate, expert)."""

    def __init__(
        self, job: Job, sizes: Sizes, choices: Choices, splits: Iterable[StageSplit], expert_tensor: bool
    ) -> None:
        keys, self.row = distinct(sizes.tensor, sizes.replicate, sizes.expert, sizes.shard * sizes.context)
        t, r, e, z = keys
        layout = replace(job.layout, tensor=t, replicate=r, expert=e, shard=z, context=1, expert_tensor=expert_tensor)
        layout = replace(layout, pipeline=int(sizes.pipeline[0]))
        self.zero, self.devices = choices.zero, job.layout.replicate
        self.job = replace(job, layout=layout, sharded=sharded_parts(layout, self.devices))
        self.kinds = {kind: n for n, kind in enumerate({k: None for one in splits for k in one.kinds})}
        self.held = self._held(list(self.kinds))
        self.size = len(t)
        self._states: dict[int, StateBytes] = {}
        self._seconds: dict[str, tuple[Array, list[bool]]] = {}

    def _data(self, schedule: str) -> tuple[Array, list[bool]]:
        """Traffic and optimizer seconds of each kind of stage: [field of DataSeconds, kind, ZeRO stage and row]; and which fields
        are not all zero: most belong to Muon, compressed gradients or bidirectional pipelines."""
        if schedule not in self._seconds:
            dense, routed, *ends = (np.array([[float(kind[n])] for kind in self.kinds]) for n in range(4))
            every = [
                data_seconds(self.under(zero, schedule), self.held, (dense, routed), (ends[0], ends[1]))
                for zero in self.zero
            ]
            by_field = np.array(
                [[np.broadcast_to(x, self.held.dense.shape) for x in field] for field in zip(*every, strict=True)]
            )
            data = np.moveaxis(by_field, 1, 2).reshape(len(by_field), len(self.kinds), -1)
            self._seconds[schedule] = data, [bool(field.any()) for field in data]
        return self._seconds[schedule]

    def under(self, zero: int, schedule: str = "1f1b") -> Job:
        """The job of all rows with this ZeRO stage and schedule."""
        return replace(self.job, layout=replace(self.job.layout, zero=zero, schedule=schedule))  # type: ignore[arg-type]

    def _held(self, kinds: list[Kind]) -> LocalNumel:
        """Parameters of each kind of stage before ZeRO shards them: [kind, row]."""
        job, routed = self.job, bool(self.job.model.experts)
        dense, mixed = layer_parameters(job, routed=False), layer_parameters(job, routed=routed)
        first, last = ends_parameters(job)
        own, experts = [], []
        for plain, more, begins, ends, _ in kinds:
            tied = begins and job.model.tied_embeddings
            own.append(plain * dense.dense + more * mixed.dense + begins * first + (ends and not tied) * last)
            experts.append(more * mixed.experts + 0.0 * first)
        return LocalNumel(np.array(own), np.array(experts))

    def index(self, split: StageSplit) -> list[int]:
        """The table indices of the kinds of a split."""
        return [self.kinds[kind] for kind in split.kinds]

    def traffic(self, split: StageSplit, schedule: str, rows: Array) -> DataSeconds:
        """Traffic of the stages of a split: [kind, row], or one column of zeros for a field that is always zero. One schedule
        stands for all that defer weight gradients, and one for all that do not."""
        alike = schedule if schedule in BIDIRECTIONAL else "zb-h1" if schedule in SPLIT_BACKWARD else "1f1b"
        index, (data, there) = self.index(split), self._data(alike)
        nothing = np.zeros((len(index), 1))
        return DataSeconds(
            *(
                np.take(field[index], rows, axis=-1) if some else nothing
                for field, some in zip(data, there, strict=True)
            )
        )

    def memory(self, split: StageSplit, rows: Array) -> StateBytes:
        """Bytes of a rank's parameters and of the tensors made from them: [kind of rank, row]."""
        key = id(split)
        if key not in self._states:
            self._states[key] = self._all_states(split)
        return StateBytes(*(np.take(part, rows, axis=-1) for part in self._states[key]))

    def _all_states(self, split: StageSplit) -> StateBytes:
        index = self.index(split)
        layers = (split.ranks @ split.parts[:, :2].sum(axis=1))[:, None]
        dense = split.ranks @ self.held.dense[index] + layers * _copied_keys(self.job)
        held = LocalNumel(dense, split.ranks @ self.held.experts[index])
        every = [self._states_under(zero, held, split) for zero in self.zero]
        shape = held.dense.shape
        return StateBytes(
            *(np.concatenate([np.broadcast_to(x, shape) for x in part], axis=1) for part in zip(*every, strict=True))
        )

    def _states_under(self, zero: int, held: LocalNumel, split: StageSplit) -> StateBytes:
        job = self.under(zero)
        framework, lay = job.framework, job.layout
        owners = states(replace(job, layout=replace(lay, zero=3)), held)
        sharded = job.fully_sharded[0]
        whole = held.dense + held.experts
        if lay.offload:
            whole_gradients, cast = 0.0 * whole, 0.0 * whole
        else:
            whole_gradients, cast = (
                whole * framework.reduce_bytes * job.learned * sharded,
                cast_copies(job, held),
            )
        if zero < 3:
            gathered = whole * framework.gather_bytes * sharded
        else:
            # The current layers, and those that `fully_shard` prefetched for other stages; without a pipeline also
            # embedding and head.
            gathered = gathered_layers(job) * (1.0 + 0.0 * whole)
            if lay.secondary_shard > 1:
                few = lay.expert_secondary_shard
                kept = held.dense / lay.secondary_shard + held.experts / few * (few > 1)
                gathered = gathered + kept * framework.gather_bytes
            if split.pipeline == 1:
                first, last = ends_parameters(job)
                ends = first if job.model.tied_embeddings else last  # an embedding that is not the head too is freed
                gathered = gathered + ends * framework.gather_bytes * sharded
            else:
                one = layer_parameters(job, routed=bool(job.model.experts))
                inner = [float(d + r > 1 and not first and not last) for d, r, first, last, _ in split.kinds]
                more = np.maximum(split.ranks @ np.array(inner) - 1.0, 0.0)[:, None]
                gathered = gathered + more * one.dense * framework.gather_bytes * (job.zero_ranks > 1)
        stays = owners["parameters"] + owners["optimizer"]
        if job.muon and not lay.offload:  # Muon keeps only one moment of the layers' matrices
            outer = sum(
                end * (split.ranks @ split.parts[:, n])[:, None]
                for n, end in zip((2, 3), ends_parameters(job), strict=True)
            )
            inner = held.dense - outer
            sharded = states(replace(job, layout=replace(lay, zero=3)), LocalNumel(inner, held.experts))
            stays = stays - sharded["optimizer"] / 2
        return StateBytes(stays, owners["gradients"], whole_gradients, gathered, cast)


class Rows(NamedTuple):
    """Values computed for each size by itself."""

    hop: Array
    """Seconds of a transfer between two stages."""
    buffers: Array
    """Bytes."""
    loss: Array
    """Bytes that the loss holds while it is computed, besides its saved tensors."""
    loss_saved: Array
    """Bytes that the loss saves for each microbatch."""
    passing: Array
    """Bytes of the gradients that flow through a layer while it is recomputed."""


def rows_of(job: Job, sizes: Sizes) -> Rows:
    """As the trainer does it (`trainer/state.py`): a chunked loss saves its gradients, another the probabilities."""
    every = replace(job, layout=sizes.into(job.layout), microbatch=sizes.microbatch.astype(float))
    m, high, rows = job.model, max(4.0, job.width), every.rows
    columns = m.head_rows / sizes.tensor
    entering = rows * m.hidden * job.width  # an unchunked loss saves this rank's shard of it
    chunked, lines = job.framework.chunked_loss, logit_columns(np.ceil(columns))
    matrix = 0.0 if job.adapter.used else columns * m.hidden * high
    padded = (lines != np.ceil(columns)) * lines * m.hidden * job.width
    chunks = np.ceil(rows * columns * job.width / job.chunk_bytes)
    loss = np.where(chunked, rows * lines * job.width / chunks + padded, 2.0 * rows * columns * high)
    narrow = (chunks == 1) * np.asarray(every.fully_sharded[0]) * (job.dtype == "bfloat16")  # the head's gradient
    made = matrix * (1.0 - narrow * (1.0 - job.width / high)) + entering
    saved = np.where(chunked, made, rows * columns * high + entering / sizes.tensor)
    if job.logprobs:  # chunks of logits, also in high precision, and the head's gradient; its input is saved
        some = rows / np.ceil(rows * columns * high / job.chunk_bytes)
        loss, saved = some * (lines * job.width + columns * high * (job.width < high)) + matrix + padded, entering
    width = np.maximum(m.ffn, m.expert_ffn * m.experts_per_token) / sizes.tensor
    passing = (2.0 if m.gated else 1.0) * rows * width * job.width * (job.framework.kernels != "compiled")
    if m.experts and job.framework.kernels == "compiled":  # experts of other ranks are not
        routed, matrix = rows / sizes.tensor * m.experts_per_token, m.experts / sizes.expert * m.expert_ffn * m.hidden
        most = np.maximum(2.0 * routed * m.expert_ffn + matrix, routed * m.hidden + 3.0 * matrix)
        passing = passing + most * job.width * (sizes.expert > 1)
    return Rows(hop_seconds(every), buffers(every), loss, saved, passing)


def _copied_keys(job: Job) -> Array:
    """Extra key and value parameters of a layer where tensor ranks outnumber KV heads: each rank then holds all of them."""
    m, t = job.model, job.layout.tensor
    if m.attention != "grouped":
        return 0.0 * t
    return 2.0 * m.hidden * m.kv_heads * m.head_dim * (1.0 - 1.0 / t) * (t > m.kv_heads)
