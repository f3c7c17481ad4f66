"""What the planner says twice agrees: once for any framework and many layouts at a time, once exactly for this trainer. Parameters
and FLOPs of a layer to the last one, saved activations as nearly as operations that share tensors allow. Networks are drawn
from a seed."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from dataclasses import replace
from typing import Any, get_args, get_type_hints
from unittest import mock

import numpy as np
import pytest

from shardwise.ledger import wire_bytes
from shardwise.plan.cost.job import job_of
from shardwise.plan.cost.memory import layer_saved
from shardwise.plan.cost.operations import layer
from shardwise.plan.cost.parameters import ends_parameters, layer_parameters
from shardwise.plan.cost.passes import CATEGORIES
from shardwise.plan.search import bubbles, space
from shardwise.plan.time.step import prepare
from shardwise.plan.trainer.rank import PlannedRank
from shardwise.plan.trainer.saved import saved
from shardwise.plan.trainer.traffic import traffic
from shardwise.plan.trainer.work import layer_gemms
from shardwise.run import LayoutConfig, Run, run_from_dict

LAYOUTS: list[dict[str, Any]] = [
    {}, dict(tensor=2), dict(tensor=4), dict(shard=4), dict(tensor=2, context=2, context_method="ulysses"), dict(shard=2, expert=2),
    dict(tensor=2, expert_tensor=True),
]  # fmt: skip


def drawn_run(seed: int, layout: dict[str, Any], *, tied: bool = False) -> Run:
    """A network of a few layers with parts chosen at random, on GPUs."""
    rng = random.Random(seed)
    model: dict[str, Any] = dict(layers=2, hidden=512, heads=8, vocab=1000, norm=rng.choice(["rmsnorm", "layernorm"]))
    model |= dict(kv_heads=rng.choice([2, 4, 8]), bias=rng.choice(["none", "qkv"]), qk_norm=rng.random() < 0.5)
    model |= dict(parallel_block=rng.random() < 0.3, tied_embeddings=tied)
    if rng.random() < 0.3:
        model |= dict(attention="latent", q_rank=rng.choice([0, 256]), kv_rank=128, nope_dim=64, rope_dim=32, v_dim=64)
        model |= dict(bias="none", qk_norm=False)
    if rng.random() < 0.4 or "expert" in layout:
        model |= dict(experts=8, experts_per_token=2, expert_ffn=512, shared_experts=rng.choice([0, 1]))
    train = dict(seq_len=1024, global_batch=16, microbatch=2, dtype="bfloat16", compile=False, expert_imbalance=1.0)
    return run_from_dict(dict(model=model, layout=layout, train=train, cluster=dict(chip="h100")))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_a_layer_counts_alike_in_closed_form_and_exactly(seed: int, layout: dict[str, Any]) -> None:
    run = drawn_run(seed, layout)
    job, rank, moe = job_of(run), PlannedRank(run, 0), bool(run.model.experts)
    table = rank.layer_parameters(moe)
    numel = layer_parameters(job, routed=moe)
    assert numel.experts == sum(p.numel for p in table if p.entry.routed)
    # Of keys and values with fewer heads than ranks, the closed form has one head: other programs hold no more.
    used = sum(p.numel // p.entry.kv_heads if p.replicated_kv else p.numel for p in table if not p.entry.routed)
    assert numel.dense == pytest.approx(used, rel=1e-12)
    flops = sum(float(np.max(entry.flops[0])) for entry in layer(job, routed=moe))
    exact = sum(gemm.flops for gemm in layer_gemms(rank, moe))
    assert flops == pytest.approx(exact, rel=1e-12)
    first, last = ends_parameters(job)
    outer = rank.outer_parameters(rank.stages[0])
    assert first + last == pytest.approx(sum(p.numel for p in outer), rel=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_a_layer_saves_about_what_its_operations_say(seed: int, layout: dict[str, Any]) -> None:
    run = drawn_run(seed, layout)
    stages = [PlannedRank(replace(run, model=replace(run.model, layers=n)), 0) for n in (2, 3)]
    two, three = (saved(rank, rank.stages[0]).whole for rank in stages)
    moe = bool(run.model.experts)
    # The closed form leaves out rows for experts that are held in two orders, and the heads that Ulysses exchanges.
    assert layer_saved(job_of(run), routed=moe) == pytest.approx(three - two, rel=0.3 if moe else 0.2)


def test_the_search_knows_every_schedule_and_every_context_method() -> None:
    words = get_type_hints(LayoutConfig)
    assert {*space.SCHEDULES, *space.ASKED} == set(bubbles._BUBBLES) == set(get_args(words["schedule"]))
    assert set(space.METHODS) == set(get_args(words["context_method"]))


def bytes_sent(cluster: Any, kind: str, size: Any, ranks: Any, stride: Any = 1) -> Any:
    """In the place of `collective_seconds`: the bytes that a rank sends. An all-gather's size is that of what is gathered."""
    given = size / np.maximum(ranks, 1) if kind == "all_gather" else size
    return float(wire_bytes(kind, int(ranks), 1)) * given


SENT: list[dict[str, Any]] = [
    dict(tensor=4), dict(shard=4), dict(shard=4, zero=1), dict(shard=4, zero=2, pipeline=2), dict(shard=2, expert=2, tensor=2),
    dict(tensor=2, expert_tensor=True, shard=2, expert=2), dict(tensor=2, context=4, context_method="ulysses"),
    dict(context=4), dict(context=4, context_method="gather", tensor=2), dict(shard=4, zero=2, pipeline=2, schedule="zb-h1"),
    dict(shard=4, zero=3, pipeline=2, schedule="zb-h1"), dict(tensor=4, pipeline=2), dict(shard=2, replicate=2),
]  # fmt: skip


@pytest.mark.parametrize("layout", SENT, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_a_step_sends_about_what_the_exact_account_sends(seed: int, layout: dict[str, Any]) -> None:
    """Routers' statistics, the token counts of experts and the sums of the loss are left out of the closed form."""
    run = drawn_run(seed, layout, tied=seed % 2 == 1)
    with contextlib.ExitStack() as patches:
        for name in ("cost.ops", "cost.attention", "cost.compression", "time.data", "time.step"):
            patches.enter_context(mock.patch(f"shardwise.plan.{name}.collective_seconds", bytes_sent))
        prepared = prepare(job_of(run))
    many, mine = prepared.job.microbatches, [n for n in range(len(prepared.kinds)) if n % run.layout.pipeline == 0]
    found: Counter[str] = Counter()
    for kind in (prepared.kinds[n] for n in mine):
        for row in prepared.stages[kind].seconds:
            found.update({axis: many * float(row[CATEGORIES.index(axis)]) for axis in ("tensor", "context", "expert")})
        data = prepared.data[kind]
        found["shard"] += float(many * (data.forward + data.backward) + data.once + data.gather_once)
        found["tensor"] += float(data.uncut)
        found["pipeline"] += float(abs(data.tied))
    exact = traffic(run, 0).bytes
    assert found["pipeline"] == exact.get("pipeline", {}).get("all_reduce", 0.0)
    for axis in ("tensor", "context", "expert", "shard"):
        there = sum(exact.get(axis, {}).values()) + sum(exact.get("replicate", {}).values()) * (axis == "shard")
        assert found[axis] == pytest.approx(there, rel=0.02, abs=2e5), (axis, exact.get(axis))
