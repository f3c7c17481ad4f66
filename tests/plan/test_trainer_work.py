"""The operations of a rank: together those of the model, and those that PyTorch counts while the trainer runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cases
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel_pool import RankPool
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from shardwise.ledger import PARTS, PASSES, Work
from shardwise.plan.cost.flops import forward_flops
from shardwise.plan.trainer.rank import PlannedRank
from shardwise.plan.trainer.work import chunks, visible_pairs, work
from shardwise.run import Run, UserError, run_from_dict
from shardwise.train.step import TrainState


def by_pass(account: Work, name: str) -> float:
    return sum(passes.get(name, 0.0) for passes in account.flops.values())


def computed_alike(run: Run) -> float:
    """Forward operations of a token that tensor ranks repeat: keys and values of too few heads, and compressions."""
    m, t = run.model, run.layout.tensor
    if m.attention == "latent":
        return 2.0 * m.layers * (t - 1) * m.hidden * (m.q_rank + m.kv_rank + m.rope_dim)
    return 2.0 * m.layers * max(0, t - m.kv_heads) * 2 * m.hidden * m.head_dim


sizes = st.sampled_from([1, 1, 2, 4])


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Legal runs without recomputation or capacity, dense, mixed and latent, on any layout."""
    heads = draw(st.sampled_from([4, 8]))
    model: dict[str, Any] = dict(
        layers=draw(st.integers(4, 9)), hidden=8 * heads, heads=heads, kv_heads=draw(st.sampled_from([1, 2, heads])),
        ffn=64, vocab=draw(st.integers(50, 70)), activation=draw(st.sampled_from(["swiglu", "gelu", "gelu_erf"])),
        sliding_window=draw(st.sampled_from([0, 0, 5, 100])), tied_embeddings=draw(st.booleans()),
    )  # fmt: skip
    if draw(st.booleans()):
        model |= dict(
            attention="latent",
            kv_heads=0,
            q_rank=draw(st.sampled_from([0, 12])),
            kv_rank=16,
            nope_dim=8,
            rope_dim=4,
            v_dim=6,
        )
    if draw(st.booleans()):
        model |= dict(
            experts=8, experts_per_token=draw(st.integers(1, 3)), expert_ffn=24, shared_experts=draw(st.integers(0, 2)),
            dense_layers=draw(st.integers(0, 2)), activation="swiglu",
        )  # fmt: skip
    layout: dict[str, Any] = {axis: draw(sizes) for axis in ("replicate", "shard", "context", "tensor", "pipeline")}
    layout |= dict(
        expert=draw(sizes) if model.get("experts") else 1, expert_tensor=draw(st.booleans()),
        context_method=draw(st.sampled_from(["ring", "ulysses", "gather"])),
        schedule=draw(st.sampled_from(["1f1b", "interleaved", "zb-h1"] + ["zb-v"] * (layout["pipeline"] > 1))),
    )  # fmt: skip
    train = dict(global_batch=16 * layout["replicate"] * layout["shard"], microbatch=draw(sizes), seq_len=32)
    try:
        return run_from_dict(dict(model=model, layout=layout, train=train))
    except UserError:
        return run_from_dict(dict(model=model, train=train))


@settings(max_examples=60, deadline=None)
@given(runs())
def test_all_ranks_together_do_three_times_the_forward(run: Run) -> None:
    accounts = [work(run, rank) for rank in range(run.layout.world)]
    token = forward_flops(run.model, run.train.seq_len) + computed_alike(run)
    assert sum(a.total for a in accounts) == pytest.approx(3 * token * run.batch_tokens, rel=1e-12)
    for account in accounts:
        assert set(account.flops) <= set(PARTS)
        assert {name for passes in account.flops.values() for name in passes} <= set(PASSES)
        assert by_pass(account, "recompute") == by_pass(account, "optimizer") == 0
        assert by_pass(account, "backward_input") + by_pass(account, "backward_weight") == pytest.approx(
            2 * by_pass(account, "forward"), rel=1e-12
        )


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([1, 2, 4]), st.integers(0, 40))
def test_pairs_of_context_ranks_are_those_of_the_sequence(ranks: int, window: int) -> None:
    length = 32
    layout = dict(context=ranks)
    run = run_from_dict(dict(model=dict(sliding_window=window), layout=layout, train=dict(seq_len=length)))
    seen = [[visible_pairs(window, length, part) for part in chunks(PlannedRank(run, rank))] for rank in range(ranks)]
    counted = sum(min(query + 1, window or length) for query in range(length))
    assert sum(map(sum, seen)) == counted
    if not window:
        assert len({sum(own) for own in seen}) == 1


def counted_flops(rank: int, run: Run) -> float:
    """What PyTorch counts in one step of a rank."""
    train_state = TrainState(run)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        cases.steps(train_state, 0, 1, documents=False)
    return counter.get_total_flops()


def with_whole_scores(run: Run, rank: int) -> float:
    """The account of a rank as the math backend computes: whole squares of scores, not the causal half."""
    m, train = run.model, run.train
    v_dim = m.v_dim if m.attention == "latent" else m.head_dim
    place = PlannedRank(run, rank)
    repeats = sum(1 + bool(again & {"block", "attention"}) for again in place.recomputed.values())
    layers = len(place.recomputed)
    pairs = train.seq_len**2 - train.seq_len * (train.seq_len + 1) / 2
    passes = run.accumulation * train.microbatch * (repeats + 2 * layers)
    return work(run, rank).total + 2.0 * passes * pairs * m.heads / run.layout.tensor * (m.head_dim + v_dim)


REPEATED: list[tuple[str, dict[str, Any]]] = [
    ("dense", {}),
    ("latent", dict(recompute="full")),
    ("mixture", dict(recompute="full", recompute_every=2)),
    ("dense", dict(recompute="operations", recompute_operations=("ffn", "norm"))),
    ("dense", dict(tensor=4)),
    ("dense", dict(tensor=2, recompute="full", async_tensor=True)),
    ("mixture", dict(tensor=2, recompute="full", expert_tensor=True)),
    ("tied", dict(pipeline=2, recompute="full", schedule="zb-v")),
    *[(model, {}) for model in ("mixture", "latent", "tied", "softmax")],
    *[(model, dict(recompute="full")) for model in ("dense", "mixture", "tied", "softmax")],
    ("mixture", dict(recompute="operations", recompute_operations=("ffn",))),
    ("latent", dict(tensor=2, recompute="full")),
    ("tied", dict(pipeline=2, tensor=2, schedule="interleaved")),
]


@pytest.mark.parametrize(("model", "layout"), REPEATED, ids=str)
@pytest.mark.drawn(group="dry ranks")
def test_operations_equal_those_pytorch_counts(ranks: RankPool, model: str, layout: dict[str, Any]) -> None:
    run = cases.make_run(model, layout, **cases.layers_for(layout))
    for rank, counted in enumerate(ranks.run(run.layout.world, counted_flops, run)):
        assert counted == pytest.approx(with_whole_scores(run, rank), rel=1e-12)


@pytest.mark.drawn(group="dry ranks")
def test_experts_work_is_that_of_an_even_load(ranks: RankPool) -> None:
    """Over the ranks that share the experts, whatever the routers choose."""
    run = cases.make_run("mixture", dict(shard=2, expert=2, tensor=2), layers=2)
    total = sum(ranks.run(run.layout.world, counted_flops, run))
    assert total == pytest.approx(sum(with_whole_scores(run, rank) for rank in range(run.layout.world)), rel=1e-12)


def test_without_a_rank_the_busiest_is_meant() -> None:
    run = cases.make_run("dense", dict(pipeline=2))
    assert work(run).total == max(work(run, rank).total for rank in range(2))


def test_capacity_leaves_out_rows() -> None:
    run = cases.make_run("mixture", {})
    half = replace(run, model=replace(run.model, expert_capacity=0.5))
    assert work(half, 0).flops["experts"]["forward"] == work(run, 0).flops["experts"]["forward"] / 2
