"""Memory is what the planner says: what each rank holds during a step, counted by the lifetime of real tensors, equals
`shardwise.plan.held`, made from the numbers of model and layout alone."""

from __future__ import annotations

from typing import Any

import cases
import numpy as np
import pytest
import torch
from parallel_pool import RankPool
from torch import Tensor

from shardwise.measure.memory import Storages, measure_memory
from shardwise.plan.held import held
from shardwise.run import Run
from shardwise.train.step import Trainee


def measured_step(rank: int, run: Run) -> dict[str, Any]:
    """Bytes of a rank in one step."""
    trainee = Trainee(run)
    rows = trainee.samples(np.arange(run.train.global_batch))
    return measure_memory(trainee, cases.take(cases.batch(0, False, run.train.global_batch), rows))


LAYOUTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("dense", dict(), {}),
    ("dense", dict(replicate=2), dict(dtype="bfloat16")),
    # Rows that do not divide are padded.
    ("dense", dict(shard=3, zero=2), dict(global_batch=6)),
    ("dense", dict(shard=2, zero=1), dict(dtype="bfloat16", reduce_dtype="bfloat16")),
    ("dense", dict(shard=4, zero=3), dict(dtype="bfloat16", microbatch=1)),
    ("dense", dict(replicate=2, shard=2, zero=2), dict(dtype="float32")),
    ("dense", dict(tensor=4), dict(dtype="bfloat16")),
    ("dense", dict(replicate=2, tensor=2), {}),
    ("tied", dict(tensor=2, pipeline=2), {}),
    ("tied", dict(pipeline=2, schedule="zb-v"), {}),
    ("dense", dict(pipeline=2, shard=2, schedule="zb-v", zero=2), {}),
    ("latent", dict(tensor=2, shard=2), {}),
    ("mixture", dict(shard=2, expert=2), {}),
    ("mixture", dict(tensor=2, shard=2, expert=2, expert_tensor=True), dict(optimizer="muon")),
    ("softmax", dict(replicate=2, shard=2, expert=2), {}),
]


@pytest.mark.parametrize(("model", "layout", "more"), LAYOUTS, ids=str)
def test_a_rank_holds_what_the_plan_says(
    ranks: RankPool, model: str, layout: dict[str, Any], more: dict[str, Any]
) -> None:
    run = cases.make_run(model, layout, **more)
    for rank, counted in enumerate(ranks.run(run.layout.world, measured_step, run)):
        planned = held(run, rank)
        assert {owner: counted[owner] for owner in planned} == planned, f"rank {rank}"


def test_storages_are_counted_once_and_forgotten() -> None:
    def work() -> Tensor:
        whole = torch.ones(100)  # 400 bytes
        other = whole + 1
        return other[:10]  # keeps all of `other`

    with Storages() as storages:
        kept = work()
        assert storages.now == 400
        assert storages.peak == 800
        kept.untyped_storage().resize_(0)
        assert storages.now == 0
        del kept
    assert not storages.alive
