"""How parameters are dealt out over the ranks that share them, in cases simple enough to write out by hand. Against the trainer
itself they are held in `tests/measure/test_memory.py` and `tests/parallel/test_traffic.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.plan.cost.job import job_of
from shardwise.plan.plan import plan
from shardwise.plan.trainer import memory, saved
from shardwise.plan.trainer.memory import memory_of, memory_that_fits
from shardwise.plan.trainer.rank import PlannedParameter, PlannedRank, first_ranks, planned_rank
from shardwise.plan.trainer.state import state_bytes
from shardwise.plan.trainer.traffic import by_axis, by_group, traffic
from shardwise.run import Run, run_from_dict
from shardwise.run.derive import shard_dim
from shardwise.run.parameters import Parameter


@pytest.mark.parametrize(
    ("shape", "ranks", "dim"),
    [
        ((4, 24, 32), 1, 0),
        ((4, 24, 32), 4, 0),
        ((1, 24, 32), 2, 1),
        ((4, 24, 32), 8, 1),  # more ranks than experts
        ((6, 24, 32), 4, 1),  # more experts than ranks, and two of eight would be padding
        ((4, 24, 32), 16, 2),
        ((4, 24, 32), 5, 0),  # nothing divides
    ],
)
def test_experts_are_cut_along_the_first_dimension_that_divides(shape: tuple[int, ...], ranks: int, dim: int) -> None:
    assert shard_dim(shape, ranks) == dim
    experts = PlannedParameter(Parameter("ffn.experts.up", shape, "experts"), shape)
    own = [experts.own_numel(ranks, rank) for rank in range(ranks)]
    assert sum(own) == experts.numel
    if shape[dim] % ranks == 0:
        assert own == [experts.shard_numel(ranks)] * ranks
    else:
        assert experts.shard_numel(ranks) == 24 * 32


def test_other_parameters_are_cut_by_rows() -> None:
    matrix = PlannedParameter(Parameter("attention.q.weight", (2, 32), "attention"), (2, 32))
    assert [matrix.own_numel(4, rank) for rank in range(4)] == [32, 32, 0, 0]
    assert matrix.shard_numel(4) == 32


@pytest.fixture(scope="module")
def mixtral() -> Run:
    """One expert on each rank, which eight share."""
    train = dict(seq_len=4096, global_batch=256, microbatch=1, dtype="bfloat16")
    layout, cluster = dict(shard=64, expert=8), dict(chip="h100", nodes=8)
    return run_from_dict(dict(model=dict(preset="mixtral-8x7b"), layout=layout, train=train, cluster=cluster))


EXPERTS = 32 * 8 * 3 * 14336 * 4096
"""Parameters of all layers' experts."""


def test_an_expert_of_a_rank_is_shared_evenly(mixtral: Run) -> None:
    routed = [(count, p) for count, p in PlannedRank(mixtral, 0).parameters() if p.entry.routed]
    assert sum(count * p.shard_numel(8) for count, p in routed) == EXPERTS // 64
    first, last = state_bytes(mixtral, 0), state_bytes(mixtral, 63)
    # Of the rest only routers, whose eight rows 64 ranks share, are padded: a row of 4096 numbers in each of 32 layers.
    assert first["parameters"] == first["gradients"]
    assert first["parameters"] <= 4 * (46_702_792_704 // 64 + 32 * 4096 + 64)
    assert first["parameters"] == last["parameters"]
    assert first["optimizer"] == pytest.approx(2 * first["parameters"], rel=1e-3)
    owners = plan(mixtral).account.memory.ranks[0]
    assert {name: round(owners[name] / 2**30, 1) for name in ("parameters", "gradients", "optimizer")} == dict(
        parameters=2.7, gradients=2.7, optimizer=5.4
    )


def test_an_expert_of_a_rank_is_gathered_and_scattered_without_padding(mixtral: Run) -> None:
    sent = by_group(PlannedRank(mixtral, 0))
    assert sent["expert_shard", "all_gather"].bytes == 2 * mixtral.accumulation * 7 * EXPERTS // 64 * 2
    assert sent["expert_shard", "reduce_scatter"].bytes == mixtral.accumulation * 7 * EXPERTS // 64 * 4


def test_llama_3_405b_has_its_embedding_and_its_head_as_stages_of_their_own() -> None:
    """The layout that it was trained with (Grattafiori et al. 2024, section 3.3.2)."""
    layout = dict(tensor=8, pipeline=16, shard=128, zero=1, schedule="interleaved", chunks=8)
    train = dict(seq_len=8192, global_batch=2048, microbatch=1, dtype="bfloat16")
    cluster = dict(chip="h100", nodes=2048, devices_per_node=8)
    run = run_from_dict(dict(model=dict(preset="llama3-405b"), layout=layout, train=train, cluster=cluster))
    first, last = PlannedRank(run, 0).stages, PlannedRank(run, run.layout.world - 1).stages
    assert [len(stage.layers) for stage in first] == [0, *[1] * 7]
    assert [len(stage.layers) for stage in last] == [*[1] * 7, 0]
    assert plan(run).account.step_seconds < 10


@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("recompute", ["none", "attention", "full"])
@pytest.mark.parametrize("every", [1, 3])
def test_layers_that_save_alike_are_counted_as_if_each_were_written_down(
    monkeypatch: pytest.MonkeyPatch, pipeline: int, recompute: str, every: int
) -> None:
    model = dict(layers=14, hidden=64, heads=4, vocab=256, ffn=128, experts=4, experts_per_token=2, dense_layers=5)
    layout = dict(pipeline=pipeline, tensor=2, recompute=recompute, recompute_every=every, schedule="zb-h1")
    train = dict(microbatch=1, global_batch=8, seq_len=64, dtype="bfloat16")
    planned = PlannedRank(run_from_dict(dict(model=model, layout=layout, train=train)), 0)
    few = [saved.saved(planned, stage) for stage in planned.stages]
    monkeypatch.setattr(saved, "FEW", 100)
    assert few == [saved.saved(planned, stage) for stage in planned.stages]


ALONE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pipedream, one microbatch": (dict(pipeline=8, schedule="pipedream"), dict(clip=0.0, microbatch=16)),
    "1f1b": (dict(shard=2, pipeline=4, recompute="budget", recompute_budget=0.001), {}),
    "interleaved": (dict(shard=2, pipeline=4, schedule="interleaved", chunks=2, zero=3), {}),
    "breadth-first": (dict(shard=2, pipeline=4, schedule="breadth-first", chunks=2, zero=1), {}),
    "zb-v": (dict(shard=2, pipeline=4, schedule="zb-v", zero=2), {}),
    "dualpipe-v": (dict(replicate=2, pipeline=4, schedule="dualpipe-v"), {}),
    "bpipe": (dict(pipeline=8, schedule="bpipe"), {}),
    "unequal stages": (dict(pipeline=4, shard=2, stages=[3, 6, 4, 3]), {}),
}


@pytest.mark.parametrize("name", ALONE)
def test_ranks_that_are_counted_together_hold_and_send_what_each_does_alone(name: str) -> None:
    layout, train = ALONE[name]
    model = dict(layers=16, hidden=64, heads=8, ffn=128, vocab=256)
    if layout.get("schedule") not in ("pipedream", "bpipe"):
        model |= dict(experts=4, experts_per_token=2, dense_layers=3, expert_ffn=64)
    settings = dict(seq_len=64, global_batch=16, microbatch=1, dtype="bfloat16") | train
    run = run_from_dict(dict(model=model, layout=layout, train=settings, cluster=dict(chip="h100", nodes=1)))
    ranks = list(first_ranks(run))
    held = memory_of(run, job_of(run)).ranks
    alone = [state_bytes(run, rank) for rank in ranks]
    assert [one["parameters"] for one in held] == [float(one["parameters"]) for one in alone]
    assert [one["optimizer"] for one in held] == [float(one["optimizer"]) for one in alone]
    # A second run of the same kind, whose ranks share what they hold with those of the first, needs as much as it does alone.
    other = replace(run, layout=replace(run.layout, recompute="full", recompute_budget=0.0))
    after = memory_of(other, job_of(other)).ranks
    memory._standing.cache_clear()
    assert memory_of(other, job_of(other)).ranks == after
    assert memory_that_fits(other, job_of(other)) == memory_of(other, job_of(other))
    most = max(
        (by_group(PlannedRank(run, rank)) for rank in ranks), key=lambda sent: sum(one.bytes for one in sent.values())
    )
    assert traffic(run) == by_axis(most)


@pytest.mark.parametrize(
    "adapter", [dict(kind="dora"), dict(kind="lora", targets=["q"]), dict(kind="lora")], ids=["dora", "q alone", "lora"]
)
def test_gathered_values_of_one_head_may_have_no_gradient(adapter: dict[str, object]) -> None:
    """Which is deferred where the matrix, or an adapter that ends in its output, is trained: by LoRA on v alone here."""
    found = []
    for method in ("gather", "ulysses"):
        layout = dict(context=2, tensor=2, pipeline=2, schedule="zb-h1", context_method=method)
        run = run_from_dict(
            dict(
                model=dict(layers=2, hidden=32, heads=4, kv_heads=2, vocab=61), adapter=dict(rank=2) | adapter, layout=layout,
                train=dict(global_batch=4, seq_len=16, microbatch=1),
            )
        )  # fmt: skip
        planned = planned_rank(run, 0)
        found.append(saved.saved(planned, planned.stages[0]).deferred)
    assert (found[0] > found[1]) == (adapter == dict(kind="lora"))
