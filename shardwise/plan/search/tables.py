"""What the hardware says about the layouts of a search, asked once for each case that differs.

Millions of layouts share few layers: a layer's time depends on tensor, context, expert and microbatch alone, the traffic of
parameters on tensor, replicate and expert alone. So these are tables, filled by the planner's own formulas with arrays in
the place of sizes, and a layout is a row of each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from shardwise.hardware import collective_seconds
from shardwise.plan.cost.constants import constants_of
from shardwise.plan.cost.job import Job, overlapped
from shardwise.plan.cost.layer_memory import layer_activations
from shardwise.plan.cost.memory import GIB, buffers, gathered_layers, loss_bytes, states
from shardwise.plan.cost.operations import embedding, head, layer
from shardwise.plan.cost.ops import Tally, span
from shardwise.plan.cost.parameters import LocalNumel, cast_copies, ends_parameters, layer_parameters
from shardwise.plan.cost.passes import Piece, Pieces, passes
from shardwise.plan.search.space import LOOPED, V_SHAPED, Choices, Sizes
from shardwise.plan.time.step import DataSeconds, data_seconds, layers_by_stage

Array = Any

Kind = tuple[int, int, bool, bool]
"""Of a stage: dense layers, routed layers, whether it has the embedding, whether it has the head."""


@dataclass(frozen=True)
class Cut:
    """How a pipeline cuts the layers: kinds of stages, and kinds of ranks by how many stages of each kind they hold."""

    layers: tuple[tuple[int, int], ...]
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
        """How often each kind of stage has a dense layer, a routed one, the embedding and the head."""
        return np.array(self.kinds, dtype=float)

    @property
    def counts(self) -> Array:
        """Stages of each kind."""
        return np.bincount(self.stages, minlength=len(self.kinds)).astype(float)


def cut(job: Job, pipeline: int, schedule: str, chunks: int) -> Cut:
    """The cut of one schedule."""
    layout = replace(job.layout, pipeline=pipeline, schedule=schedule, chunks=chunks)  # type: ignore[arg-type]
    layers = layers_by_stage(replace(job, layout=layout))
    last = len(layers) - 1
    kinds: dict[Kind, int] = {}
    stages = [kinds.setdefault((d, r, n == 0, n == last), len(kinds)) for n, (d, r) in enumerate(layers)]
    held = np.zeros((pipeline, len(kinds)))
    for stage, kind in enumerate(stages):
        there = stage % pipeline if stage < pipeline or schedule not in V_SHAPED else last - stage
        held[there, kind] += 1
    ranks, first, back = np.unique(held, axis=0, return_index=True, return_inverse=True)
    latest = [int(np.flatnonzero(back.ravel() == n)[-1]) for n in range(len(ranks))]
    return Cut(tuple(layers), tuple(kinds), tuple(stages), ranks, tuple(first.tolist()), tuple(latest))


def cut_key(pipeline: int, schedule: str, chunks: int) -> tuple[int, int, bool]:
    """What a cut depends on."""
    if pipeline == 1 and schedule not in LOOPED:
        return 1, 1, False
    v = schedule in V_SHAPED
    return pipeline, chunks if schedule in LOOPED else 1 + v, v


class Layers:
    """Times and memory of the pieces of the network, by the different (tensor, context, expert, microbatch), and by how many
    microbatches' gradients are added up; beyond some that makes no difference."""

    MOST_ADDED = 32

    def __init__(self, job: Job, sizes: Sizes, choices: Choices, expert_tensor: bool) -> None:
        added = job.global_batch // (sizes.microbatch * sizes.replicate * sizes.shard)
        added = np.minimum(added, self.MOST_ADDED)
        keys, rows = _unique(sizes.tensor, sizes.context, sizes.expert, sizes.microbatch, added)
        self.row, self.size = rows, len(keys[0])
        t, c, e, b, added = keys
        copies = job.global_batch / (b * added)
        layout = replace(job.layout, tensor=t, context=c, expert=e, expert_tensor=expert_tensor, replicate=copies)
        self.job = replace(job, layout=layout, microbatch=b)
        self.choices, self.routed = choices, bool(job.model.experts)
        self.plain = not self.routed or job.model.dense_layers > 0

    def under(self, recompute: str, method: str = "ring") -> Job:
        """The job of the rows with these choices."""
        words: dict[str, Any] = dict(recompute=recompute, context_method=method)
        return replace(self.job, layout=replace(self.job.layout, **words))

    @cached_property
    def pieces(self) -> dict[tuple[str, str], Pieces]:
        """By recomputation and context method; the operations are the same under any recomputation."""
        found = {}
        for method in self.choices.context_method:
            job = self.under("none", method)
            tallies = [embedding(job), layer(job, routed=not self.plain), head(job)]
            mixed = layer(job, routed=True) if self.routed and self.plain else tallies[1] if self.routed else None
            for recompute in self.choices.recompute:
                found[recompute, method] = self._pieces(self.under(recompute, method), tallies, mixed)
        return found

    @staticmethod
    def _pieces(job: Job, tallies: list[Tally], mixed: Tally | None) -> Pieces:
        first, dense, last = (Tally(job, tally.entries) for tally in tallies)
        routed = None if mixed is None else Piece.of(Tally(job, mixed.entries))
        return Pieces(Piece.of(first, repeats=False), Piece.of(dense), routed, Piece.of(last, repeats=False))

    def seconds(self, methods: Iterable[tuple[str, bool]]) -> Array:
        """Forward, backward-input and backward-weight of dense layer, routed layer, embedding and head:
        [pass, piece, method and overlap, recomputation and row]."""
        constants = constants_of(self.job)
        methods = list(methods)
        result = np.zeros((3, 4, len(methods), len(self.choices.recompute), self.size))
        for a, recompute in enumerate(self.choices.recompute):
            for b, (method, overlap) in enumerate(methods):
                network = self.pieces[recompute, method]
                job = overlapped(self.under(recompute, method), overlap)
                order = (network.dense if self.plain else None, network.routed, network.embedding, network.head)
                for n, piece in enumerate(order):
                    if piece is not None:
                        own = passes(job, piece, constants)
                        result[:, n, b, a] = own.forward, own.backward_input, own.backward_weight
        return result.reshape(3, 4, len(methods), -1)

    @cached_property
    def kept(self) -> tuple[Array, Array]:
        """Bytes kept for the backward pass by dense layer, routed layer and embedding, [piece, recomputation and
        row]; and what recomputation holds for a moment, [recomputation and row]."""
        many = len(self.choices.recompute)
        kept, again = np.zeros((4, many, self.size)), np.zeros((many, self.size))
        for a, recompute in enumerate(self.choices.recompute):
            job = self.under(recompute)
            for n, there in enumerate((self.plain, self.routed)):
                if there:
                    kept[n, a], more = layer_activations(job, routed=bool(n))
                    again[a] = np.maximum(again[a], more)
            kept[2, a] = sum(entry.saved for entry in embedding(job).entries)
        return kept.reshape(4, -1), again.ravel()

    def piece_at(self, row: int, recompute: str, method: str) -> Pieces:
        """The pieces of one row, as plain numbers."""
        network = self.pieces[recompute, method]

        def at(piece: Piece | None) -> Piece | None:
            if piece is None:
                return None
            return Piece([[_at(x, row) for x in line] for line in piece.seconds], [_at(x, row) for x in piece.launches])

        return Pieces(*(at(p) for p in (network.embedding, network.dense, network.routed, network.head)))  # type: ignore[arg-type]


class Shares:
    """Traffic and memory of parameters on pipelines of one size, by the different (tensor, replicate, expert)."""

    def __init__(self, job: Job, sizes: Sizes, choices: Choices, cuts: Iterable[Cut], expert_tensor: bool) -> None:
        keys, self.row = _unique(sizes.tensor, sizes.replicate, sizes.expert, sizes.shard * sizes.context)
        t, r, e, z = keys
        layout = replace(job.layout, tensor=t, replicate=r, expert=e, shard=z, context=1, expert_tensor=expert_tensor)
        self.job, self.zero = replace(job, layout=layout), choices.zero
        self.kinds = {kind: n for n, kind in enumerate({k: None for one in cuts for k in one.kinds})}
        self.held = self._held(list(self.kinds))
        self.size = len(t)
        self._states: dict[int, tuple[Array, Array, Array]] = {}

    @cached_property
    def data(self) -> Array:
        """Traffic and optimizer of each kind of stage: [field of DataSeconds, kind, ZeRO stage and row]."""
        dense, routed = (np.array([[float(kind[n])] for kind in self.kinds]) for n in range(2))
        every = [data_seconds(self.under(zero), self.held, (dense, routed)) for zero in self.zero]
        by_field = np.array([[_wide(x, self.held.dense.shape) for x in field] for field in zip(*every, strict=True)])
        return np.moveaxis(by_field, 1, 2).reshape(len(by_field), len(self.kinds), -1)

    def under(self, zero: int) -> Job:
        """The job of the rows with that ZeRO stage."""
        return replace(self.job, layout=replace(self.job.layout, zero=zero))  # type: ignore[arg-type]

    def _held(self, kinds: list[Kind]) -> LocalNumel:
        """Parameters of each kind of stage before they are shared: [kind, row]."""
        job, routed = self.job, bool(self.job.model.experts)
        dense, mixed = layer_parameters(job, routed=False), layer_parameters(job, routed=routed)
        first, last = ends_parameters(job)
        own, experts = [], []
        for plain, more, begins, ends in kinds:
            tied = begins and job.model.tied_embeddings
            own.append(plain * dense.dense + more * mixed.dense + begins * first + (ends and not tied) * last)
            experts.append(more * mixed.experts + 0.0 * first)
        return LocalNumel(np.array(own), np.array(experts))

    def index(self, one: Cut) -> list[int]:
        """Where the kinds of a cut are."""
        return [self.kinds[kind] for kind in one.kinds]

    def traffic(self, one: Cut, rows: Array) -> DataSeconds:
        """Of the stages of a cut: [kind, row]."""
        return DataSeconds(*np.take(self.data[:, self.index(one)], rows, axis=-1))

    def memory(self, one: Cut, rows: Array) -> tuple[Array, Array, Array]:
        """Bytes of parameters, gradients and optimizer, of gathered parameters, and of cast ones: [kind of rank, row]."""
        key = id(one)
        if key not in self._states:
            self._states[key] = self._all_states(one)
        fixed, moving, cast = (np.take(part, rows, axis=-1) for part in self._states[key])
        return fixed, moving, cast

    def _all_states(self, one: Cut) -> tuple[Array, Array, Array]:
        index = self.index(one)
        held = LocalNumel(one.ranks @ self.held.dense[index], one.ranks @ self.held.experts[index])
        fixed, moving, cast = [], [], []
        for zero in self.zero:
            job = self.under(zero)
            owners = states(job, held)
            gathered = owners.pop("gathered")
            if zero == 3:
                gathered = gathered + gathered_layers(job, routed=bool(job.model.experts))
            fixed.append(_wide(sum(owners.values()), held.dense.shape))
            moving.append(_wide(gathered, held.dense.shape))
            cast.append(_wide(cast_copies(job, held), held.dense.shape))
        return np.concatenate(fixed, axis=1), np.concatenate(moving, axis=1), np.concatenate(cast, axis=1)

    def data_at(self, one: Cut, row: int, zero: int) -> tuple[list[LocalNumel], list[DataSeconds]]:
        """Of every kind of stage of a cut, as plain numbers."""
        index, column = self.index(one), self.zero.index(zero) * self.size + row
        held = zip(self.held.dense[index, row].tolist(), self.held.experts[index, row].tolist(), strict=True)
        return [LocalNumel(*h) for h in held], [DataSeconds(*d) for d in self.data[:, index, column].T.tolist()]


def moved(job: Job, sizes: Sizes) -> tuple[Array, Array, Array]:
    """Of each layout: seconds between two stages, bytes of logits, and of buffers."""
    whole = replace(job, layout=sizes.into(job.layout), microbatch=sizes.microbatch.astype(float))
    lay = whole.layout
    pieces = lay.tensor if job.stack.pipeline_pieces else 1
    size = whole.rows / pieces * job.model.hidden * job.width
    hop = collective_seconds(job.cluster, "send", size, *span(whole, "pipeline")) * (lay.pipeline > 1)
    return hop, loss_bytes(whole), buffers(whole)


def workspace(job: Job) -> tuple[float, float]:
    """Bytes that are always there, and the share that is added to what comes and goes (`memory.py`)."""
    return job.stack.context_gib * GIB, job.stack.fragmentation


def _unique(*columns: Array) -> tuple[list[Array], Array]:
    """The different rows of some columns, as columns of floats, and which of them each row is."""
    code = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, place = np.unique(column, return_inverse=True)
        code = code * len(values) + place
    _, first, back = np.unique(code, return_index=True, return_inverse=True)
    return [column[first].astype(float) for column in columns], back.ravel()


def _wide(value: Array, shape: tuple[int, ...]) -> Array:
    return np.broadcast_to(value, shape)


def _at(value: Any, row: int) -> float:
    return float(value[row]) if isinstance(value, np.ndarray) and value.ndim else float(value)
