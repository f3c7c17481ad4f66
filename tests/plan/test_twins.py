"""What the planner says twice agrees: once for any framework and many layouts at a time, once exactly for this trainer. Parameters
and FLOPs of a layer to the last one, saved activations as nearly as operations that share tensors allow. Networks are drawn
from a seed."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

from shardwise.plan.cost.job import job_of
from shardwise.plan.cost.memory import layer_saved
from shardwise.plan.cost.operations import layer
from shardwise.plan.cost.parameters import ends_parameters, layer_parameters
from shardwise.plan.search import bubbles, space
from shardwise.plan.trainer.rank import PlannedRank
from shardwise.plan.trainer.saved import saved
from shardwise.plan.trainer.work import layer_gemms
from shardwise.run import LayoutConfig, Run, run_from_dict

LAYOUTS: list[dict[str, Any]] = [
    {}, dict(tensor=2), dict(tensor=4), dict(shard=4), dict(tensor=2, context=2, context_method="ulysses"), dict(shard=2, expert=2),
    dict(tensor=2, expert_tensor=True),
]  # fmt: skip


def drawn_run(seed: int, layout: dict[str, Any]) -> Run:
    """A network of a few layers with parts chosen at random, on GPUs."""
    rng = random.Random(seed)
    model: dict[str, Any] = dict(layers=2, hidden=512, heads=8, vocab=1000, norm=rng.choice(["rmsnorm", "layernorm"]))
    model |= dict(kv_heads=rng.choice([2, 4, 8]), bias=rng.choice(["none", "qkv"]), qk_norm=rng.random() < 0.5)
    model |= dict(parallel_block=rng.random() < 0.3)
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
    # With experts cut over tensor ranks the closed form lets the router see all tokens, and this trainer a slice of them.
    out = {"router"} if run.layout.expert_tensor else set()
    flops = sum(float(np.max(entry.flops[0])) for entry in layer(job, routed=moe) if entry.part not in out)
    exact = sum(gemm.flops for gemm in layer_gemms(rank, moe) if gemm.part not in out)
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
