"""Traffic of the two ends of the network and between its stages: the embedding, the head, the loss, the residual stream;
and of gradients that several ranks have parts of. A part of `traffic.py`."""

from __future__ import annotations

from functools import lru_cache

from shardwise.plan.trainer.rank import planned_rank
from shardwise.plan.trainer.saved import saved
from shardwise.plan.trainer.units import tokens_of_chunk
from shardwise.plan.trainer.wire import Wire
from shardwise.run import Run
from shardwise.run.derive import JOINED
from shardwise.run.dtypes import INT64
from shardwise.schedules import evictions


def ends(wire: Wire) -> None:
    """`tensor.py`: reduce-scatter forward and all-gather backward for the embedding, the reverse for the head; and the loss."""
    planned, n = wire.planned, wire.planned.run.stage_microbatches
    numel = planned.local_tokens * planned.run.model.hidden
    # Rows have the embedding's dtype, which is the compute dtype only where the all-gather cast it or it is frozen.
    learns, backward = not planned.run.adapter.used, 0 if wire.forward_only else n
    looked_up = planned.width if planned.is_sharded or wire.frozen or not learns else planned.high_width
    for stage in planned.stages:
        if stage.first:
            wire.reduce_scatter("tensor", numel * looked_up, n)
            wire.all_gather("tensor", numel * looked_up, backward if learns else 0)
        if stage.last:
            if planned.objective.scores:  # every rank scores its slice of the sequence
                wire.all_reduce("tensor", planned.tokens * planned.high_width, n)
            else:
                _vocabulary(wire, numel * planned.width)
            _document_sums(wire)


def _vocabulary(wire: Wire, shard: int) -> None:
    """The head's input all-gathered, its gradient reduce-scattered, and the results of each rank's slice of the vocabulary."""
    planned, n = wire.planned, wire.planned.run.stage_microbatches
    backward = 0 if wire.forward_only else n
    wire.all_gather("tensor", shard, n)
    wire.reduce_scatter("tensor", shard, backward)
    if (not planned.run.adapter.used or planned.objective.logprobs) and not planned.chunked:
        wire.all_gather("tensor", shard, backward)  # once more in the backward pass
    rows = tokens_of_chunk(planned) if planned.chunked else planned.tokens
    teaches = wire.frozen and planned.objective.teacher
    numbers = 2 if teaches else 2 + planned.targets  # the max, the sum, and the logits of targets
    wire.all_reduce("tensor", numbers * planned.tokens * planned.high_width, n, messages=2 * -(-planned.tokens // rows))
    if teaches:  # each rank's largest logits, and their token ids
        wire.all_gather("tensor", (planned.targets - 1) * planned.tokens * (planned.high_width + INT64), n, messages=2)


def _document_sums(wire: Wire) -> None:
    """`objective.py`: sums over documents that are cut over the context ranks."""
    planned = wire.planned
    sums = planned.objective.sums
    if wire.forward_only:
        sums = planned.objective.forward_only if wire.adapted and not wire.frozen else 0  # not of a reference
    slots = planned.run.train.microbatch * planned.run.train.seq_len
    wire.all_reduce("context", sums * slots * planned.high_width, planned.run.stage_microbatches if sums else 0)


def pipeline(wire: Wire) -> None:
    """`pipeline.py`: the residual stream is sent to the next stage and its gradient to the previous one, where these are on other
    ranks. `gradients.py`: the gradients of a tied embedding, and of two ranks with the same stages, are all-reduced."""
    planned, m, home = wire.planned, wire.planned.run.model, wire.planned.placement
    for stage in planned.stages:
        sides = (stage.number + 1,) if wire.forward_only else (stage.number - 1, stage.number + 1)
        near = (n for n in sides if 0 <= n < len(home))
        away = sum(home[n] != home[stage.number] for n in near)
        wire.send("pipeline", planned.residual, planned.run.stage_microbatches * away)
    if planned.run.layout.schedule == "bpipe" and not wire.forward_only:
        _handed(wire)
    learns = not planned.run.adapter.used and not wire.forward_only
    if learns and m.tied_embeddings and home[0] != home[-1] and planned.index("pipeline") in (home[0], home[-1]):
        end = planned.stages[0] if planned.stages[0].first else planned.stages[-1]
        matrix = planned.vocabulary(end)
        wire.all_reduce("pipeline", matrix.own_numel(*planned.sharding(matrix)) * planned.high_width, ranks=2)
    if planned.run.layout.directions > 1 and not wire.forward_only:
        for count, p in planned.parameters():
            copied = planned.keeps_compute_copies and p.is_gemm_weight
            size = p.own_numel(*planned.sharding(p)) * (planned.width if copied else planned.high_width) * p.learns
            wire.all_reduce("pipeline", size, count if size else 0, ranks=2)


@lru_cache(maxsize=256)
def handed_bytes(run: Run, rank: int, stage: int) -> int:
    """Bytes that a stage of this rank, or of its partner in a BPipe pipeline, hands over for a microbatch: its saved tensors,
    without the output that went on to the next stage (`parallel/activations/handover.py`)."""
    planned = planned_rank(run, rank)
    away = planned.placement[stage] - planned.index("pipeline")
    home = planned_rank(run, rank + away * run.layout.world // run.layout.pipeline)
    return next(saved(home, one).whole for one in home.stages if one.number == stage) - home.residual


def _handed(wire: Wire) -> None:
    """Microbatches that the rank evicts to its partner, and those of the partner that it sends back."""
    planned, run = wire.planned, wire.planned.run
    ranks, mine = run.layout.pipeline, planned.index("pipeline")
    for rank in {mine, ranks - 1 - mine}:
        if 2 * rank < ranks and (count := evictions(ranks, rank, run.accumulation)):
            wire.send("pipeline", handed_bytes(run, planned.rank, rank), count)
            if rank == mine and run.model.experts:  # the size of each goes before it
                wire.send("pipeline", INT64, count)


def uncut_gradients(wire: Wire) -> None:
    """`gradients.py`: gradients of parameters not cut over the tensor ranks, each of which saw only some tokens or heads."""
    planned = wire.planned
    if planned.size("tensor") > 1:
        some = ((count, p) for count, p in planned.parameters() if p.tensor_dim is None and p.learns)
        uncut = [(count, p.own_numel(*planned.sharding(p))) for count, p in some]
        small = [count * numel for count, numel in uncut if numel <= JOINED]
        wire.all_reduce("tensor", sum(small) * planned.high_width, messages=1 if small else 0)
        for count, numel in uncut:
            wire.all_reduce("tensor", numel * planned.high_width, count if numel > JOINED else 0)
