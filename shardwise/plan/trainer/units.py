"""What `fully_shard` gathers and reduces together: the units of the parameters outside the layers, what the head's gradient takes,
and the secondary shards of the layers (`parallel/shard.py`)."""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.plan.trainer.rank import PlannedParameter, PlannedRank, Stage
from shardwise.run.derive import chunk_bytes, chunk_rows, gathers_embedding_apart, gathers_head_apart


def outer_units(planned: PlannedRank, stage: Stage) -> list[tuple[tuple[PlannedParameter, ...], bool]]:
    """Those of a stage by unit, in the order in which gradients are reduced; and whether a unit is freed behind each forward pass
    and not gathered again."""
    every = planned.outer_parameters(stage)
    if not gathers_embedding_apart(planned.run):
        return [(every, False)]
    embedding = tuple(p for p in every if p.entry.name == "embed.weight")
    alone = gathers_head_apart(planned.run, gpu=planned.fused)
    head = tuple(p for p in every if alone and p.entry.name == "head.weight")
    rest = tuple(p for p in every if p not in (*embedding, *head))
    return [(head, False), (rest, False), (embedding, True)]


def tokens_of_chunk(planned: PlannedRank) -> int:
    """Tokens whose logits a chunked loss computes at a time: the rank with the most of the vocabulary decides."""
    most = -(-planned.run.model.vocab // planned.size("tensor"))
    return chunk_rows(planned.tokens, most * planned.width, chunk_bytes(planned.run))


def head_gradient_width(planned: PlannedRank, head: PlannedParameter) -> int:
    """Bytes of an element of the head's gradient as a chunked loss makes it: in high precision where chunks add to it, where the
    head is held so, and in float16, whose range the sum over tokens may exceed."""
    once = tokens_of_chunk(planned) >= planned.tokens
    narrow = once and planned.is_sharded and planned.run.train.dtype == "bfloat16"
    return planned.width if narrow else planned.high_width


def head_shrinks(planned: PlannedRank) -> int:
    """Bytes by which that gradient is smaller once `fully_shard` has it: in the compute dtype."""
    stage = planned.stages[-1]
    if not (stage.last and planned.chunked and planned.is_sharded):
        return 0
    head = planned.vocabulary(stage)
    return head.numel * (head_gradient_width(planned, head) - planned.width) * head.learns


def head_sent(planned: PlannedRank) -> float:
    """Bytes that arrive of that gradient and of their sum, where it is exchanged by itself."""
    stage = planned.stages[-1]
    if not (planned.is_sharded and stage.last and gathers_head_apart(planned.run, gpu=planned.fused)):
        return 0.0
    head = planned.vocabulary(stage)
    arrived, ranks = head.shard_numel(planned.size("zero")), planned.size("zero")
    return float(arrived * (ranks * planned.width + planned.reduce_width) * head.learns)


def head_gathered(planned: PlannedRank) -> float:
    """Bytes of the head where it is gathered by itself: they are freed when its gradient is there, before the layers' are."""
    stage = planned.stages[-1]
    if not (planned.is_sharded and stage.last and gathers_head_apart(planned.run, gpu=planned.fused)):
        return 0.0
    head, ranks = planned.vocabulary(stage), planned.size("zero")
    return float(planned.gathered_shard(head, ranks) * ranks)


def secondary_ranks(planned: PlannedRank, parameter: PlannedParameter) -> int:
    """How many ranks a layer's parameter has secondary shards over; 1 if it has none."""
    lay = planned.run.layout
    if not parameter.entry.routed:
        return lay.secondary_shard
    return 1 if parameter.shard_dim(planned.size(parameter.group)) else lay.expert_secondary_shard


def secondary_bytes(planned: PlannedRank, parameters: Iterable[PlannedParameter]) -> int:
    """Bytes of the secondary shards of parameters that were gathered for a forward pass."""
    if planned.run.layout.secondary_shard <= 1:  # most runs; a search calls this for thousands of layers
        return 0
    ranks = ((p, planned.size(p.group), secondary_ranks(planned, p)) for p in parameters)
    return sum(p.shard_numel(every) * every // few for p, every, few in ranks if few > 1) * planned.width
