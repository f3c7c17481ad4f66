"""The whole job against one that is played: failures at random, checkpoints where the run says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from jobs import LLAMA, make_job

from shardwise.plan.plan import plan
from shardwise.plan.time.goodput import JobCost, job_cost
from shardwise.run import run_from_dict

STEP, DEVICES = 2.0, 1000


def cost(checkpoint_every: int, mtbf_hours: float, **cluster: Any) -> JobCost:
    run = run_from_dict(
        dict(
            model=dict(preset="llama3-8b"),
            train=dict(steps=50_000, checkpoint_every=checkpoint_every),
            cluster=dict(mtbf_hours=mtbf_hours, restart_seconds=300.0, **cluster),
        )
    )
    return job_cost(run, make_job(LLAMA).cluster, STEP, DEVICES, 1e12)


@pytest.mark.parametrize(("every", "mtbf_hours"), [(100, 2000.0), (1000, 2000.0), (3000, 1000.0)])
def test_a_job_takes_as_long_as_one_that_is_played(every: int, mtbf_hours: float) -> None:
    """At three failures an interval, too, where half an interval for each would be far too little."""
    found = cost(every, mtbf_hours)
    assert found.checkpoint_every_s == every * STEP
    random, between = np.random.default_rng(0), mtbf_hours * 3600 / DEVICES
    spent, done, needed = 0.0, 0, 20_000
    while (
        done < needed
    ):  # an interval is done when nothing fails in it; a failure also takes the restart, and the last write
        failure = random.exponential(between)
        whole = failure > every * STEP + found.checkpoint_stall_s
        spent += every * STEP + found.checkpoint_stall_s if whole else failure + 300.0 + found.checkpoint_write_s
        done += whole
    assert found.goodput == pytest.approx(needed * every * STEP / spent, rel=0.02)


def test_saving_too_seldom_costs_more_than_the_best_interval() -> None:
    assert cost(20_000, 2000.0).goodput < cost(1000, 2000.0).goodput < cost(0, 2000.0).goodput


def test_a_run_that_never_ends_has_a_finite_cost() -> None:
    found = cost(50_000, 1.0)
    assert found.goodput < 1e-9
    assert np.isfinite(found.usd)


def test_a_chip_draws_no_more_than_it_can() -> None:
    chip = make_job(LLAMA).cluster.chip
    assert cost(0, 2000.0, power_w=2 * chip.power).kwh == cost(0, 2000.0).kwh
    assert cost(0, 2000.0, power_w=chip.power / 2).kwh == pytest.approx(cost(0, 2000.0).kwh / 2)


@pytest.mark.parametrize(("nodes", "said"), [(1, 1), (8, 0)])
def test_a_machine_larger_than_any_is_noted(nodes: int, said: int) -> None:
    cluster = dict(chip="h100", nodes=nodes)
    train = dict(global_batch=64, dtype="bfloat16")
    run = run_from_dict(dict(model=dict(preset="llama3-8b"), layout=dict(shard=64), train=train, cluster=cluster))
    assert sum("cluster.nodes = 8" in note for note in plan(run).notes) == said


def test_the_share_of_the_peak_is_told_by_16_bits_as_in_training() -> None:
    def planned(fp8: str) -> dict[str, Any]:
        train = dict(global_batch=8, dtype="bfloat16", fp8=fp8)
        run = run_from_dict(dict(model=dict(preset="llama3-1b"), train=train, cluster=dict(chip="h100")))
        return plan(run).as_dict()

    plain, eight = planned("none"), planned("tensorwise")
    assert eight["mfu"] > plain["mfu"]
    assert eight["peak_flops"] == plain["peak_flops"] == pytest.approx(989e12, rel=0.001)
