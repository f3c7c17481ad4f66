"""The planner's traffic in cases simple enough to write out by hand, for more ranks than a test machine has. Against the
trainer itself it is held in `tests/parallel/test_traffic.py`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest

from shardwise.ledger import COLLECTIVES
from shardwise.plan.cost.flops import parameters
from shardwise.plan.trainer.rank import PlannedRank
from shardwise.plan.trainer.traffic import buckets, by_axis, by_group, traffic
from shardwise.run import AXES, Run, run_from_dict
from shardwise.schedules import SCHEDULES, make_schedule

MODEL: dict[str, Any] = dict(layers=8, hidden=64, heads=8, kv_heads=8, ffn=128, vocab=256)
LENGTH, BATCH, RANKS = 128, 32, 8
WORLD = {"world": {"all_reduce": 2 * 7 / 8 * 4 * 8}}
"""Three float64 numbers over eight ranks: the count of tokens, the norm and the loss."""


def make(model: Mapping[str, Any] = MODEL, layout: Mapping[str, Any] = {}, **train: Any) -> Run:
    settings = dict(seq_len=LENGTH, global_batch=BATCH, microbatch=1, dtype="bfloat16") | train
    return run_from_dict(dict(model=dict(model), layout=dict(layout), train=settings))


def test_copies_send_their_gradients_once() -> None:
    run = make(layout=dict(replicate=8))
    gradients = 4 * parameters(run.model).total
    assert traffic(run, 3).bytes == {"replicate": {"all_reduce": 2 * 7 / 8 * gradients}} | WORLD


@pytest.mark.parametrize(("zero", "gathered", "scattered"), [(1, 1, 1), (2, 1, 4), (3, 8, 4)])
def test_sharing_gathers_16_bits_and_adds_in_32(zero: int, gathered: int, scattered: int) -> None:
    run = make(layout=dict(shard=8, zero=zero))
    p = parameters(run.model)
    outside = p.embedding + p.head + run.model.hidden
    inside = p.total - outside
    # What stands outside of the layers is gathered once a microbatch, the layers twice.
    gathers = gathered * inside + (gathered // 2 or 1) * outside
    want = {"all_gather": 2 * 7 / 8 * gathers, "reduce_scatter": scattered * 4 * 7 / 8 * p.total}
    assert run.accumulation == 4
    assert traffic(run, 0).bytes == {"shard": want} | WORLD


def test_copies_of_shards_add_a_shard_once() -> None:
    run = make(layout=dict(replicate=2, shard=4, zero=2))
    own = parameters(run.model).total / 4
    assert traffic(run, 0).bytes["replicate"] == {"all_reduce": 4 * own}


def test_tensor_sends_the_stream_and_adds_norms() -> None:
    run = make(layout=dict(tensor=8))
    m, n = run.model, run.accumulation
    piece = 7 / 8 * LENGTH * m.hidden
    # Two parts of each layer gathered and scattered, both ways, and the head; the embedding is looked up in float32.
    stream = n * piece * (2 * (4 * m.layers + 1) + 4)
    norms = 2 * 7 / 8 * 4 * (2 * m.layers + 1) * m.hidden
    loss = n * 2 * 7 / 8 * 4 * 3 * LENGTH
    # What is gathered for matrices is gathered again in the backward pass.
    again = n * piece * 2 * (2 * m.layers + 1)
    want = {"all_gather": stream + again, "reduce_scatter": stream, "all_reduce": norms + loss}
    assert traffic(run, 5).bytes == {"tensor": want} | WORLD
    assert traffic(run, 5).messages["tensor"]["all_gather"] == n * (4 * m.layers + 2 + 2 * m.layers + 1)


@pytest.mark.parametrize(("method", "want"), [
    ("ring", {"send": 7 + 7 + 8}), ("gather", {"all_gather": 7, "reduce_scatter": 7}), ("ulysses", {"all_to_all": 2 * 2 * 7 / 8}),
])  # fmt: skip
def test_context_sends_keys_and_values(method: str, want: dict[str, float]) -> None:
    run = make(layout=dict(context=8, context_method=method))
    both = 2 * 2 * LENGTH // 8 * run.model.hidden  # keys and values of a rank, in 16 bits
    each = BATCH * run.model.layers * both
    assert traffic(run, 2).bytes["context"] == pytest.approx({name: each * times for name, times in want.items()})


def test_a_pipeline_sends_the_stream_on() -> None:
    run = make(layout=dict(pipeline=8, stages=[1] * 8))
    stream = BATCH * 2 * LENGTH * run.model.hidden
    sent = [traffic(run, rank).bytes["pipeline"]["send"] for rank in range(8)]
    assert sent == [stream, *[2 * stream] * 6, stream]
    assert traffic(run).bytes["pipeline"]["send"] == 2 * stream  # the rank that sends most


def test_experts_exchange_their_even_share() -> None:
    run = make(MODEL | dict(experts=16, experts_per_token=4, expert_ffn=32), dict(shard=8, expert=8))
    n, layers = run.accumulation, run.model.layers
    counts, rows = 16 * 8, LENGTH * 4 * run.model.hidden * 2
    assert traffic(run, 1).bytes["expert"] == {"all_to_all": n * layers * 7 / 8 * (counts + 4 * rows)}
    # Given the rows, those count.
    moved = dict.fromkeys(range(layers), (4, 6))
    want = layers * (n * 7 / 8 * counts + 2 * 10 * run.model.hidden * 2)
    assert by_axis(by_group(PlannedRank(run, 1), moved)).bytes["expert"] == {"all_to_all": want}


def test_repeating_a_layer_sends_what_its_backward_pass_needs() -> None:
    once, again = (traffic(make(layout=dict(tensor=8, recompute=mode)), 0).bytes["tensor"] for mode in ("none", "full"))
    layer = BATCH * MODEL["layers"] * 2 * 7 / 8 * LENGTH * MODEL["hidden"]
    # The sequence is gathered once more either way: to recompute the layer, or for its matrices' gradients.
    assert again["all_gather"] == once["all_gather"]
    assert again["reduce_scatter"] - once["reduce_scatter"] == layer


def test_groups_are_blamed_on_axes() -> None:
    mixed = MODEL | dict(experts=4, experts_per_token=2, expert_ffn=32)
    run = make(mixed, dict(shard=4, context=2, tensor=2, pipeline=2, replicate=2, expert=2))
    groups = by_group(PlannedRank(run, 0))
    assert {group for group, _ in groups} > {"zero", "expert_shard", "sequence"}
    account = traffic(run, 0)
    assert set(account.bytes) == {*AXES, "world"}
    assert {kind for kinds in account.bytes.values() for kind in kinds} <= set(COLLECTIVES)
    assert account.total == pytest.approx(float(sum(sent.bytes for sent in groups.values())))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_stand_where_the_schedule_puts_them(schedule: str) -> None:
    run = make(layout=dict(pipeline=4, schedule=schedule), clip=0.0)
    made = make_schedule(schedule, 4, run.accumulation, run.layout.stages_per_rank)
    assert PlannedRank(run, 0).placement == made.placement
    assert PlannedRank(run, 0).splits_backward == any(a.kind == "I" for a in made.ranks[0])


def test_places_along_every_axis_are_those_of_the_mesh() -> None:
    run = make(layout=dict(pipeline=2, replicate=2, shard=2, context=2, tensor=2))
    order = ("pipeline", "replicate", "shard", "context", "tensor")
    assert [PlannedRank(run, 0b10110).index(axis) for axis in order] == [1, 0, 1, 1, 0]


def test_buckets_close_when_they_are_full() -> None:
    mega = 2**20
    assert buckets([]) == 0
    assert buckets([1, 2]) == 1
    assert buckets([mega, 24 * mega, mega, 1]) == 3


def test_a_plan_of_16384_ranks_takes_no_time() -> None:
    layout = dict(tensor=8, pipeline=16, shard=128, schedule="interleaved", chunks=2, zero=2)
    train = dict(seq_len=8192, global_batch=2048, microbatch=1, dtype="bfloat16")
    run = run_from_dict(dict(model=dict(preset="llama3-405b"), layout=layout, train=train))
    traffic(run)  # layers are dealt out over the stages once, and remembered

    def once() -> float:
        start = time.process_time()  # of this process alone: the machine may be busy with others
        traffic(run)
        return time.process_time() - start

    assert min(once() for _ in range(5)) < 0.2  # each rank by itself would take seconds
    account = traffic(run)
    assert run.layout.world == 16384
    assert account.total > 1e9
