"""Operations of attention itself: scores, softmax and values, and what context ranks send and merge."""

from __future__ import annotations

import numpy as np

from shardwise.hardware import alignment, attention_seconds, collective_seconds, gemm_seconds
from shardwise.plan.cost.flops import keys_seen
from shardwise.plan.cost.job import Number
from shardwise.plan.cost.ops import Op, OpList, span

BLOCKS = 0.77
"""Speed of this trainer's own forward kernel for blocks of keys, whose outputs are in float32, beside cuDNN's: on an H200 464
TFLOP/s over 128k tokens on 8 ranks, and 480 to 532 of single blocks, where cuDNN makes 615 to 668.
On Ampere PyTorch takes flash attention instead, which it is taken to be as fast as."""
SLICES = 1.8
"""How many times as long as its bytes need merging blocks takes, which runs over slices: on an H200, the same 128k tokens."""


def attention_core(ops: OpList, heads: Number, kv_heads: Number, head_dim: int, v_dim: int) -> None:
    """Scores, softmax and values: in one fused kernel, or in three steps that write the full score matrix."""
    job = ops.job
    chip, framework = job.cluster.chip, job.framework
    length, batch, width = job.seq_len, job.microbatch, job.width
    queries = length / job.layout.context
    inputs = batch * queries * (heads * head_dim + kv_heads * (head_dim + v_dim)) * width
    if framework.attention == "unfused":
        full = 2.0 * batch * heads * queries * length
        for name, columns, inner in (("scores", length, head_dim), ("values", v_dim, length)):
            dim, saved = (head_dim, inputs) if name == "scores" else (v_dim, 0.0)
            sizes = (queries, columns, inner), (queries, inner, columns), (inner, columns, queries)
            one, two, three = (
                gemm_seconds(chip, m, n, k, job.dtype, count=batch * heads) / alignment(dim) for m, n, k in sizes
            )
            flops = full * dim
            seconds, by_pass = (one, two + three, 0.0), (flops, 2 * flops, 0.0)
            ops.append(
                Op(name, "attention", "attention", seconds, by_pass, saved=saved, saved_inputs=saved,
                   launches=(1.0, 2.0, 0.0), core=True)
            )  # fmt: skip
        numel = batch * heads * queries * length
        drop = 1.0 if framework.dropout else 0.0
        moved = numel * (2 * width + drop * (2 * width + 1)), numel * (3 * width + drop * (2 * width + 1))
        saved = numel * (width + drop * (width + 1))
        ops.elementwise("softmax", "attention", *moved, saved=saved, core=True, launches=(2.0, 2.0))
        return
    seen = keys_seen(job.model, length)
    flops = 2.0 * batch * queries * seen * heads * (head_dim + v_dim)
    # So many keys that a causal query sees `seen` of them on average; context ranks have equal shares of this work.
    alone = np.asarray(job.layout.context) == 1
    keys = np.where(alone, 2.0 * seen, seen + np.minimum(queries, 2.0 * seen) / 2)
    shape = dict(batch=batch, heads=heads, queries=queries, keys=keys, head_dim=head_dim, v_dim=v_dim)
    shape |= dict(causal=True, dtype=job.dtype, kv_heads=kv_heads, kernel=framework.attention)
    forward, backward = (attention_seconds(chip, **shape, direction=way) for way in ("forward", "backward"))
    if framework.family == "shardwise" and chip.name != "cpu" and job.layout.context_method != "ulysses":
        forward = forward / np.where(alone | (chip.generation == "ampere"), 1.0, BLOCKS)
        _merge_blocks(ops, batch * queries, heads * v_dim, heads * head_dim, kv_heads * (head_dim + v_dim))
    # The output is saved by the GEMM that follows.
    ops.append(
        Op("attention", "attention", "attention", (forward, backward, 0.0), (flops, 2.5 * flops, 0.0),
           saved=inputs + 4 * batch * queries * heads, saved_inputs=inputs, launches=(2.0, 3.0, 0.0), core=True)
    )  # fmt: skip


def _merge_blocks(ops: OpList, rows: Number, out: Number, queries: Number, keys: Number) -> None:
    """What ring and gathered attention do beside their kernels (`parallel/context.py`), given the elements of a row. Forward, an
    output in float32 is scaled and added to (8 and 12 bytes) for every further block, and rounded at last (6). Backward, row sums
    are made (4). In a ring the gradients of three quarters of the queries and keys, on average, are added for each block (10), and
    those of queries begin as zeros in float32 and are rounded at last (10). Gathered, two gradients of a query are added in 16 bits
    (6), and one or two of each key of all ranks (5)."""
    c = np.asarray(ops.job.layout.context)
    ring = ops.job.layout.context_method == "ring"
    merged, added = (0.75 * (c - 1.0), 0.75 * c) if ring else (1.0, 2.0)
    joined = 10.0 * queries + 10.0 * added * (queries + keys) if ring else 6.0 * queries + 5.0 * c * keys
    moved = (20.0 * merged + 6.0) * out, 4.0 * out + joined
    some = 1.0 * (c > 1)
    sizes = (rows * each * some for each in moved)
    # Some 10 bare kernels a merge and 6 a sum, each a quarter of a launch under autograd and modules.
    often = some / ops.kernels_each
    launches: tuple[Number, Number] = (2.5 * merged * often, 1.5 * added * often)
    ops.elementwise("blocks merged", "attention", *sizes, launches=launches, longer=(SLICES, SLICES), core=True)


def context_traffic(ops: OpList, heads: Number, kv_heads: Number, head_dim: int, v_dim: int) -> None:
    """The traffic of attention with the other slices of the sequence (`parallel/context.py`)."""
    job = ops.job
    method, c = job.layout.context_method, job.layout.context
    keys = job.rows * kv_heads * (head_dim + v_dim) * job.width
    if method == "ulysses":
        queries = job.rows * heads * (head_dim + v_dim) * job.width
        keys = keys * np.where(
            kv_heads % c == 0, 1.0, heads / kv_heads
        )  # they are repeated where they cannot be dealt out
        ops.collective("attention", "context", "all_to_all", queries + keys, (1.0, 1.0, 0.0))
    elif method == "gather":
        ops.collective("attention", "context", "all_gather", keys * c, (1.0, 0.0, 0.0))
        ops.collective("attention", "context", "reduce_scatter", keys * c, (0.0, 1.0, 0.0))
    else:
        hop = collective_seconds(job.cluster, "send", keys, *span(job, "context"))
        seconds = (hop * (c - 1), hop * (2 * c - 1), 0.0)
        ops.append(Op("context send", "attention", "context", seconds, launches=(0.0, 0.0, 0.0)))
