"""What a plan does with the chip's limit of power, and with ranks that a small vocabulary leaves without a part of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.hardware import find_chip
from shardwise.hardware.power import power_of
from shardwise.plan.cost.job import job_of
from shardwise.plan.time.step import rank_time
from shardwise.plan.trainer.memory import memory_of_rank
from shardwise.run import read_run

TRAINED = (
    "model.preset=llama3-8b train.dtype=bfloat16 train.microbatch=1 train.seq_len=4096 cluster.chip=h200 layout.shard=8"
)


def test_a_rank_that_rests_computes_faster() -> None:
    job = job_of(read_run(None, [*TRAINED.split(), "train.global_batch=8", "cluster.nodes=1"]))
    busy, idle = (rank_time(job, 0, load=load).parts for load in (1.0, 0.5))
    assert idle["matmul"] == pytest.approx(busy["matmul"] / 1.13, rel=0.05)  # measured with pauses: 1.12 to 1.18
    assert idle["attention"] == pytest.approx(busy["attention"] / 1.25, rel=0.05)
    assert idle["memory"] == pytest.approx(busy["memory"], rel=0.02)


def test_a_chip_with_another_limit_has_no_measured_power() -> None:
    chip = find_chip("h200")
    assert power_of(chip) is not None
    assert power_of(chip.altered(power_w=500)) is None
    assert power_of(replace(chip, name="mine", lender="h200-sxm", power=350.0)) is None


def test_ranks_without_a_vocabulary_are_planned() -> None:
    words = "model.layers=2 model.hidden=64 model.heads=4 model.kv_heads=4 model.ffn=128 model.vocab=5 layout.tensor=4 "
    words += "train.dtype=bfloat16 train.device=cuda cluster.chip=h200 train.seq_len=64"
    run = read_run(None, words.split())
    assert all(sum(memory_of_rank(run, job_of(run), rank).values()) > 0 for rank in range(4))
