"""Where a rank of a run stands: its index along every axis, the pipeline stages it holds, and the parameters of those as they
lie on it before ZeRO shares them. What the trainer's `parallel/` decides with tensors, in numbers and without torch.

Two more groupings follow from the axes: `zero` is shard x context, the ranks that share parameters; `expert_shard` those of
them that share an expert's. `sequence` is context x tensor, the ranks that hold pieces of one sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from shardwise.plan.cost.job import job_of
from shardwise.plan.cost.layer_memory import layer_kept
from shardwise.plan.cost.stages import layers_of_stages
from shardwise.run import ModelConfig, Run
from shardwise.run.derive import chunks_loss, keeps_compute_copies, planned_on_gpu, shard_dim, uses_fp8_all_gather
from shardwise.schedules import SPLIT_BACKWARD, Schedule, cached_schedule, fewer_rounds

WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number."""
SCALE = 4
"""Bytes of a scale of numbers in 8 bits."""


@dataclass(frozen=True)
class Weight:
    """A parameter as a rank holds it before sharding."""

    shape: tuple[int, ...]
    cut: int | None = None
    """The dimension that is cut over the tensor ranks."""
    routed: bool = False
    """Belongs to the routed experts."""
    product: bool = False
    """A matrix of a layer whose whole part on a rank is multiplied at once."""

    @property
    def numbers(self) -> int:
        """How many."""
        return math.prod(self.shape)

    def shard(self, ranks: int) -> int:
        """Numbers in a shard: rows are dealt out in equal pieces, the last ones padded; experts by whichever dimension is even."""
        length, rest = self._dealt(ranks)
        return -(-length // ranks) * rest

    def own(self, ranks: int, rank: int) -> int:
        """Numbers of a rank's shard without the padding."""
        length, rest = self._dealt(ranks)
        return piece(length, ranks, rank) * rest

    def dealt_along(self, ranks: int) -> int:
        """The dimension that is dealt out."""
        return shard_dim(self.shape, ranks) if self.routed else 0

    def _dealt(self, ranks: int) -> tuple[int, int]:
        """The length of that dimension, and of all others together."""
        dim = self.dealt_along(ranks)
        return self.shape[dim], math.prod(self.shape[:dim] + self.shape[dim + 1 :])


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: its number, its layers, and whether it has the embedding and the head."""

    number: int
    layers: range
    first: bool
    last: bool


def piece(length: int, ranks: int, rank: int) -> int:
    """Rows of a rank when they are dealt out in equal pieces, rounded up."""
    rows = -(-length // ranks)
    return max(0, min(rows, length - rank * rows))


@dataclass(frozen=True)
class Place:
    """One rank of a run."""

    run: Run
    rank: int

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Ranks in a group, by grouping."""
        lay = self.run.layout
        zero = lay.shard * lay.context
        return dict(
            pipeline=lay.pipeline, replicate=lay.replicate, shard=lay.shard, context=lay.context, tensor=lay.tensor,
            zero=zero, expert_shard=zero // lay.expert, expert=lay.expert, sequence=lay.context * lay.tensor, world=lay.world,
        )  # fmt: skip

    def index(self, group: str) -> int:
        """This rank's place in its group; ranks lie as pipeline x replicate x shard x context x tensor."""
        lay = self.run.layout
        zero = lay.shard * lay.context
        stride, size = {
            "tensor": (1, lay.tensor),
            "context": (lay.tensor, lay.context),
            "shard": (lay.tensor * lay.context, lay.shard),
            "zero": (lay.tensor, zero),
            "expert": (lay.tensor, lay.expert),
            "expert_shard": (lay.tensor * lay.expert, zero // lay.expert),
            "replicate": (lay.tensor * zero, lay.replicate),
            "pipeline": (lay.world // lay.pipeline, lay.pipeline),
        }[group]
        return self.rank // stride % size

    @cached_property
    def tokens(self) -> int:
        """Of a microbatch, on a context rank."""
        return self.run.train.microbatch * self.run.train.seq_len // self.run.layout.context

    @cached_property
    def width(self) -> int:
        """Bytes of an activation."""
        return WIDTHS[self.run.train.dtype]

    @cached_property
    def fused(self) -> bool:
        """Whether norms and attention have the kernels of a GPU."""
        return planned_on_gpu(self.run)

    @cached_property
    def chunked(self) -> bool:
        """Whether the loss is made of some tokens at a time."""
        return chunks_loss(self.run, gpu=self.fused)

    @cached_property
    def keeps_compute_copies(self) -> bool:
        """Whether the layers' matrices have copies in the dtype of their products, kept from step to step."""
        return keeps_compute_copies(self.run, gpu=self.fused)

    @cached_property
    def wide(self) -> int:
        """Bytes of a parameter or gradient as it is held, and of what 16 bits would spoil."""
        return max(4, self.width)

    def uses_fp8_all_gather(self, weight: Weight, ranks: int) -> bool:
        """Whether a parameter is gathered in 8 bits from its shards over so many ranks."""
        return weight.product and uses_fp8_all_gather(self.run, weight.shape[0], weight.shape[1], ranks)

    def gathered_shard(self, weight: Weight, ranks: int) -> int:
        """Bytes of a parameter's shard as it is gathered: with a scale a row, where it has those."""
        if not self.uses_fp8_all_gather(weight, ranks):
            return weight.shard(ranks) * self.width
        scales = SCALE * weight.shape[0] // ranks if self.run.train.fp8 == "rowwise" else 0
        return weight.shard(ranks) + scales

    @property
    def reduced(self) -> int:
        """Bytes of a number of a gradient while it is added over ranks that share parameters, or hold copies of them."""
        return WIDTHS[self.run.train.reduce_dtype] if self.width < 4 else self.wide

    @property
    def uses_ddp(self) -> bool:
        """Whether ranks differ in nothing but their samples: then the copies are DistributedDataParallel's."""
        return self.sizes["replicate"] == self.sizes["world"] > 1 and not self.run.layout.offload

    @property
    def shared(self) -> bool:
        """Whether `fully_shard` holds the parameters."""
        over = self.sizes["zero"] > 1 or self.sizes["replicate"] > 1 or self.run.layout.offload
        return over and not self.uses_ddp

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule computes gradients of inputs and of weights apart."""
        lay = self.run.layout
        nothing_to_put_off = (lay.schedule, lay.pipeline, self.run.accumulation) == ("dualpipe-v", 1, 1)
        return lay.schedule in SPLIT_BACKWARD and not nothing_to_put_off

    @property
    def schedule(self) -> Schedule:
        """The lists of the pipeline's actions, cut to some rounds: for what is asked of them here more say nothing new, but
        where the last round of an interleaved schedule is not full, which moves every round before it."""
        lay, count = self.run.layout, self.run.accumulation
        if lay.schedule != "interleaved" or count % lay.pipeline == 0:
            count = fewer_rounds(lay.pipeline, count, 3)
        return cached_schedule(lay.schedule, lay.pipeline, count, lay.stages_per_rank)

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The pipeline rank of every stage: dealt round, or down the ranks and up again."""
        lay = self.run.layout
        if lay.schedule in ("zb-v", "dualpipe-v") and lay.pipeline > 1:
            return (*range(lay.pipeline), *reversed(range(lay.pipeline)))
        return tuple(stage % lay.pipeline for stage in range(lay.pipeline * lay.stages_per_rank))

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Those of this rank, in the order of the network."""
        ranges = layers_of_stages(self.run)
        last, mine = len(ranges) - 1, self.index("pipeline")
        return tuple(
            Stage(n, layers, n == 0, n == last) for n, layers in enumerate(ranges) if self.placement[n] == mine
        )

    def runs_dry(self, stage: Stage) -> bool:
        """Whether a stage at some time before its last backward pass has no microbatch between its passes."""
        actions = self.schedule.ranks[self.index("pipeline")]
        kinds = [a.kind for a in actions if a.stage == stage.number and a.kind != "W"]
        depth = 0
        for kind in kinds[:-1]:
            depth += 1 if kind == "F" else -1
            if not depth:
                return True
        return False

    def routed(self, layer: int) -> bool:
        """Whether a layer is a mixture of experts."""
        return bool(self.run.model.experts) and layer >= self.run.model.dense_layers

    @property
    def mixtures(self) -> int:
        """MoE layers of this rank."""
        return sum(self.routed(layer) for stage in self.stages for layer in stage.layers)

    def layers(self) -> Iterator[tuple[int, frozenset[str]]]:
        """The layers of this rank, each with the parts of it that the backward pass computes again: of `block`,
        `attention` and `ffn`. Every n-th counts within a stage, as in the trainer."""
        for stage in self.stages:
            again = self._repeated(stage)
            for layer in stage.layers:
                yield layer, again.get(layer, frozenset())

    def _repeated(self, stage: Stage) -> dict[int, frozenset[str]]:
        lay = self.run.layout
        if lay.recompute == "budget":
            return dict.fromkeys(self._over_budget(stage), frozenset({"block"}))
        parts = {
            "full": frozenset({"block"}),
            "attention": frozenset({"attention"}),
            "operations": frozenset(lay.recompute_operations) - {"norm"},
        }.get(lay.recompute, frozenset())
        return dict.fromkeys(stage.layers[:: lay.recompute_every], parts)

    def _over_budget(self, stage: Stage) -> list[int]:
        """Layers repeated to keep within the budget, by the plan's count of what a layer keeps; the trainer asks here too."""
        run = self.run
        whole = replace(run, layout=replace(run.layout, recompute="none", recompute_budget=0.0))
        kept = {routed: _layer_kept(whole, routed) for routed in {self.routed(n) for n in stage.layers}}
        entering = self.tokens * run.model.hidden * self.width / run.layout.tensor
        total = sum(kept[self.routed(n)] for n in stage.layers)
        repeated = []
        for layer in sorted(stage.layers, key=lambda n: -kept[self.routed(n)]):
            if total <= run.layout.recompute_budget * 2**30:
                break
            total += entering - kept[self.routed(layer)]
            repeated.append(layer)
        return repeated

    def layer_weights(self, routed: bool) -> tuple[Weight, ...]:
        """The parameters of one layer, in the order the network holds them."""
        m = self.run.model
        attention = _latent(self) if m.attention == "latent" else _grouped(self)
        ffn = _mixture(self) if routed else _feed_forward(self, m.ffn)
        return (*_norm(m), *attention, *_norm(m), *ffn)

    def outer_weights(self, stage: Stage) -> tuple[Weight, ...]:
        """The parameters of a stage outside of its layers. A tied head on another stage than the embedding is a copy."""
        m = self.run.model
        vocabulary = Weight((piece(m.vocab, self.run.layout.tensor, self.index("tensor")), m.hidden), cut=0)
        found: list[Weight] = []
        if stage.first:
            found.append(vocabulary)
            if m.position == "learned":
                found.append(Weight((m.max_positions, m.hidden)))
        if stage.last:
            found.extend(_norm(m))
            if not (m.tied_embeddings and stage.first):
                found.append(vocabulary)
        return tuple(found)

    def weights(self, *, outer: bool = True) -> Iterator[tuple[int, Weight]]:
        """Every parameter of this rank, alike ones together, and how many there are of each; `outer` also those outside of the
        layers."""
        for routed in (False, True):
            count = sum(self.routed(layer) == routed for stage in self.stages for layer in stage.layers)
            if count:
                yield from ((count, weight) for weight in self.layer_weights(routed))
        for stage in self.stages if outer else ():
            yield from ((1, weight) for weight in self.outer_weights(stage))


@lru_cache(maxsize=64)
def _layer_kept(run: Run, routed: bool) -> float:
    """What the plan says that a layer of a run keeps, remembered: every stage of every rank asks, for every budget tried."""
    return layer_kept(job_of(run), routed=routed)


def _norm(model: ModelConfig) -> tuple[Weight, ...]:
    return (Weight((model.hidden,)),) * (2 if model.norm == "layernorm" else 1)


def _linear(
    place: Place, rows: int, columns: int, *, by: str = "", bias: bool = False, some: bool = False
) -> Iterator[Weight]:
    """A matrix from `columns` to `rows` numbers, cut `by` rows or columns of its stored form, and its bias; a rank may use
    `some` of its rows only."""
    t = place.run.layout.tensor
    if by == "rows":
        yield Weight((rows // t, columns), cut=0, product=True)
    elif by == "columns":
        yield Weight((rows, columns // t), cut=1, product=True)
    else:
        yield Weight((rows, columns), product=not some)
    if bias:
        yield Weight((rows // t,), cut=0) if by == "rows" else Weight((rows,))


def _grouped(place: Place) -> Iterator[Weight]:
    m = place.run.model
    q, kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
    # Fewer heads than ranks: all of them on each rank.
    dealt = "rows" if m.kv_heads >= place.run.layout.tensor else ""
    yield from _linear(place, q, m.hidden, by="rows", bias=m.bias != "none")
    for _ in "kv":
        yield from _linear(place, kv, m.hidden, by=dealt, bias=m.bias != "none", some=not dealt)
    yield from _linear(place, m.hidden, q, by="columns", bias=m.bias == "all")
    if m.qk_norm:
        yield from (Weight((m.head_dim,)), Weight((m.head_dim,)))


def _latent(place: Place) -> Iterator[Weight]:
    m = place.run.model
    if m.q_rank:
        yield from _linear(place, m.q_rank, m.hidden)
        yield Weight((m.q_rank,))
    yield from _linear(place, m.heads * m.head_dim, m.q_rank or m.hidden, by="rows")
    yield from _linear(place, m.kv_rank + m.rope_dim, m.hidden)
    yield Weight((m.kv_rank,))
    yield from _linear(place, m.heads * (m.nope_dim + m.v_dim), m.kv_rank, by="rows")
    yield from _linear(place, m.hidden, m.heads * m.v_dim, by="columns")


def _feed_forward(place: Place, width: int) -> Iterator[Weight]:
    m = place.run.model
    for _ in range(2 if m.gated else 1):
        yield from _linear(place, width, m.hidden, by="rows", bias=m.bias == "all")
    yield from _linear(place, m.hidden, width, by="columns", bias=m.bias == "all")


def _mixture(place: Place) -> Iterator[Weight]:
    m, lay = place.run.model, place.run.layout
    yield Weight((m.experts, m.hidden))
    cut = lay.tensor > 1 and lay.expert_tensor
    held, width = m.experts // lay.expert, m.expert_ffn // (lay.tensor if cut else 1)
    for _ in ("gate", "up"):
        yield Weight((held, width, m.hidden), cut=1 if cut else None, routed=True)
    yield Weight((held, m.hidden, width), cut=2 if cut else None, routed=True)
    if m.shared_experts:
        yield from _feed_forward(place, m.shared_experts * m.expert_ffn)
