"""Parameters of a rank by stage, before and after ZeRO shards them, for many layouts at once. Counts, not bytes.

The table of parameters (`run/parameters.py`) is summed once a model, by how parameters are cut; the rest are closed forms in the
sizes of a layout, which may be arrays.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from shardwise.plan.cost.flops import counted_parameters
from shardwise.plan.cost.job import Job, Number
from shardwise.plan.cost.ops import regroups_tensor
from shardwise.run import ModelConfig
from shardwise.run.parameters import Parameter, first_parameters, last_parameters
from shardwise.run.parameters import layer_parameters as layer_table


class LocalNumel(NamedTuple):
    """Parameters a tensor rank holds before ZeRO shards them: dense ones, and those of routed experts."""

    dense: Number
    experts: Number

    @property
    def total(self) -> Number:
        """Both."""
        return self.dense + self.experts


class _Sums(NamedTuple):
    """Elements of some parameters: not cut over tensor ranks, cut, cut by key/value head, and those of routed experts."""

    whole: int
    cut: int
    kv: int
    experts: int


def _sums(entries: tuple[Parameter, ...]) -> _Sums:
    sums = dict.fromkeys(_Sums._fields, 0)
    for entry in entries:
        cut = "whole" if entry.tensor_dim is None else "kv" if entry.kv_heads else "cut"
        sums["experts" if entry.routed else cut] += entry.numel
    return _Sums(**sums)


@cache
def _layer_sums(model: ModelConfig, moe: bool) -> _Sums:
    return _sums(layer_table(model, moe))


def layer_parameters(job: Job, *, routed: bool) -> LocalNumel:
    """The parameters of one layer on a rank."""
    m, lay = job.model, job.layout
    whole, cut, kv, experts = _layer_sums(m, routed)
    # With fewer heads than ranks each rank copies one head. This project's trainer holds all: see its exact account.
    copies = lay.tensor / m.kv_heads
    heads: Number = kv * (copies * (copies > 1) + (copies <= 1))
    held = experts / lay.expert
    return LocalNumel((cut + heads) / lay.tensor + whole, held / lay.tensor if lay.expert_tensor else held)


def ends_parameters(job: Job) -> tuple[Number, Number]:
    """Embedding (with a learned table of positions) and head (with the last norm), also where they are tied."""
    first, last = _sums(first_parameters(job.model)), _sums(last_parameters(job.model))
    head = job.model.head_rows * job.model.hidden
    return first.cut / job.layout.tensor + first.whole, head / job.layout.tensor + last.whole


def uncut_parameters(job: Job, layers: tuple[Number, Number], ends: tuple[Number, Number]) -> LocalNumel:
    """Of a stage's parameters those that every tensor rank of this trainer holds whole, with the gradient of some tokens or heads:
    norms, routers, key and value heads where these are fewer than ranks, experts without expert tensor parallelism."""
    m, lay = job.model, job.layout
    dense, experts = 0.0, 0.0
    for routed, count in enumerate(layers):
        if routed and not m.experts:
            continue
        sums = _layer_sums(m, bool(routed))
        dense = dense + count * (sums.whole + sums.kv * (lay.tensor > m.kv_heads))
        experts = experts + count * sums.experts / lay.expert * (not lay.expert_tensor)
    tables = first_parameters(m), last_parameters(m)
    return LocalNumel(
        dense + sum(there * _sums(table).whole for there, table in zip(ends, tables, strict=True)), experts
    )


def stage_parameters(job: Job, stages: list[tuple[float, float]]) -> list[LocalNumel]:
    """The parameters of each stage, given its dense and MoE layers. A tied head on another stage is a second copy."""
    dense, moe = layer_parameters(job, routed=False), layer_parameters(job, routed=bool(job.model.experts))
    first, last = ends_parameters(job)
    result = []
    for n, (dense_layers, moe_layers) in enumerate(stages):
        own = dense_layers * dense.dense + moe_layers * moe.dense
        begins, ends = job.layout.has_ends(n)
        if begins:
            own = own + first
        if ends and not (job.model.tied_embeddings and len(stages) == 1):
            own = own + last
        result.append(LocalNumel(own, moe_layers * moe.experts))
    return result


def zero_groups(job: Job) -> tuple[Number, Number]:
    """Ranks that a dense parameter is sharded over, and ranks that an expert is sharded over."""
    lay = job.layout
    zero = job.zero_ranks
    over = zero * (1 if lay.expert_tensor else lay.tensor) if regroups_tensor(job) else zero
    return zero, at_least_one(over / lay.expert)


def cast_copies(job: Job, held: LocalNumel) -> Number:
    """Bytes of the copies of all parameters that were cast for the GEMMs, where nothing is sharded."""
    framework = job.framework
    dense, experts = ((job.zero_ranks == 1) * 1.0,) * 2
    if framework.fully_shard:
        dense, experts = (1.0 - sharded for sharded in job.fully_sharded)
    casts = framework.casts_weights * (framework.parameter_bytes > framework.gather_bytes)
    return (held.dense * dense + held.experts * experts) * framework.gather_bytes * casts * job.learned


def checkpoint_bytes(job: Job) -> float:
    """Bytes of a checkpoint: everything trained and its moments, of which Muon has one for a matrix of a layer."""
    table = counted_parameters(job.model, job.adapter)
    kept = sum(n * p.numel * (3 - (job.muon and p.is_layer_matrix)) for n, p in table if not p.frozen)
    return kept * max(4.0, job.width)


def at_least_one(x: Number) -> Number:
    """The larger of a number, or of each in an array, and 1."""
    return x * (x > 1) + 1.0 * (x <= 1)
