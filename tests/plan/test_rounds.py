"""What plans read off a few rounds of a schedule is what the whole list says."""

from __future__ import annotations

import pytest

from shardwise.plan.trainer.rank import PlannedRank
from shardwise.run import Run, run_from_dict
from shardwise.run.axes import BIDIRECTIONAL, V_SHAPED
from shardwise.schedules import SCHEDULES, Schedule, make_schedule


def run(schedule: str, ranks: int, chunks: int, microbatches: int) -> Run:
    layers = 2 * ranks * chunks
    return run_from_dict(
        dict(
            model=dict(layers=layers),
            layout=dict(pipeline=ranks, schedule=schedule, chunks=chunks),
            train=dict(global_batch=microbatches, microbatch=1, seq_len=16, clip=0.0),
        )
    )


def ever_empty(schedule: Schedule, rank: int, stage: int) -> bool:
    depth, empty = 0, []
    for kind, number, _ in schedule.ranks[rank]:
        if number == stage and kind in "FBI":
            depth += 1 if kind == "F" else -1
            empty.append(depth == 0)
    return any(empty[:-1])


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_few_rounds_say_what_the_whole_list_says(name: str) -> None:
    chunks = {"interleaved": (2, 3), "breadth-first": (2,)}.get(name, (2,) if name in V_SHAPED else (1,))
    for ranks in (2, 4, 6) if name in BIDIRECTIONAL else (2, 3, 5):
        for each in chunks:
            for microbatches in (1, 2, 9, 4 * ranks, 4 * ranks + 1, 7 * ranks, 7 * ranks + 2, 39):
                if (name == "pipedream-2bw" and microbatches < ranks) or (name in BIDIRECTIONAL and microbatches % 2):
                    continue  # refused
                whole = make_schedule(name, ranks, microbatches, each)
                one = run(name, ranks, each, microbatches)
                for rank in range(ranks):
                    place = PlannedRank(one, rank)
                    assert place.splits_backward == any(a.kind == "I" for a in whole.ranks[0])
                    for stage in whole.stages_of(rank):
                        seen = stage in place.dry_stages
                        assert seen == ever_empty(whole, rank, stage), (ranks, each, microbatches, rank, stage)
