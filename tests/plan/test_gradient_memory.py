"""Memory of gradients between passes: what `fully_shard` keeps of its last reduction, and what split backward passes defer."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.plan.cost.job import job_of
from shardwise.plan.trainer import state
from shardwise.plan.trainer.memory import memory_of
from shardwise.plan.trainer.rank import planned_rank
from shardwise.run import Run, run_from_dict


def run_of(model: str, batch: int, **layout: Any) -> Run:
    return run_from_dict(
        dict(
            model=dict(preset=model),
            layout=layout,
            train=dict(dtype="bfloat16", global_batch=batch, microbatch=1, seq_len=2048),
            cluster=dict(chip="h200", nodes=8),
        )
    )


def peaks(run: Run, rank: int) -> tuple[int, int]:
    place = planned_rank(run, rank)
    return state.activations(place), state.peak_gradients(place, state.state_bytes(run, rank)["gradients"])


@pytest.mark.parametrize(("zero", "kept"), [(1, False), (2, True), (3, True)])
def test_what_was_reduced_last_is_there_at_the_next_loss(zero: int, kept: bool) -> None:
    run, rows = run_of("gemma-7b", 32, shard=16, zero=zero), 256_000
    (rank,) = memory_of(run, job_of(run)).ranks
    outside = 4 * 3072 * (rows + 1)  # the embedding, which is the head too, and the last norm, in float32
    assert rank["buffers"] == (outside if kept else 0)
    alone = run_of("gemma-7b", 16, shard=16, zero=zero)  # one microbatch: nothing was reduced before
    assert memory_of(alone, job_of(alone)).ranks[0]["buffers"] == 0


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-2p", "zb-v"])
def test_deferred_gradients_come_when_activations_go(schedule: str) -> None:
    run = run_of("gpt-neox-20b", 64, tensor=2, pipeline=4, shard=8, zero=1, schedule=schedule)
    for stage, rank in enumerate(memory_of(run, job_of(run)).ranks):
        place = planned_rank(run, stage * 16)
        assert place.index("pipeline") == stage
        apart = peaks(run, place.rank)
        together = rank["activations"] + rank["gradients"]
        assert max(apart) <= together <= sum(apart)
    # The first rank holds most activations when no gradient is deferred yet.
    together = (memory_of(run, job_of(run)).ranks[0][name] for name in ("activations", "gradients"))
    assert sum(together) < sum(peaks(run, 0))
