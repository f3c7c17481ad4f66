"""One rank of a run as the trainer sets it up, without torch: its coordinates, its pipeline stages, what it recomputes, and the
parameters it holds before ZeRO shards them. What `parallel/` decides with tensors; both read the same tables
(`run/parameters.py`, `run/coordinates.py`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from shardwise.plan.cost.flops import layers_of_stages
from shardwise.plan.trainer.budgeted import recomputed
from shardwise.run import Run
from shardwise.run.axes import SPLIT_BACKWARD, V_SHAPED
from shardwise.run.coordinates import RankCoordinates
from shardwise.run.derive import chunks_loss, keeps_compute_copies, planned_on_gpu, shard_dim, uses_fp8_all_gather
from shardwise.run.parameters import Parameter, first_parameters, last_parameters, layer_parameters, shard_length
from shardwise.run.sections.adapter import AdapterConfig
from shardwise.run.sections.objective import FACTS, ObjectiveFacts, facts_of, targets_of
from shardwise.run.teacher import teacher_run
from shardwise.schedules import PASSES, Schedule, cached_schedule, fewer_rounds

WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "uint8": 1}
"""Bytes of an element."""
SCALE = 4
"""Bytes of a scale of fp8 values."""


def reference_run(run: Run) -> Run:
    """The run of a frozen network beside the trained one, which may be a teacher with sizes of its own: sharded as ZeRO-3, since
    nothing is kept for a backward pass."""
    if FACTS[run.objective.kind].teacher:
        run = teacher_run(run)
    layout = replace(run.layout, zero=3, recompute="none", recompute_budget=0.0)
    return replace(run, layout=layout, adapter=AdapterConfig())


@dataclass(frozen=True)
class PlannedParameter:
    """A parameter as a rank holds it before sharding: its entry in the table, and what the tensor and expert axes leave of it."""

    entry: Parameter
    shape: tuple[int, ...]
    tensor_dim: int | None = None
    """The dimension that the tensor axis has cut."""
    replicated_kv: bool = False
    """Keys or values of fewer heads than tensor ranks: the rank holds all of them and uses the rows of one head."""

    @property
    def numel(self) -> int:
        """Elements on the rank."""
        return math.prod(self.shape)

    @property
    def multiplied_numel(self) -> int:
        """Weights in them that a GEMM reads."""
        if not self.entry.multiplied:
            return 0
        numel = self.numel * self.entry.packed
        return numel // self.entry.kv_heads if self.replicated_kv else numel

    @property
    def group(self) -> str:
        """The grouping of ranks that ZeRO shards it over."""
        return "expert_shard" if self.entry.routed else "zero"

    @property
    def is_gemm_weight(self) -> bool:
        """Whether all that a rank holds of it is the matrix of a `Linear`."""
        return self.entry.is_linear and not self.replicated_kv

    @property
    def learns(self) -> bool:
        """Whether it is trained."""
        return not self.entry.frozen

    def shard_numel(self, ranks: int) -> int:
        """Elements of a shard: equal shares of the rows, padded; of experts, of whichever dimension divides."""
        length, rest = self._sharded(ranks)
        return -(-length // ranks) * rest

    def own_numel(self, ranks: int, rank: int) -> int:
        """Elements of a rank's shard without the padding."""
        length, rest = self._sharded(ranks)
        return shard_length(length, ranks, rank) * rest

    def own_shape(self, ranks: int, rank: int) -> tuple[int, ...]:
        """The shape of a rank's shard without the padding."""
        dim = self.shard_dim(ranks)
        return (*self.shape[:dim], shard_length(self.shape[dim], ranks, rank), *self.shape[dim + 1 :])

    def shard_dim(self, ranks: int) -> int:
        """The dimension that is sharded."""
        return shard_dim(self.shape, ranks) if self.entry.routed else 0

    def _sharded(self, ranks: int) -> tuple[int, int]:
        """The length of that dimension, and of all others together."""
        dim = self.shard_dim(ranks)
        return self.shape[dim], math.prod(self.shape[:dim] + self.shape[dim + 1 :])


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
        """Where it stands in the layout."""
        return RankCoordinates(self.run.layout, self.rank)

    def size(self, group: str) -> int:
        """Ranks in a group."""
        return self.coordinates.size(group)

    def index(self, group: str) -> int:
        """This rank's index in its group."""
        return self.coordinates.index(group)

    @cached_property
    def tokens(self) -> int:
        """Of a microbatch, on a context rank."""
        return self.run.train.microbatch * self.run.train.seq_len // self.run.layout.context

    @property
    def local_tokens(self) -> int:
        """Of those, on a tensor rank between the matrices, where the sequence is cut too."""
        return self.tokens // self.run.layout.tensor

    @property
    def residual(self) -> int:
        """Bytes of the residual stream of a microbatch between two stages."""
        return self.local_tokens * self.run.model.hidden * self.width

    @cached_property
    def width(self) -> int:
        """Bytes of an activation's element."""
        return WIDTHS[self.run.train.dtype]

    @cached_property
    def fused(self) -> bool:
        """Whether norms and attention have the kernels of a GPU."""
        return planned_on_gpu(self.run)

    def norm_saves_input(self, centered: bool) -> bool:
        """Whether a norm saves its input as it is; an RMSNorm without a kernel saves what it makes of 16 bits in float32."""
        return centered or self.fused or self.width >= 4

    @property
    def objective(self) -> ObjectiveFacts:
        """What is known of the run's objective."""
        return facts_of(self.run.objective)

    @property
    def targets(self) -> int:
        """Tokens of each place whose log-probabilities the loss is made of."""
        return targets_of(self.run.objective, self.run.model.vocab)

    @cached_property
    def chunked(self) -> bool:
        """Whether the loss is made of some tokens at a time, with its gradients on the way."""
        return chunks_loss(self.run, gpu=self.fused) and not self.objective.logprobs and not self.objective.scores

    @cached_property
    def keeps_compute_copies(self) -> bool:
        """Whether the layers' matrices have compute copies, kept from step to step."""
        return keeps_compute_copies(self.run, gpu=self.fused)

    @cached_property
    def high_width(self) -> int:
        """Bytes of an element in high precision: of parameters and gradients as they are held, and of what 16 bits would spoil."""
        return max(4, self.width)

    def held_width(self, parameter: PlannedParameter) -> int:
        """Bytes of a parameter's element as it is held: a frozen one in the dtype of the arithmetic, or in its own."""
        if parameter.entry.dtype:
            return WIDTHS[parameter.entry.dtype]
        return self.high_width if parameter.learns else self.width

    def casts(self, parameter: PlannedParameter) -> bool:
        """Whether a parameter is cast where it is used: held in high precision, and not cast as it is gathered."""
        return parameter.learns and self.width < self.high_width and not self.is_sharded

    @property
    def reduce_width(self) -> int:
        """Bytes of a gradient's element while it is added over ranks."""
        return WIDTHS[self.run.train.reduce_dtype] if self.width < 4 else self.high_width

    @property
    def uses_ddp(self) -> bool:
        """Whether ranks differ in nothing but their samples: then the replicas are DistributedDataParallel's."""
        return self.sharding_replicas == self.run.layout.world > 1 and not self.run.layout.offload

    @cached_property
    def sharding_replicas(self) -> int:
        """Replicas that PyTorch's wrappers add gradients over; 1 where these exchange them by themselves."""
        return 1 if self.run.layout.replicas_apart else self.size("replicate")

    @cached_property
    def is_sharded(self) -> bool:
        """Whether `fully_shard` holds the parameters."""
        over = self.size("zero") > 1 or self.sharding_replicas > 1 or self.run.layout.offload
        return over and not self.uses_ddp

    def sharding(self, parameter: PlannedParameter) -> tuple[int, int]:
        """Over how many ranks a parameter is sharded, and the index of this one among them."""
        return (self.size(parameter.group), self.index(parameter.group)) if self.is_sharded else (1, 0)

    def uses_fp8_all_gather(self, parameter: PlannedParameter, ranks: int) -> bool:
        """Whether a parameter is gathered in fp8 from its shards over so many ranks."""
        return parameter.is_gemm_weight and uses_fp8_all_gather(self.run, parameter.shape[0], parameter.shape[1], ranks)

    def gathered_shard(self, parameter: PlannedParameter, ranks: int) -> int:
        """Bytes of a parameter's shard as it is gathered, with the scales of its rows where it has those."""
        numel = parameter.shard_numel(ranks)
        if not self.uses_fp8_all_gather(parameter, ranks):
            return numel * (self.held_width(parameter) if parameter.entry.dtype else self.width)
        return numel + (SCALE * parameter.shape[0] // ranks if self.run.train.fp8 == "rowwise" else 0)

    def prefetched_shard(self, stage: Stage) -> int:
        """Bytes of a shard of the layer that `fully_shard` prefetches behind the last layer of a backward pass (see `traffic.py`).
        First and last stages end in what is outside of the layers, and one layer is its own last: both are gathered still. A rank
        that has no one to gather from copies a layer only when it is used. Asynchronous pipelines prefetch for no other pass."""
        if stage.first or stage.last or len(stage.layers) < 2 or self.size("zero") == 1 or self.run.layout.asynchronous:
            return 0
        layer, ranks = self.layer_parameters(self.run.model.is_moe(stage.layers[-1])), self.size("zero")
        return sum(self.gathered_shard(p, ranks) for p in layer if p.group == "zero")

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule computes gradients of inputs and of weights apart."""
        lay = self.run.layout
        nothing_deferred = (("dualpipe-v", 1, 1), ("dualpipe", 2, 2))
        size = lay.schedule, lay.pipeline, self.run.accumulation
        return lay.schedule in SPLIT_BACKWARD and size not in nothing_deferred

    @property
    def schedule(self) -> Schedule:
        """The lists of the pipeline's actions, cut to a few rounds: more say nothing new here. But where the last round of an
        interleaved schedule is not full it moves every round before it, so that one stays whole."""
        lay, count = self.run.layout, self.run.accumulation
        if lay.schedule != "interleaved" or count % lay.pipeline == 0:
            count = fewer_rounds(lay.pipeline, count, 3)
        return cached_schedule(lay.schedule, lay.pipeline, count, lay.stages_per_rank)

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The pipeline rank of every stage: round robin, or down the ranks and back up."""
        lay = self.run.layout
        if lay.schedule in V_SHAPED and lay.pipeline > 1:
            return (*range(lay.pipeline), *reversed(range(lay.pipeline)))
        return tuple(stage % lay.pipeline for stage in range(lay.pipeline * lay.stages_per_rank))

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of this rank, in the order of the network."""
        lay, mine = self.run.layout, self.index("pipeline")
        own = (
            Stage(n, layers, *lay.has_ends(n))
            for n, layers in enumerate(layers_of_stages(self.run))
            if self.placement[n] == mine
        )
        return tuple(sorted(own, key=lambda stage: stage.number % lay.distinct_stages))

    @cached_property
    def kinds(self) -> tuple[tuple[bool, bool, int, int], ...]:
        """Of each stage whether it is the first or the last, its layers, and how many of these are MoE layers, which come after the
        dense ones: stages that are equal in this hold the same."""
        is_moe, has_moe = self.run.model.is_moe, bool(self.run.model.experts)
        counts = (sum(map(is_moe, stage.layers)) if has_moe else 0 for stage in self.stages)
        return tuple((s.first, s.last, len(s.layers), moe) for s, moe in zip(self.stages, counts, strict=True))

    @cached_property
    def dry_stages(self) -> frozenset[int]:
        """Numbers of the stages that at some time before their last backward pass have no microbatch between their passes."""
        depth = dict.fromkeys((stage.number for stage in self.stages), 0)
        empty, dry = set[int](), set[int]()
        for kind, stage, _ in self.schedule.ranks[self.index("pipeline")]:
            if kind == "F":
                depth[stage] += 1
            elif kind in PASSES:
                depth[stage] -= 1
                if stage in empty:  # and here comes another
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
        """The layers of this rank, each with the parts of it that are recomputed in the backward pass: of `block`, `attention` and
        `ffn`, or single tensors (`cost/rematerialization.py`). Every n-th counts within a stage, as in the trainer; a budget is
        the rank's, of all its stages together."""
        lay = self.run.layout
        saves = self.norm_saves_input(self.run.model.norm == "layernorm")
        # What nobody saves is not recomputed: the norm's input, but for the norm.
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
        """What a budget is for: the rank's layers, and the bytes that enter each."""
        entering = self.tokens * self.run.model.hidden * self.width / self.run.layout.tensor
        return self.run, [layer for stage in self.stages for layer in stage.layers], entering

    def layers(self) -> Iterable[tuple[int, frozenset[str]]]:
        """The same, one by one."""
        return self.recomputed.items()

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
        """The same without their names."""
        return tuple(self._layer_tables[moe].values())

    def first_parameters(self, stage: Stage) -> tuple[PlannedParameter, ...]:
        """The parameters of a stage before its layers. On another stage than the embedding, a tied head is a copy of it, which the
        module holds in the embedding's place."""
        entries = first_parameters(self.run.model, self.run.adapter)
        copied = stage.last and not stage.first and self.run.model.tied_embeddings
        return self.local(entries if stage.first else entries[:1] if copied else ())

    def outer_parameters(self, stage: Stage) -> tuple[PlannedParameter, ...]:
        """The parameters of a stage outside of its layers."""
        last = self.local(last_parameters(self.run.model, self.run.adapter)) if stage.last else ()
        return (*self.first_parameters(stage), *last)

    def vocabulary(self, stage: Stage) -> PlannedParameter:
        """The matrix of a stage that is cut by vocabulary: the head where it has one, else the embedding."""
        return next(
            p for p in reversed(self.outer_parameters(stage)) if p.entry.name in ("head.weight", "embed.weight")
        )

    def parameters(
        self, *, outer: bool = True, stages: tuple[Stage, ...] = ()
    ) -> Iterator[tuple[int, PlannedParameter]]:
        """Every parameter of this rank, or of some stages, those of like layers together with their count; `outer`: also those
        outside of the layers."""
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
    """The same, remembered for the many questions about one rank: what it derives is derived once."""
    return PlannedRank(run, rank)
