"""One rank of a run as the trainer sets it up, without torch: its coordinates, pipeline stages, recomputed parts, and parameters
before ZeRO. `parallel/` makes the same decisions with tensors, from the same `run/parameters.py` and `run/ranks/coordinates.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from shardwise.plan.cost.stages import layers_of_stages
from shardwise.plan.trainer.budgeted import recomputed
from shardwise.run import Run
from shardwise.run.derive import (
    chunks_loss,
    exchanges_gradients,
    keeps_compute_copies,
    logit_columns,
    planned_on_gpu,
    shard_dim,
    uses_fp8_all_gather,
)
from shardwise.run.dtypes import DTYPE_BYTES
from shardwise.run.parameters import Parameter, first_parameters, last_parameters, layer_parameters, shard_length
from shardwise.run.ranks.coordinates import RankCoordinates
from shardwise.run.second_models.teacher import teacher_run
from shardwise.run.sections.adapter import AdapterConfig
from shardwise.run.sections.objective import FACTS, ObjectiveFacts, facts_of, targets_of
from shardwise.schedules import PASSES, Schedule, cached_schedule, fewer_rounds

SCALE = 4
"""Bytes of an fp8 scale."""


def first_ranks(run: Run) -> range:
    """The first rank of every pipeline rank: shards are assigned from there on, so none of its peers holds more."""
    return range(0, run.layout.world, run.layout.world // run.layout.pipeline)


def reference_run(run: Run) -> Run:
    """The run of the frozen network beside the trained one: a reference, or a teacher with its own sizes. It is sharded as in
    ZeRO-3, since it keeps nothing for a backward pass."""
    if FACTS[run.objective.kind].teacher:
        run = teacher_run(run)
    layout = replace(run.layout, zero=3, recompute="none", recompute_budget=0.0)
    return replace(run, layout=layout, adapter=AdapterConfig())


@dataclass(frozen=True)
class PlannedParameter:
    """A parameter as a rank holds it before ZeRO: its entry in the table, and its shape after the tensor and expert axes cut it."""

    entry: Parameter
    shape: tuple[int, ...]
    tensor_dim: int | None = None
    """The dimension that the tensor axis cuts."""
    replicated_kv: bool = False
    """A key or value projection with fewer heads than tensor ranks: the rank holds all heads and uses the rows of one."""

    @property
    def numel(self) -> int:
        """Elements on the rank."""
        return math.prod(self.shape)

    @property
    def multiplied_numel(self) -> int:
        """Elements that a GEMM reads, counted after unpacking."""
        if not self.entry.multiplied:
            return 0
        numel = self.numel * self.entry.packed
        return numel // self.entry.kv_heads if self.replicated_kv else numel

    @property
    def group(self) -> str:
        """The group of ranks that ZeRO shards it over."""
        return "expert_shard" if self.entry.routed else "zero"

    @property
    def is_gemm_weight(self) -> bool:
        """Whether it is the matrix of a `Linear`, and the rank uses all that it holds of it."""
        return self.entry.is_linear and not self.replicated_kv

    @property
    def learns(self) -> bool:
        """Whether it is trained."""
        return not self.entry.frozen

    def shard_numel(self, ranks: int) -> int:
        """Elements of a padded shard: an equal share of the rows; for experts, of the first dimension that divides evenly."""
        dim = self.shard_dim(ranks)
        return -(-self.shape[dim] // ranks) * math.prod(self.shape[:dim] + self.shape[dim + 1 :])

    def own_numel(self, ranks: int, rank: int) -> int:
        """Elements of a rank's shard without the padding."""
        return math.prod(self.own_shape(ranks, rank))

    def own_shape(self, ranks: int, rank: int) -> tuple[int, ...]:
        """The shape of a rank's shard without the padding."""
        dim = self.shard_dim(ranks)
        return (*self.shape[:dim], shard_length(self.shape[dim], ranks, rank), *self.shape[dim + 1 :])

    def shard_dim(self, ranks: int) -> int:
        """The dimension that is sharded."""
        return shard_dim(self.shape, ranks) if self.entry.routed else 0


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: its number, its layers, and whether it has the embedding and the head."""

    number: int
    layers: range
    first: bool
    last: bool


@dataclass(frozen=True)
class PlannedRank:
    """One rank of a run."""

    run: Run
    rank: int

    @cached_property
    def coordinates(self) -> RankCoordinates:
        """Its coordinates in the layout."""
        return RankCoordinates(self.run.layout, self.rank)

    def size(self, group: str) -> int:
        """Ranks in a group."""
        return self.coordinates.size(group)

    def index(self, group: str) -> int:
        """This rank's index in its group."""
        return self.coordinates.index(group)

    @cached_property
    def tokens(self) -> int:
        """Tokens of a microbatch on a context rank."""
        return self.run.train.microbatch * self.run.train.seq_len // self.run.layout.context

    @property
    def local_tokens(self) -> int:
        """Tokens of a microbatch on a tensor rank between the GEMMs, where sequence parallelism cuts the sequence too."""
        return self.tokens // self.run.layout.tensor

    @property
    def residual(self) -> int:
        """Bytes of the residual stream of a microbatch between two stages."""
        return self.local_tokens * self.run.model.hidden * self.width

    @cached_property
    def width(self) -> int:
        """Bytes of an activation's element."""
        return DTYPE_BYTES[self.run.train.dtype]

    @cached_property
    def fused(self) -> bool:
        """Whether norms and attention use the fused GPU kernels."""
        return planned_on_gpu(self.run)

    def norm_saves_input(self, centered: bool) -> bool:
        """Whether a norm saves its input unchanged. An RMSNorm without a fused kernel saves a 16-bit input cast to float32."""
        return centered or self.fused or self.width >= 4

    @property
    def objective(self) -> ObjectiveFacts:
        """The facts about the run's objective."""
        return facts_of(self.run.objective)

    @property
    def targets(self) -> int:
        """Target tokens at each position whose log-probabilities the loss uses."""
        return targets_of(self.run.objective, self.run.model.vocab)

    @cached_property
    def chunked(self) -> bool:
        """Whether the loss runs over chunks of tokens and computes its gradients in the forward pass."""
        return chunks_loss(self.run, gpu=self.fused) and not self.objective.logprobs and not self.objective.scores

    @cached_property
    def keeps_compute_copies(self) -> bool:
        """Whether the layers' matrices have compute copies, kept from step to step."""
        return keeps_compute_copies(self.run, gpu=self.fused)

    @cached_property
    def exchanges_gradients(self) -> bool:
        """Whether shards send each other gradients of 16 bits and add them up."""
        return exchanges_gradients(self.run, gpu=self.fused)

    @cached_property
    def high_width(self) -> int:
        """Bytes of an element in high precision: of held parameters and gradients, and of values that need more than 16 bits."""
        return max(4, self.width)

    def held_width(self, parameter: PlannedParameter) -> int:
        """Bytes of a parameter's element as it is held; a frozen one has its own dtype, or else the compute dtype."""
        if parameter.entry.dtype:
            return DTYPE_BYTES[parameter.entry.dtype]
        return self.high_width if parameter.learns else self.width

    def casts(self, parameter: PlannedParameter) -> bool:
        """Whether a parameter is cast where it is used: it is held in high precision, and no all-gather casts it."""
        return parameter.learns and self.width < self.high_width and not self.is_sharded

    @property
    def logit_columns(self) -> int:
        """Columns of the logits of the last stage: a loss that takes them in chunks pads the vocabulary."""
        rows = self.vocabulary(self.stages[-1]).shape[0]
        return logit_columns(rows) if self.chunked or self.makes_logits_again else rows

    @property
    def makes_logits_again(self) -> bool:
        """Whether a loss of log-probabilities computes logits, in chunks, for the forward and for the backward pass."""
        return self.objective.logprobs and not self.run.train.invariant

    @property
    def reduce_width(self) -> int:
        """Bytes of a gradient's element while it is reduced over ranks."""
        return DTYPE_BYTES[self.run.train.reduce_dtype] if self.width < 4 else self.high_width

    @cached_property
    def is_sharded(self) -> bool:
        """Whether `fully_shard` holds the parameters."""
        return self.run.layout.is_sharded(self.size("zero"))

    def sharding(self, parameter: PlannedParameter) -> tuple[int, int]:
        """How many ranks a parameter is sharded over, and the index of this rank among them."""
        return (self.size(parameter.group), self.index(parameter.group)) if self.is_sharded else (1, 0)

    def uses_fp8_all_gather(self, parameter: PlannedParameter, ranks: int) -> bool:
        """Whether a parameter that is sharded over this many ranks is all-gathered in fp8."""
        return parameter.is_gemm_weight and uses_fp8_all_gather(self.run, parameter.shape[0], parameter.shape[1], ranks)

    def gathered_shard(self, parameter: PlannedParameter, ranks: int) -> int:
        """Bytes of a parameter's shard as it is all-gathered, with its row scales where it has any."""
        numel = parameter.shard_numel(ranks)
        if not self.uses_fp8_all_gather(parameter, ranks):
            return numel * (self.held_width(parameter) if parameter.entry.dtype else self.width)
        return numel + (SCALE * parameter.shape[0] // ranks if self.run.train.fp8 == "rowwise" else 0)

    def prefetched_shard(self, stage: Stage) -> int:
        """Bytes of a shard of the layer that `fully_shard` prefetches after the last layer of a backward pass (see `traffic.py`).
        0 on first and last stages, which end in parameters outside of the layers, and on a stage of one layer, which would prefetch
        itself: these are still gathered. 0 without other ranks to gather from: such a rank copies a layer only when it is used. 0
        in asynchronous pipelines, which prefetch nothing for another pass."""
        if stage.first or stage.last or len(stage.layers) < 2 or self.size("zero") == 1 or self.run.layout.asynchronous:
            return 0
        layer, ranks = self.layer_parameters(self.run.model.is_moe(stage.layers[-1])), self.size("zero")
        return sum(self.gathered_shard(p, ranks) for p in layer if p.group == "zero")

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule computes input gradients and weight gradients in separate actions."""
        lay = self.run.layout
        return lay.splits_backward and (lay.schedule, lay.pipeline, self.run.accumulation) != ("dualpipe", 2, 2)

    @property
    def schedule(self) -> Schedule:
        """The pipeline's action lists, cut to a few rounds, since more rounds add nothing new here. Exception: a partial last round
        of an interleaved schedule shifts every round before it, so that schedule is not cut."""
        lay, count = self.run.layout, self.run.accumulation
        if lay.schedule != "interleaved" or count % lay.pipeline == 0:
            count = fewer_rounds(lay.pipeline, count, 3)
        return cached_schedule(lay.schedule, lay.pipeline, count, lay.stages_per_rank)

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The pipeline rank of every stage."""
        return self.run.layout.placement

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of this rank, in the order of the network."""
        lay, mine, layers = self.run.layout, self.index("pipeline"), layers_of_stages(self.run)
        own = [n for n, rank in enumerate(self.placement) if rank == mine]
        own.sort(key=lambda n, distinct=lay.distinct_stages: n % distinct)  # type: ignore[misc]
        return tuple(Stage(n, layers[n], *lay.has_ends(n)) for n in own)

    @cached_property
    def kinds(self) -> tuple[tuple[bool, bool, int, int], ...]:
        """For each stage: whether it is the first, whether the last, its number of layers, and how many of these are MoE layers,
        which come after the dense ones. Stages with equal entries hold the same."""
        is_moe, has_moe = self.run.model.is_moe, bool(self.run.model.experts)
        counts = (sum(map(is_moe, stage.layers)) if has_moe else 0 for stage in self.stages)
        return tuple((s.first, s.last, len(s.layers), moe) for s, moe in zip(self.stages, counts, strict=True))

    @cached_property
    def dry_stages(self) -> frozenset[int]:
        """Numbers of the stages that at some time before their last backward pass have no microbatch in flight."""
        depth = dict.fromkeys((stage.number for stage in self.stages), 0)
        empty, dry = set[int](), set[int]()
        for kind, stage, _ in self.schedule.ranks[self.index("pipeline")]:
            if kind == "F":
                depth[stage] += 1
            elif kind in PASSES:
                depth[stage] -= 1
                if stage in empty:  # it had run empty, and runs again
                    dry.add(stage)
                if not depth[stage]:
                    empty.add(stage)
        return frozenset(dry)

    @cached_property
    def moe_layers(self) -> int:
        """MoE layers of this rank."""
        return sum(moe for _, _, _, moe in self.kinds)

    @cached_property
    def recomputed(self) -> dict[int, frozenset[str]]:
        """The layers of this rank, each with its parts that are recomputed in the backward pass: some of `block`, `attention` and
        `ffn`, or single tensors (`cost/rematerialization.py`). `recompute_every` counts layers within a stage, as in the trainer; a
        budget covers all stages of the rank together."""
        lay = self.run.layout
        saves = self.norm_saves_input(self.run.model.norm == "layernorm")
        # A tensor that no operation saves is not recomputed: the norm's input, unless the norm is recomputed from it.
        budget = recomputed(*self.of_budget)
        budgeted = {n: each if saves or "ffn_norm" in each else each - {"middle"} for n, each in budget.items()}
        parts = {
            "full": frozenset({"block"}),
            "attention": frozenset({"attention"}),
            "operations": frozenset(lay.recompute_operations) - {"norm"},
        }.get(lay.recompute, frozenset())
        return {
            layer: budgeted[layer] if budgeted else parts if n % lay.recompute_every == 0 else frozenset[str]()
            for stage in self.stages
            for n, layer in enumerate(stage.layers)
        }

    @property
    def of_budget(self) -> tuple[Run, list[int], float]:
        """The arguments of the functions in `budgeted.py`: the run, the rank's layers, and the bytes that enter each layer."""
        entering = self.tokens * self.run.model.hidden * self.width / self.run.layout.tensor
        return self.run, [layer for stage in self.stages for layer in stage.layers], entering

    def local(self, entries: tuple[Parameter, ...]) -> tuple[PlannedParameter, ...]:
        """Parameters of the table as this rank holds them."""
        return tuple(self._local(entry) for entry in entries)

    def _local(self, entry: Parameter) -> PlannedParameter:
        shape, cuts = list(entry.shape), entry.cuts(self.run.layout)
        for axis, dim in cuts:
            shape[dim] = shard_length(shape[dim], self.size(axis), self.index(axis))
        tensor_dim = next((dim for axis, dim in cuts if axis == "tensor"), None)
        return PlannedParameter(entry, tuple(shape), tensor_dim, entry.replicated_kv(self.run.layout.tensor))

    @cached_property
    def _layer_tables(self) -> dict[bool, dict[str, PlannedParameter]]:
        kinds = (False, True) if self.run.model.experts else (False,)
        tables = {moe: self.local(layer_parameters(self.run.model, moe, self.run.adapter)) for moe in kinds}
        return {moe: {p.entry.name: p for p in table} for moe, table in tables.items()}

    def layer_table(self, moe: bool) -> dict[str, PlannedParameter]:
        """The parameters of one layer by name, in the order of the module."""
        return self._layer_tables[moe]

    def layer_parameters(self, moe: bool) -> tuple[PlannedParameter, ...]:
        """The parameters of one layer, in the order of the module."""
        return tuple(self._layer_tables[moe].values())

    def first_parameters(self, stage: Stage) -> tuple[PlannedParameter, ...]:
        """The parameters of a stage before its layers. On a stage without the embedding, a tied head is a copy of the embedding,
        which the module holds as its own embedding."""
        entries = first_parameters(self.run.model, self.run.adapter)
        copied = stage.last and not stage.first and self.run.model.tied_embeddings
        return self.local(entries if stage.first else entries[:1] if copied else ())

    def outer_parameters(self, stage: Stage) -> tuple[PlannedParameter, ...]:
        """The parameters of a stage outside of its layers."""
        last = self.local(last_parameters(self.run.model, self.run.adapter)) if stage.last else ()
        return (*self.first_parameters(stage), *last)

    def vocabulary(self, stage: Stage) -> PlannedParameter:
        """The matrix of a stage that is cut by vocabulary: the head where it has one, else the embedding."""
        names = ("head.weight", "embed.weight")
        return next(p for p in reversed(self.outer_parameters(stage)) if p.entry.name in names)

    def parameters(
        self, *, outer: bool = True, stages: tuple[Stage, ...] = ()
    ) -> Iterator[tuple[int, PlannedParameter]]:
        """Every parameter of this rank, or of some of its stages; those of identical layers come once, with their count. `outer`:
        also those outside of the layers."""
        whole, stages = not stages or stages == self.stages, stages or self.stages
        layers = sum(len(stage.layers) for stage in stages)
        routed = self.moe_layers if whole else sum(self.run.model.is_moe(n) for stage in stages for n in stage.layers)
        for moe, count in ((False, layers - routed), (True, routed)):
            if count:
                yield from ((count, parameter) for parameter in self.layer_parameters(moe))
        for stage in stages if outer else ():
            if stage.first or stage.last:
                yield from ((1, parameter) for parameter in self.outer_parameters(stage))


@lru_cache(maxsize=8)
def planned_rank(run: Run, rank: int) -> PlannedRank:
    """A cached `PlannedRank`, so that what it derives is derived once for the many callers that ask about one rank."""
    return PlannedRank(run, rank)
