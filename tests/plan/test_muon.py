"""What Muon costs in a plan: operations and time in closed form of the matrices' sides, traffic blamed on its axes, and memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.hardware import gemm_seconds, memory_seconds
from shardwise.hardware.power import slowed
from shardwise.ledger import CATEGORIES
from shardwise.plan.cost.constants import constants_of
from shardwise.plan.cost.job import job_of
from shardwise.plan.plan import Plan, plan, what_binds
from shardwise.plan.trainer import muon
from shardwise.plan.trainer.rank import PlannedRank
from shardwise.plan.trainer.work import work
from shardwise.run import Run, run_from_dict

SHAPE: dict[str, Any] = dict(layers=4, hidden=2048, heads=16, kv_heads=4, ffn=5632, vocab=32000)
SIDES = [(2048, 2048)] * 2 + [(512, 2048)] * 2 + [(2048, 5632)] * 3
"""Shorter and longer: queries and output, keys and values, gate, up and down."""


def make(optimizer: str = "muon", model: dict[str, Any] | None = None, chip: str = "h200", **keys: Any) -> Run:
    layout = keys.pop("layout", {})
    train = dict(dtype="bfloat16", seq_len=2048, global_batch=8, microbatch=1, optimizer=optimizer) | keys
    return run_from_dict(dict(model=model or SHAPE, layout=layout, train=train, cluster=dict(chip=chip)))


def both(**keys: Any) -> tuple[Plan, Plan]:
    return plan(make("adamw", **keys)), plan(make("muon", **keys))


def test_operations_are_those_of_the_sides() -> None:
    each = 5 * sum(4 * short * short * long + 2 * short**3 for short, long in SIDES)
    assert work(make(), 0).flops["parameters"] == {"optimizer": 4 * each}
    assert work(make("adamw"), 0).flops["parameters"] == {"optimizer": 0}


def test_every_rank_that_shares_a_matrix_computes_it() -> None:
    alone = muon.flops(PlannedRank(make(), 0))
    for layout in (dict(shard=4), dict(tensor=2, shard=2), dict(tensor=8), dict(replicate=4)):
        run = make(layout=layout, global_batch=32)
        assert {muon.flops(PlannedRank(run, rank)) for rank in range(run.layout.world)} == {alone}
    run = make(layout=dict(pipeline=2))
    assert sum(muon.flops(PlannedRank(run, rank)) for rank in range(2)) == alone


def test_experts_are_divided_among_their_ranks() -> None:
    shape = SHAPE | dict(experts=8, experts_per_token=2, expert_ffn=1024)
    stack = 8 * 3 * 5 * (4 * 1024 * 1024 * 2048 + 2 * 1024**3)
    for expert in (1, 2, 8):
        run = make(model=shape, layout=dict(shard=8, expert=expert), global_batch=64)
        rest = muon.flops(PlannedRank(run, 3)) - 4 * stack / expert
        assert rest == 4 * 5 * sum(4 * s * s * n + 2 * s**3 for s, n in [*SIDES[:4], (8, 2048)])


@pytest.mark.parametrize(
    ("chip", "dtype", "used"),
    [("h200", "bfloat16", "bfloat16"), ("h200", "float32", "bfloat16"), ("cpu", "bfloat16", "float32"),
     ("cpu", "float64", "float64"), ("v100", "float16", "float32")],
)  # fmt: skip
def test_a_step_takes_longer_by_its_products(chip: str, dtype: str, used: str) -> None:
    keys = dict(chip=chip, dtype=dtype)
    adamw, other = both(**keys)
    job = job_of(make(**keys))
    constants, machine = constants_of(job), job.cluster.chip
    wide = 8 if dtype == "float64" else 4
    item = 2 if used == "bfloat16" else wide
    products = passes = 0.0
    for s, n in SIDES:
        products += 5 * sum(gemm_seconds(machine, *p, used) for p in ((s, s, n), (s, s, s), (s, n, s)))
        passes += memory_seconds(machine, s * n * (3 * item + (2 * (item + wide) if item < wide else 0)))
    products *= slowed(machine, {"matmul": 1.0})["matmul"]  # nothing else runs beside them
    device = 4 * (constants["matmul"] * products + constants["memory"] * passes)
    launched = 4 * len(SIDES) * muon.LAUNCHES * constants["launch"]
    power = 1 if chip == "cpu" else 4
    expected = (device**power + launched**power) ** (1 / power)
    added = other.account.step_seconds - adamw.account.step_seconds
    assert added == pytest.approx(expected, rel=1e-9)
    assert added > 4 * products * constants["matmul"]
    shown = other.account.breakdown["optimizer"] - adamw.account.breakdown["optimizer"]
    assert shown == pytest.approx(added, rel=1e-9)


@pytest.mark.parametrize(
    ("layout", "axes"),
    [(dict(shard=8), ["shard"]), (dict(tensor=8), ["tensor"]), (dict(tensor=2, shard=4), ["shard", "tensor"]),
     (dict(replicate=8), []), (dict(pipeline=4, shard=2), ["shard"])],
    ids=str,
)  # fmt: skip
def test_bringing_matrices_together_is_blamed_on_their_axes(layout: dict[str, Any], axes: list[str]) -> None:
    adamw, other = both(layout=layout, global_batch=64)
    more = {name: other.account.breakdown[name] - adamw.account.breakdown[name] for name in adamw.account.breakdown}
    assert {name for name, value in more.items() if value > 1e-9} - {"other"} == {*axes, "optimizer"}
    assert sum(other.account.breakdown.values()) == pytest.approx(other.account.step_seconds)
    assert set(more) <= set(CATEGORIES)
    one, two = adamw.account.traffic.bytes, other.account.traffic.bytes
    assert {axis for axis in two if sum(two[axis].values()) > sum(one.get(axis, {}).values())} == {*axes}


def test_what_binds_is_named() -> None:
    few = plan(make(global_batch=1))
    assert few.binds.startswith("Muon's GEMMs")
    breakdown = {"matmul": 0.9, "attention": 0.0999, "memory": 0.0, "optimizer": 1e-4}
    alone = replace(few.account, step_seconds=1.0, breakdown=breakdown)
    assert what_binds(alone, few.job) == "arithmetic: 100% of the step computes"  # and nothing is next with 0%


def test_a_stack_of_experts_may_fill_memory_when_it_is_updated() -> None:
    """Few tokens leave room for nothing but the matrices: 64 experts of one layer, whole, in an iteration."""
    shape = SHAPE | dict(experts=64, experts_per_token=1, expert_ffn=2048, layers=1, vocab=256)
    run = make(model=shape, seq_len=64, global_batch=1)
    stack = 64 * 2048 * 2048
    assert muon.update_bytes(PlannedRank(run, 0)) == stack * (
        4 + 4 * 2
    )  # the whole, and twice x and two squares in 16 bits
    (owners,) = plan(run).account.memory.ranks
    (before,) = plan(replace(run, train=replace(run.train, optimizer="adamw"))).account.memory.ranks
    momentum = owners["optimizer"] - muon.update_bytes(PlannedRank(run, 0))
    assert stack * 3 * 4 < momentum < before["optimizer"]
    assert owners["activations"] == owners["logits"] == 0 < owners["gradients"]
    # With many tokens the passes hold more.
    (busy,) = plan(make(model=shape, seq_len=65536, global_batch=4, microbatch=4)).account.memory.ranks
    assert busy["activations"] > 0
    assert busy["optimizer"] == momentum


def test_parts_stand_beside_each_other_while_they_are_joined() -> None:
    numbers = 2048 * 5632
    for layout in (dict(shard=2), dict(tensor=2)):  # two halves, both of all ranks, and the whole made of them
        assert muon.update_bytes(PlannedRank(make(layout=layout, global_batch=16), 0)) == 3 * numbers * 4
    assert muon.update_bytes(PlannedRank(make(), 0)) == numbers * (
        4 + 2 + 4
    )  # more than in an iteration: cast back beside the float32
