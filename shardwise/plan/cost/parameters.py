"""Parameters of a rank: by stage, what is shared by ZeRO over which ranks. Counts, not bytes."""

from __future__ import annotations

from typing import Any, NamedTuple

from shardwise.plan.cost.flops import attention_parameters, feed_forward_parameters
from shardwise.plan.cost.job import Job
from shardwise.plan.cost.ops import regroups_tensor

Number = Any


class Held(NamedTuple):
    """Parameters a tensor rank holds before ZeRO shares them: dense ones, and those of routed experts."""

    dense: Number
    experts: Number


def layer_parameters(job: Job, *, routed: bool) -> Held:
    """One layer's share of a rank."""
    m, lay = job.model, job.layout
    norm = m.hidden * (2 if m.norm == "layernorm" else 1)
    matrices, small = attention_parameters(m)
    cut: Number = matrices
    whole = small + 2 * norm
    if m.attention == "latent":  # the compressions are small and not cut
        cut = matrices - m.hidden * (m.q_rank + m.kv_rank + m.rope_dim)
        whole += m.hidden * (m.q_rank + m.kv_rank + m.rope_dim)
    else:
        kv = 2 * m.hidden * m.kv_heads * m.head_dim
        copies = lay.tensor / m.kv_heads
        cut = matrices - kv + kv * (copies * (copies > 1) + (copies <= 1))
    if not routed:
        ffn, bias = feed_forward_parameters(m, m.ffn)
        return Held((cut + ffn) / lay.tensor + whole + bias, 0.0)
    expert = feed_forward_parameters(m, m.expert_ffn)[0]
    own = expert / lay.tensor if lay.expert_tensor else expert
    dense = (cut + m.shared_experts * expert) / lay.tensor + whole + m.experts * m.hidden
    return Held(dense, m.experts / lay.expert * own)


def ends_parameters(job: Job) -> tuple[Number, Number]:
    """Embedding (with a learned table of positions) and head (with the last norm)."""
    m, t = job.model, job.layout.tensor
    norm = m.hidden * (2 if m.norm == "layernorm" else 1)
    table = m.max_positions * m.hidden if m.position == "learned" else 0
    return m.vocab * m.hidden / t + table, m.vocab * m.hidden / t + norm


def stage_parameters(job: Job, stages: list[tuple[float, float]]) -> list[Held]:
    """Of each stage, given its dense and routed layers. A tied head on another stage is a second copy."""
    dense, routed = layer_parameters(job, routed=False), layer_parameters(job, routed=bool(job.model.experts))
    first, last = ends_parameters(job)
    result = []
    for n, (plain, mixed) in enumerate(stages):
        own = plain * dense.dense + mixed * routed.dense
        if n == 0:
            own = own + first
        if n == len(stages) - 1 and not (job.model.tied_embeddings and len(stages) == 1):
            own = own + last
        result.append(Held(own, mixed * routed.experts))
    return result


def zero_groups(job: Job) -> tuple[Number, Number]:
    """Ranks that share a dense parameter, and those that share an expert's."""
    lay = job.layout
    spread = lay.shard * lay.context
    over = spread * (1 if lay.expert_tensor else lay.tensor) if regroups_tensor(job) else spread
    return spread, _floor_one(over / lay.expert)


def cast_copies(job: Job, held: Held) -> Number:
    """Where nothing is shared: parameters that were cast for the products, all of them at a time."""
    alone = (
        (zero_groups(job)[0] == 1)
        * job.framework.casts_weights
        * (job.framework.parameter_bytes > job.framework.gather_bytes)
    )
    return (held.dense + held.experts) * job.framework.gather_bytes * alone


def _floor_one(x: Number) -> Number:
    return x * (x > 1) + 1.0 * (x <= 1)
