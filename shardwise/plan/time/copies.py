"""The memory traffic of `fully_shard` on a rank beside its collectives: shards are cast before the all-gather, gathered parameters
are copied out of its buffer, gradients are accumulated and copied into the buffer of the reduce-scatter.

Bytes for each parameter, with w the bytes of a gathered one, r of a gradient as it is reduced, p of a parameter as it is held; a
rank holds a z-th of each (PyTorch's `_fsdp_collectives.py` and `_fsdp_param.py`):
- to gather it: (p + w) / z to cast the shard, and, unless it is gathered in place, 2w / z into the buffer and 2w out of it. With
  ZeRO-1 and 2 once a step, with ZeRO-3 for every microbatch's forward and again for its backward pass.
- its gradient, where it is reduced at once (ZeRO-2 and 3): w + r into the buffer, or w + r / z to add up what the ranks of a
  machine sent each other (`parallel/in_place.py`); and 3p / z to add the shard to that of earlier microbatches.
- its gradient, where it is reduced at the end of a step (ZeRO-1, split backward passes): the first microbatch's is cast, w + r;
  each further one is added, w + 2r; the sum is copied into the buffer, 2r. Of one microbatch as under ZeRO-2, unless passes are
  split.
- a shard that was reduced in another dtype than parameters are held in is cast: (r + p) / z.
`tests/measure/test_copies.py` counts these bytes in the trainer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwise.hardware import memory_seconds
from shardwise.plan.cost.job import Job, Number
from shardwise.plan.cost.parameters import LocalNumel, zero_groups


class CopySeconds(NamedTuple):
    """Seconds of `fully_shard`'s casts, copies and sums, before the constants."""

    forward: Number
    """In every microbatch."""
    backward: Number
    once: Number
    """Once a step; negative where the first microbatch has less to do than the others."""
    several: Number
    """Likewise, where a step has several microbatches."""


def copy_seconds(job: Job, held: LocalNumel, messages: Number) -> CopySeconds:
    """Seconds for the parameters of a stage, which are sent in this many messages."""
    total = CopySeconds(*[0.0 * held.dense] * 4)
    if not job.framework.fully_shard:
        return total
    zero, expert_zero = zero_groups(job)
    of_experts = job.model.experts / job.layout.expert % expert_zero == 0  # whether they are sharded expert by expert
    for count, ranks, there, in_rows in zip(
        held, (zero, expert_zero), job.fully_sharded, (1.0, of_experts), strict=True
    ):
        each = count * there / messages
        own = (
            messages * np.sign(b) * memory_seconds(job.cluster.chip, each * abs(b))
            for b in copied_bytes(job, ranks, in_rows)
        )
        total = CopySeconds(*(a + b for a, b in zip(total, own, strict=True)))
    return total


def copied_bytes(job: Job, ranks: Number, in_rows: Number = 1.0) -> CopySeconds:
    """Bytes for each parameter, sharded over this many ranks; `in_rows`: 1 where that is along its first dimension."""
    framework, learned = job.framework, job.learned
    gathered, reduced, held = framework.gather_bytes, framework.reduce_bytes, framework.parameter_bytes
    cast, moved = (held + gathered) * (held != gathered) * (not job.adapter.used), job.gathered_bytes
    in_place = job.framework.gathers_in_place * in_rows
    gather = cast / ranks + (2.0 * moved + 2.0 * moved / ranks) * (1.0 - in_place)
    exchanged = job.exchanges_gradients * in_rows
    back, several = (reduced + held) * (reduced != held) / ranks, 0.0
    if job.reduces_each_microbatch:
        added = 3.0 * held / ranks
        sent = gathered + reduced * (1.0 - exchanged + exchanged / ranks)
        each, first = sent + back + added, -added
    else:
        each, first = gathered + 2.0 * reduced, back - reduced
        several = 2.0 * reduced * (gathered != reduced)
        if (
            framework.family == "shardwise" and job.layout.splits_backward
        ):  # gradients are deferred, even of one microbatch
            first, several = first + several, 0.0
    each, first, several = each * learned, first * learned, several * learned
    if job.layout.gathers_each_pass:
        return CopySeconds(gather, gather + each, first, several)
    return CopySeconds(0.0 * gather, each, gather + first, several)
