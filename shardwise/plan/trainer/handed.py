"""The saved tensors that a rank of a BPipe pipeline sends to its partner and returns to it (`parallel/activations/handover.py`)."""

from __future__ import annotations

from functools import lru_cache

from shardwise.plan.trainer.rank import planned_rank
from shardwise.plan.trainer.rows import INTEGER
from shardwise.plan.trainer.saved import saved
from shardwise.plan.trainer.wire import Wire
from shardwise.run import Run
from shardwise.schedules import evictions


@lru_cache(maxsize=256)
def handed_bytes(run: Run, rank: int, stage: int) -> int:
    """Bytes that a stage of this rank, or of its partner, hands over for a microbatch: its saved tensors, without the output that
    went on to the next stage."""
    planned = planned_rank(run, rank)
    away = planned.placement[stage] - planned.index("pipeline")
    home = planned_rank(run, rank + away * run.layout.world // run.layout.pipeline)
    return next(saved(home, one).whole for one in home.stages if one.number == stage) - home.residual


def handed(wire: Wire) -> None:
    """Microbatches that the rank evicts to its partner, and those of the partner that it sends back."""
    planned, run = wire.planned, wire.planned.run
    ranks, mine = run.layout.pipeline, planned.index("pipeline")
    for rank in {mine, ranks - 1 - mine}:
        if 2 * rank < ranks and (count := evictions(ranks, rank, run.accumulation)):
            wire.send("pipeline", handed_bytes(run, planned.rank, rank), count)
            if rank == mine and run.model.experts:  # the size of each goes before it
                wire.send("pipeline", INTEGER, count)
